#include "launch/layout_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <set>

#include "core/base/text.h"
#include "launch/engine_options.h"
#include "launch/layout_plan.h"
#include "launch/memory.h"

namespace shoal {

namespace {

constexpr int kAllRows = 64, kFirstRows = 24, kLastRows = 8;  // ranks shown: all, or the first and the last

std::string range_text(const ShardRange& range) {
  if (range.begin == range.end) return "-";
  return range.end - range.begin == 1 ? str(range.begin) : str(range.begin, '-', range.end - 1);
}

/// A table of right-aligned cells under their headings; columns of one value for all are kept.
std::string aligned(const std::vector<std::vector<std::string>>& rows, size_t num_left) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t c = 0; c < row.size(); c++) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t c = 0; c < row.size(); c++)
      line += c < num_left ? fmt::format("{:<{}}  ", row[c], widths[c])
                           : fmt::format("{:>{}}  ", row[c], widths[c]);
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

class Page {
 public:
  Page(const TrainConfig& config, const ParallelLayout& layout, int64_t vocab_size)
      : config_(config),
        layout_(layout),
        vocab_size_(vocab_size),
        options_(engine_options(config, vocab_size)),
        model_(config.model_options().sizes()),
        world_(layout.tp * layout.cp * layout.dp * layout.pp) {
    one_node_ = layout_.ranks_per_node == 0;
    if (one_node_) layout_.ranks_per_node = world_;
    const int64_t micro_batch = sequences_per_pass(config, layout_);
    sizes_ = {micro_batch, config.data.seq_len, config.data.global_batch / (micro_batch * layout_.dp)};
    stages_ = stages_of_ranks(options_, layout_);
    for (int rank = 0; rank < world_; rank++) plans_.push_back(plan_rank(options_, layout_, rank, sizes_));
  }

  std::string text() const { return head() + "\n" + grids() + "\n" + needs() + "\n" + traffic(); }

 private:
  std::string head() const {
    const ParallelLayout& l = layout_;
    std::string out = str("ranks      ", world_,
                          one_node_ ? " on one node (parallel.ranks_per_node is auto)"
                                    : str(", ", l.ranks_per_node, " on each node"),
                          "\n");
    out += str("dense      tp ", l.tp, " x cp ", l.cp, " x dp ", l.dp, " x pp ", l.pp, ", tp fastest\n");
    out += str("experts    etp ", l.etp, " x ep ", l.ep, " x edp ", l.edp, " x pp ", l.pp,
               ", etp fastest; dispatcher ", config_.parallel.dispatcher.kind, "\n");
    out += str(
        "model      ",
        human_count(static_cast<double>(config_.model_options().facts(vocab_size_, sizes_.seq).params_total)),
        " parameters, vocabulary ", vocab_size_, ", ", config_.run.precision, ", zero ",
        config_.parallel.zero, "\n");
    out += str("step       ", config_.data.global_batch, " sequences of ", sizes_.seq,
               " tokens; a rank's: ", sizes_.num_micro_batches, " micro-batch",
               sizes_.num_micro_batches == 1 ? "" : "es", " of ", sizes_.batch, "\n");
    return out;
  }

  /// One column of the table of ranks; left out where it says nothing.
  struct Column {
    std::string name;
    bool shown;
    std::function<std::string(const RankPlan&)> cell;
  };

  std::vector<Column> columns() const {
    std::vector<Column> all = {
        {"rank", true, [](const RankPlan& p) { return str(p.rank); }},
        {"node", !one_node_, [&](const RankPlan& p) { return str(p.rank / layout_.ranks_per_node); }}};
    for (const Axis axis : {Axis::tp, Axis::cp, Axis::dp, Axis::pp, Axis::etp, Axis::ep, Axis::edp}) {
      all.push_back({axis_name(axis), plans_[0].coords[axis].size > 1,
                     [axis](const RankPlan& p) { return str(p.coords[axis].index); }});
    }
    all.push_back({"layers", true, [&](const RankPlan& p) { return layers_of(p); }});
    const auto part = [](int64_t size, Axis axis) {
      return [=](const RankPlan& p) { return range_text(shard_range(size, p.coords[axis])); };
    };
    all.push_back({"kv heads", layout_.tp > 1, [&](const RankPlan& p) { return heads_of(p); }});
    all.push_back({"vocabulary", layout_.tp > 1, part(vocab_size_, Axis::tp)});
    all.push_back({"positions", layout_.cp > 1, [&](const RankPlan& p) { return positions_of(p); }});
    all.push_back({"experts", layout_.ep > 1, part(model_.num_experts, Axis::ep)});
    all.push_back({"expert width", layout_.etp > 1, part(model_.expert_width, Axis::etp)});
    std::erase_if(all, [](const Column& c) { return !c.shown; });
    return all;
  }

  std::string layers_of(const RankPlan& p) const {
    const AxisCoord pp = p.coords[Axis::pp];
    std::vector<std::string> parts;
    if (pp.index == 0) parts.emplace_back("embedding");
    for (const StageLayers& s : stages_[static_cast<size_t>(pp.index)])
      if (s.begin < s.end) parts.push_back(range_text({s.begin, s.end}));
    if (pp.index == pp.size - 1) parts.emplace_back("head");
    return join(parts, " + ");
  }
  /// Key/value heads; ranks that outnumber them share each.
  std::string heads_of(const RankPlan& p) const {
    return range_text(
        shard_range(model_.kv_heads, part_of({0, Axis::tp, static_cast<int>(model_.kv_heads)}, p.coords)));
  }
  std::string positions_of(const RankPlan& p) const {
    const PositionRuns runs = context_runs(sizes_.seq, p.coords[Axis::cp]);
    std::vector<std::string> parts;
    for (size_t i = 0; i < runs.begin.size(); i++)
      parts.push_back(range_text({runs.begin[i], runs.begin[i] + runs.count[i]}));
    return join(parts, " + ");
  }

  std::string grids() const {
    const std::vector<Column> shown = columns();
    std::vector<std::vector<std::string>> rows(1);
    for (const Column& c : shown) rows[0].push_back(c.name);
    const bool all = world_ <= kAllRows;
    for (int r = 0; r < world_; r++) {
      if (!all && r == kFirstRows) {
        rows.push_back({"..."});
        r = world_ - kLastRows;
      }
      rows.emplace_back();
      for (const Column& c : shown) rows.back().push_back(c.cell(plans_[static_cast<size_t>(r)]));
    }
    return aligned(rows, 0) +
           (all ? "" : str("ranks ", kFirstRows, " to ", world_ - kLastRows - 1, " go on in the same way\n"));
  }

  /// Least and most over the ranks, and the first rank with the most.
  std::vector<std::string> spread(const std::string& name, bool bytes,
                                  const std::function<int64_t(const RankPlan&)>& value) const {
    const auto text = [&](const RankPlan& p) {
      return bytes ? human_bytes(value(p)) : human_count(static_cast<double>(value(p)));
    };
    const auto less = [&](const RankPlan& a, const RankPlan& b) { return value(a) < value(b); };
    const RankPlan& most = *std::ranges::max_element(plans_, less);
    return {name, text(*std::ranges::min_element(plans_, less)), text(most), str(most.rank)};
  }

  std::string needs() const {
    std::vector<std::vector<std::string>> rows = {{"of a rank", "least", "most", "rank"}};
    rows.push_back(spread("parameters", false, [](const RankPlan& p) { return p.num_params; }));
    rows.push_back(spread("weights", true, [](const RankPlan& p) { return p.weight_bytes; }));
    rows.push_back(spread("gradients", true, [](const RankPlan& p) { return p.gradient_bytes; }));
    rows.push_back(spread("optimizer state", true, [](const RankPlan& p) { return p.optimizer_bytes; }));
    rows.push_back(spread("weights to state", true, [](const RankPlan& p) {
      return p.weight_bytes + p.gradient_bytes + p.optimizer_bytes;
    }));
    const MemoryEstimate memory = estimate_memory(config_, layout_, vocab_size_);
    const auto rounded = [](double bytes) {
      return human_bytes(static_cast<int64_t>(std::min(bytes, 9e18)));
    };
    rows.push_back({"activations", "", "about " + rounded(memory.activations)});
    rows.push_back({"work of backward", "", "about " + rounded(memory.work)});
    if (memory.packed_weights > 0)
      rows.push_back({"bf16 copies", "", "about " + rounded(memory.packed_weights)});
    rows.push_back({"memory, predicted", "", "about " + memory.total_text()});
    return aligned(rows, 1);
  }

  static LinkBytes sent_in(const Traffic& traffic, const std::string& group) {
    const auto found = traffic.find(group);
    return found == traffic.end() ? LinkBytes{} : found->second.total().sent;
  }

  std::string traffic() const {
    std::vector<Traffic> totals;
    std::set<std::string> names;
    for (const RankPlan& p : plans_) {
      totals.push_back(p.total());
      for (const auto& [name, group] : totals.back()) names.insert(name);
    }
    if (names.empty()) return "sent       nothing: there is one rank\n";
    std::vector<std::vector<std::string>> rows = {{"sent in a step", "forward", "backward", "update",
                                                   "counts", "in node", "between", "most", "rank", "least"}};
    const auto add = [&](const std::string& title, const std::function<LinkBytes(const Traffic&)>& sent) {
      size_t most = 0, least = 0;
      for (size_t r = 1; r < totals.size(); r++) {
        const LinkBytes bytes = sent(totals[r]), so_far = sent(totals[most]);
        if (std::pair(bytes.total(), bytes.between_nodes) > std::pair(so_far.total(), so_far.between_nodes))
          most = r;
        if (bytes.total() < sent(totals[least]).total()) least = r;
      }
      const RankPlan& p = plans_[most];
      std::vector<std::string> row = {title};
      for (const Traffic* part : {&p.forward, &p.backward, &p.update, &p.counts}) {
        const int64_t bytes = sent(*part).total();
        row.push_back(bytes == 0 ? "-" : human_bytes(bytes));
      }
      const LinkBytes all = sent(totals[most]);
      for (const int64_t bytes : {all.within_node, all.between_nodes})
        row.push_back(bytes == 0 ? "-" : human_bytes(bytes));
      row.push_back(human_bytes(all.total()));
      row.push_back(str(p.rank));
      row.push_back(human_bytes(sent(totals[least]).total()));
      rows.push_back(std::move(row));
    };
    for (const std::string& name : names) add(name, [&](const Traffic& t) { return sent_in(t, name); });
    add("all", [](const Traffic& t) { return bytes_sent(t); });
    return aligned(rows, 1) +
           "Each row is of the rank that sends most there, of several the one that sends most to other "
           "nodes.\n"
           "Routing is taken to be balanced.\n";
  }

  const TrainConfig& config_;
  ParallelLayout layout_;
  int64_t vocab_size_;
  EngineOptions options_;
  ModelSizes model_;
  int world_;
  bool one_node_ = false;
  PassSizes sizes_;
  std::vector<std::vector<StageLayers>> stages_;
  std::vector<RankPlan> plans_;
};

}  // namespace

std::string layout_page(const TrainConfig& config, const ParallelLayout& layout, int64_t vocab_size) {
  return Page(config, layout, vocab_size).text();
}

}  // namespace shoal
