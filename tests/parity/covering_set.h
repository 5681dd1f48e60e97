// The parity table's rows: every legal layout of 2, 4 and 8 ranks over {tp, cp, dp, pp, ep, etp} x zero, with
// every schedule, way of context parallelism, number of micro-batches, balance, capacity, dispatcher,
// recomputation and number type, for two models, pruned to a set in which each pair of settings that can be
// together is together at least once (pairwise covering; most faults of combined settings need two of them).
// The same rows in each run.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "tests/parity/expect_parity.h"

namespace shoal::testing {

/// Settings by number. The first kBlock depend on each other; the others are free.
enum Factor : uint8_t {
  kModel,
  kWorld,
  kTp,
  kCp,
  kPp,
  kEtp,
  kEp,
  kDp,  // what the others leave, like edp
  kEdp,
  kZero,
  kSchedule,
  kContext,
  kAccumulation,
  kBlock,
  kBalance = kBlock,
  kCapacity,
  kDispatcher,
  kRecompute,
  kNumbers,
  kFactors
};
using TableRow = std::array<int, kFactors>;

inline const std::vector<std::string>& table_values(Factor factor) {
  static const std::map<Factor, std::vector<std::string>> values = {
      {kModel, {"even", "uneven"}},
      {kSchedule, {"", "1f1b", "gpipe", "interleaved", "zero_bubble"}},
      {kContext, {"", "all_gather", "ring"}},
      {kBalance, {"none", "sequence", "global", "z_loss", "bias"}},
      {kCapacity, {"off", "position", "probability"}},
      {kDispatcher, {"all_to_all", "all_gather", "hierarchical"}},
      {kRecompute, {"none", "[norms, activations, up_projections]", "block"}},
      {kNumbers, {"f64", "f32"}}};
  return values.at(factor);
}

inline ParityCase table_case(const TableRow& row) {
  const auto text = [&](Factor f) { return table_values(f)[static_cast<size_t>(row[f])]; };
  ParityCase c;
  c.tp = row[kTp];
  c.cp = row[kCp];
  c.pp = row[kPp];
  c.etp = row[kEtp];
  c.ep = row[kEp];
  c.zero = row[kZero];
  c.accumulation = row[kAccumulation];
  if (c.pp > 1) c.schedule = text(kSchedule);
  if (c.schedule == "interleaved") c.virtual_stages = 2;
  if (c.cp > 1) c.context = text(kContext) == "ring" ? ContextKind::ring : ContextKind::all_gather;
  c.balance = text(kBalance);
  c.capacity = text(kCapacity);
  c.dispatcher = text(kDispatcher);
  if (c.dispatcher == "hierarchical") c.ranks_per_node = row[kWorld] / 2;
  c.recompute = text(kRecompute);
  c.dtype = text(kNumbers) == "f64" ? DType::f64 : DType::f32;
  c.model = "layers: 4, heads: 4, kv_heads: 2";
  if (row[kModel] == 1) {
    c.model =
        "layers: 4, heads: 8, kv_heads: 4, head_size: 4, bias: true, tie_embeddings: false, ffn: {hidden: "
        "11}";
    c.num_experts = 7;
    c.top_k = 3;
    c.expert_hidden = 9;
  }
  return c;
}

/// Whether the layout of a row is legal, by the function that decides it for runs.
inline bool is_legal(const TableRow& row) {
  const ParityCase c = table_case(row);
  ParallelOptions options;
  options.tp = c.tp;
  options.cp = c.cp;
  options.pp = c.pp;
  options.etp = c.etp;
  options.ep.value = c.ep;
  options.zero = c.zero;
  options.pipeline.schedule = c.schedule;
  options.pipeline.virtual_stages = c.virtual_stages;
  const Choice model = parity_model(c);
  const auto& model_options = dynamic_cast<const ModelOptions&>(*model.options);
  const LayoutFacts facts{.world_size = row[kWorld],
                          .model = model_options.sizes(),
                          .global_batch = row[kDp] * c.accumulation,
                          .micro_batch = 1};
  ConfigErrors errors;
  resolve_layout(options, facts, ConfigNode{}, errors);
  return errors.empty();
}

/// All legal rows of the settings that depend on each other.
inline std::vector<TableRow> legal_layouts(int world) {
  std::vector<TableRow> rows;
  TableRow row{};
  row[kWorld] = world;
  const std::vector<int> degrees = {1, 2, 4, 8};
  const auto each = [&](Factor factor, const std::vector<int>& values, const auto& next) {
    for (const int value : values) {
      row[factor] = value;
      next();
    }
  };
  const auto ends = [&] {
    if (world % (row[kTp] * row[kCp] * row[kPp]) != 0 || world % (row[kEtp] * row[kEp] * row[kPp]) != 0)
      return;
    row[kDp] = world / (row[kTp] * row[kCp] * row[kPp]);
    row[kEdp] = world / (row[kEtp] * row[kEp] * row[kPp]);
    const std::vector<int> schedules = row[kPp] > 1 ? std::vector{1, 2, 3, 4} : std::vector{0},
                           contexts = row[kCp] > 1 ? std::vector{1, 2} : std::vector{0};
    each(kModel, {0, 1}, [&] {
      each(kZero, {0, 1, 2, 3}, [&] {
        each(kSchedule, schedules, [&] {
          each(kContext, contexts, [&] {
            each(kAccumulation, {1, 2, 4}, [&] {
              if (is_legal(row)) rows.push_back(row);
            });
          });
        });
      });
    });
  };
  each(kTp, degrees, [&] {
    each(kCp, degrees,
         [&] { each(kPp, degrees, [&] { each(kEtp, degrees, [&] { each(kEp, degrees, ends); }); }); });
  });
  return rows;
}

/// Which pairs of settings are together in some row.
class PairSet {
 public:
  bool has(int i, int a, int j, int b) const { return pairs_[index(i, a, j, b)]; }
  void set(int i, int a, int j, int b, bool present) { pairs_[index(i, a, j, b)] = present; }

 private:
  static constexpr int kValues = 16;
  static size_t index(int i, int a, int j, int b) {
    return static_cast<size_t>(((i * kValues + a) * kFactors + j) * kValues + b);
  }
  std::vector<bool> pairs_ = std::vector<bool>(size_t{kFactors} * kValues * kFactors * kValues);
};

class CoveringSet {
 public:
  /// `layouts`: legal ones; each gets settings that do not depend on it. At least `at_least` rows.
  CoveringSet(std::vector<TableRow> layouts, size_t at_least) : layouts_(std::move(layouts)) {
    for (const TableRow& row : layouts_) want_pairs_of_layout(row);
    for (int i = kBlock; i < kFactors; i++)
      for (int a = 0; a < num_values(i); a++)
        for (int j = i + 1; j < kFactors; j++)
          for (int b = 0; b < num_values(j); b++) wanted_.set(i, a, j, b, true);
    for (int i = 0; i < kFactors; i++)
      for (int a = 0; a < kMost; a++)
        for (int j = i + 1; j < kFactors; j++)
          for (int b = 0; b < kMost; b++)
            while (wanted_.has(i, a, j, b)) add_row_with(i, a, j, b);
    // Layouts that were not needed for any pair, evenly spread.
    for (size_t n = 0; rows_.size() < at_least; n++) {
      TableRow row = layouts_[n * 7919 % layouts_.size()];
      for (int f = kBlock; f < kFactors; f++)
        row[static_cast<size_t>(f)] = static_cast<int>(n + static_cast<size_t>(f)) % num_values(f);
      rows_.push_back(row);
    }
  }
  const std::vector<TableRow>& rows() const { return rows_; }

 private:
  static constexpr int kMost = 9;
  static int num_values(int free_factor) {
    return static_cast<int>(table_values(static_cast<Factor>(free_factor)).size());
  }
  static int at(const TableRow& row, int factor) { return row[static_cast<size_t>(factor)]; }

  void want_pairs_of_layout(const TableRow& row) {
    for (int i = 0; i < kBlock; i++) {
      for (int j = i + 1; j < kBlock; j++) wanted_.set(i, at(row, i), j, at(row, j), true);
      for (int j = kBlock; j < kFactors; j++)
        for (int b = 0; b < num_values(j); b++) wanted_.set(i, at(row, i), j, b, true);
    }
  }
  /// Pairs still wanted of setting `f` with those before it.
  int gain(const TableRow& row, int f) const {
    int found = 0;
    for (int i = 0; i < f; i++) found += wanted_.has(i, at(row, i), f, at(row, f)) ? 1 : 0;
    return found;
  }
  /// The best row, of some, in which setting i is a and j is b.
  void add_row_with(int i, int a, int j, int b) {
    std::vector<TableRow> fitting;
    for (const TableRow& row : layouts_) {
      const bool fits = (i >= kBlock || at(row, i) == a) && (j >= kBlock || at(row, j) == b);
      if (fits) fitting.push_back(row);
    }
    constexpr size_t kTried = 48;
    const size_t stride = std::max<size_t>(1, fitting.size() / kTried);
    TableRow best{};
    int best_gain = -1;
    for (size_t n = rows_.size() % stride; n < fitting.size(); n += stride) {
      TableRow row = fitting[n];
      int total = 0;
      for (int f = 0; f < kFactors; f++) {
        if (f >= kBlock) {
          int best_value = 0, most = -1;
          for (int value = 0; value < num_values(f); value++) {
            if ((f == i && value != a) || (f == j && value != b)) continue;
            row[static_cast<size_t>(f)] = value;
            if (const int g = gain(row, f); g > most) {
              most = g;
              best_value = value;
            }
          }
          row[static_cast<size_t>(f)] = best_value;
        }
        total += gain(row, f);
      }
      if (total > best_gain) {
        best_gain = total;
        best = row;
      }
    }
    for (int f = 0; f < kFactors; f++)
      for (int g = f + 1; g < kFactors; g++) wanted_.set(f, at(best, f), g, at(best, g), false);
    rows_.push_back(best);
  }

  std::vector<TableRow> layouts_, rows_;
  PairSet wanted_;
};

}  // namespace shoal::testing
