#include "parallel/mesh.h"

#include <algorithm>
#include <array>
#include <numeric>

#include <unistd.h>

#include "core/tensor/device_runtime.h"
#include "parallel/moe/dispatcher.h"
#include "parallel/shared_segment.h"

namespace shoal {

ParallelOptions::ParallelOptions() {
  dispatcher.kind = "all_to_all";
}

void PipelineOptions::fields(FieldVisitor& v) {
  v("schedule", schedule,
    "order of forward and backward passes: 1f1b keeps few micro-batches; interleaved gives each rank several "
    "stages and waits less; zero_bubble computes weight gradients while it would wait (ZB-H1); gpipe runs "
    "all forward passes first",
    one_of({"1f1b", "interleaved", "zero_bubble", "gpipe"}));
  v("virtual_stages", virtual_stages, "stages of each pipeline rank; above 1 for interleaved",
    in_range(1, 1 << 10));
  v("layout", layout,
    "layers of each of the pp x virtual_stages stages, e.g. [3, 4, 4, 3]; the embedding is in front of the "
    "first, "
    "the head behind the last; []: balanced by cost",
    in_range(0, 1 << 16));
}

void ParallelOptions::fields(FieldVisitor& v) {
  v("dp", dp, "data parallel replicas of the dense part; auto: world / (tp * cp * pp)", in_range(1, 1 << 20));
  v("tp", tp,
    "tensor parallel ranks: they cut heads, FFN widths and the vocabulary, and share the rows between them",
    in_range(1, 1 << 20));
  v("cp", cp, "context parallel ranks: each holds two of 2 * cp chunks of every sequence",
    in_range(1, 1 << 20));
  v("context", context,
    "how keys and values of other context parallel ranks arrive: all_gather: all at once, the bits of one "
    "rank in "
    "forward; ring: from neighbour to neighbour while those at hand are used",
    one_of({"all_gather", "ring"}));
  v("pp", pp, "pipeline ranks, each with a part of the layers", in_range(1, 1 << 20));
  v("pipeline", pipeline, "how pipeline ranks work together");
  v("ep", ep,
    "expert parallel ranks, which hold whole experts of every MoE layer (numbers differ by at most one); "
    "auto: "
    "the largest number that divides both the experts and the ranks",
    in_range(1, 1 << 20));
  v("etp", etp, "expert tensor parallel ranks, which cut the width of the same experts",
    in_range(1, 1 << 20));
  v.choice("dispatcher", dispatcher, DispatcherRegistry::instance(),
           "how token rows reach the ranks of their experts");
  v("ranks_per_node", ranks_per_node,
    "consecutive ranks that share a node, for the dispatcher hierarchical and the counts of what is sent "
    "between "
    "nodes; auto: found at start",
    in_range(1, 1 << 20));
  v("zero", zero,
    "what is divided among the replicas of each parameter (ZeRO, arXiv:1910.02054): 0 nothing, 1 optimizer "
    "state, 2 gradients too, 3 weights too",
    in_range(0, 3));
  v("bucket_mb", bucket_mb, "size of the buckets in which gradients are summed, in MiB",
    in_range(1e-4, 1 << 20));
}

namespace {

/// Adds errors with the origin of the key they are about.
class Rules {
 public:
  Rules(const ConfigNode& origins, ConfigErrors& errors) : origins_(origins), errors_(errors) {}
  template <class... Parts>
  void require(bool holds, const std::string& path, const Parts&... parts) {
    if (holds) return;
    errors_.add(path, origin_of(origins_, path), str(parts...));
    failed_ = true;
  }
  bool failed() const { return failed_; }

 private:
  const ConfigNode& origins_;
  ConfigErrors& errors_;
  bool failed_ = false;
};

void check_degrees(const ParallelOptions& o, Rules& rules) {
  rules.require(o.cp >= 1, "parallel.cp", "expected a degree >= 1, got ", o.cp, "; 1 switches the axis off");
  rules.require(o.zero >= 0 && o.zero <= 3, "parallel.zero", "zero = ", o.zero,
                " is no stage; set it to 0, 1, 2 or 3");
  rules.require(o.tp >= 1, "parallel.tp", "expected a degree >= 1, got ", o.tp, "; 1 switches the axis off");
  rules.require(o.etp >= 1, "parallel.etp", "expected a degree >= 1, got ", o.etp,
                "; 1 switches the axis off");
  rules.require(o.pp >= 1, "parallel.pp", "expected a degree >= 1, got ", o.pp, "; 1 switches the axis off");
  rules.require(o.ep.value_or(1) >= 1, "parallel.ep", "expected a degree >= 1 or auto, got ",
                o.ep.value_or(1), "; 1 switches the axis off");
  rules.require(o.dp.value_or(1) >= 1, "parallel.dp", "expected a degree >= 1 or auto, got ",
                o.dp.value_or(1));
}

/// The largest ep that divides both the world and the experts; 1 with the dispatcher that sends nothing.
int64_t resolve_ep(const ParallelOptions& o, const LayoutFacts& facts) {
  const bool alone = facts.model.num_experts == 0 || o.dispatcher.kind == "local";
  const int64_t groups = std::max<int64_t>(1, facts.world_size / (o.etp * o.pp));
  return o.ep.value_or(alone ? 1 : std::gcd<int64_t>(groups, facts.model.num_experts));
}

/// Degrees are at least 1 here. Returns dp.
int64_t check_world(const ParallelOptions& o, const LayoutFacts& facts, Rules& rules) {
  const int64_t world = facts.world_size, model = o.tp * o.cp * o.pp, ep = resolve_ep(o, facts),
                expert = o.etp * ep * o.pp;
  const int64_t dp = o.dp.value_or(std::max<int64_t>(world / model, 1));
  // Of three degrees at most: the product of four may be more than an int64.
  const bool fits = world % model == 0 && dp == world / model;
  rules.require(fits, o.dp.value ? "parallel.dp" : "parallel", "dp (", dp, ") x tp (", o.tp, ") x cp (", o.cp,
                ") x pp (", o.pp, ") is ", static_cast<double>(dp) * static_cast<double>(model),
                ", expected the world size (", world, "); ",
                world % model == 0
                    ? str("set dp: auto or ", world / model, ", or start ", dp * model, " ranks")
                    : str("start a multiple of ", model, " ranks"));
  rules.require(world % expert == 0, "parallel.ep", "etp (", o.etp, ") x ep (", ep, ") x pp (", o.pp,
                ") must divide the world size (", world, "); lower ep or start a multiple of ", expert,
                " ranks");
  return dp;
}

void check_experts(const ParallelOptions& o, const LayoutFacts& facts, Rules& rules) {
  const int64_t ep = resolve_ep(o, facts), width = facts.model.expert_width;
  if (o.etp > 1) {
    rules.require(facts.model.num_experts > 0, "parallel.etp", "etp = ", o.etp,
                  " but the model has no MoE layer; set etp: 1 or add a model.moe section");
    rules.require(width == 0 || o.etp <= width, "parallel.etp", "etp (", o.etp,
                  ") is above the width of an expert (", width, "); lower etp or raise model.moe.hidden");
    const int64_t unit = facts.model.width_multiple;
    rules.require(unit == 1 || width % (unit * o.etp) == 0, "parallel.etp", "etp (", o.etp,
                  ") cuts experts of width ", width, ", whose parts must be multiples of ", unit,
                  " for fp8 products; lower etp, or set model.moe.hidden to ", round_up(width, unit * o.etp));
  }
  const bool sends_padding = o.dispatcher.kind != "all_gather" && o.dispatcher.kind != "hierarchical";
  rules.require(!facts.model.pads_experts || sends_padding, "parallel.dispatcher", o.dispatcher.kind,
                " cannot send as many rows as an expert has room for (model.moe.pad_to_capacity); use "
                "all_to_all, or local with ep: 1");
  if (ep == 1) return;
  rules.require(o.dispatcher.kind != "local", "parallel.dispatcher", "local needs ep = 1, got ep = ", ep,
                "; use all_to_all or set ep: 1");
  if (facts.model.num_experts == 0) {
    return rules.require(false, "parallel.ep", "ep = ", ep,
                         " but the model has no MoE layer; set ep: 1 or add a model.moe section");
  }
  if (ep > facts.model.num_experts) {
    return rules.require(false, "parallel.ep", "expected at most num_experts (", facts.model.num_experts,
                         "), got ", ep, "; lower ep or raise num_experts");
  }
}

/// Rules of nodes, and of the dispatcher that sends rows node by node.
void check_nodes(const ParallelOptions& o, const LayoutFacts& facts, Rules& rules) {
  const int64_t world = facts.world_size, ep = resolve_ep(o, facts), each = o.ranks_per_node.value_or(world);
  rules.require(each >= 1 && world % std::max<int64_t>(1, each) == 0, "parallel.ranks_per_node",
                "ranks_per_node (", each, ") must divide the world size (", world,
                "); leave it at auto, or start a multiple of ", each, " ranks");
  if (o.dispatcher.kind != "hierarchical" || each < 1 || world % (o.etp * ep * o.pp) != 0) return;
  // An ep group has every etp-th of etp x ep consecutive ranks.
  for (int64_t first = 0; first < world; first += o.etp * ep) {
    std::vector<int> nodes;
    for (int64_t i = 0; i < ep; i++) nodes.push_back(static_cast<int>((first + i * o.etp) / each));
    if (regular_node_size(nodes, static_cast<int>(ep)) > 0) continue;
    return rules.require(false, "parallel.dispatcher",
                         "hierarchical needs as many ranks of an ep group on each "
                         "of its nodes; with ranks_per_node (",
                         each, ") the group of ep (", ep, ") x etp (", o.etp, ") from rank ", first,
                         " is on nodes ", nodes.front(), " to ", nodes.back(),
                         " unevenly; change ep or ranks_per_node so that one divides the other, or use "
                         "all_to_all");
  }
}

/// Rules of what tensor parallel ranks cut.
void check_tensor(const ParallelOptions& o, const ModelSizes& model, Rules& rules) {
  if (o.tp == 1) return;
  if (model.kv_heads > 0 && o.tp > model.kv_heads) {
    const int64_t queries = model.heads / model.kv_heads, sharing = o.tp / model.kv_heads;
    rules.require(o.tp % model.kv_heads == 0 && queries % sharing == 0, "parallel.tp", "tp (", o.tp,
                  ") is above the number of key/value heads (", model.kv_heads,
                  "), so it must be a multiple of it, and that multiple must divide the queries of each (",
                  queries, "); lower tp or change model.kv_heads");
  }
  rules.require(model.narrowest_ffn == 0 || o.tp <= model.narrowest_ffn, "parallel.tp", "tp (", o.tp,
                ") is above the smallest width of an FFN (", model.narrowest_ffn, "); lower tp");
}

/// Rules of an optimizer that sees matrices.
void check_whole_matrices(const ParallelOptions& o, const LayoutFacts& facts, Rules& rules) {
  if (facts.whole_matrices.empty()) return;
  const auto require = [&](int64_t value, int64_t whole, const std::string& key) {
    rules.require(value == whole, "parallel." + key, "optimizer ", facts.whole_matrices,
                  " updates whole matrices, which ", key, " (", value, ") cuts; set ", key, ": ", whole,
                  " or use another optimizer");
  };
  require(o.tp, 1, "tp");
  require(o.etp, 1, "etp");
  require(o.zero, 0, "zero");
}

void check_batch(int64_t dp, const LayoutFacts& facts, Rules& rules) {
  const int64_t micro_batch = facts.micro_batch == 0 ? 1 : facts.micro_batch, per_pass = micro_batch * dp;
  if (per_pass <= 0) return;  // micro_batch < 1 is reported where it is parsed
  rules.require(facts.global_batch >= 1 && facts.global_batch % per_pass == 0, "data.global_batch",
                "expected a multiple of micro_batch (", micro_batch, ") x dp (", dp, ") = ", per_pass,
                ", because accumulation = global_batch / (micro_batch x dp) must be whole; got ",
                facts.global_batch, "; start a number of ranks that divides it, or change data.global_batch",
                micro_batch > 1 ? " or data.micro_batch" : "",
                " (a run that is resumed keeps its global_batch)");
}

/// Rules of pipeline stages and of the micro-batches that pass them.
void check_pipeline(const ParallelOptions& o, const LayoutFacts& facts, int64_t dp, Rules& rules) {
  const PipelineOptions& pipeline = o.pipeline;
  const int64_t v = pipeline.virtual_stages, stages = o.pp * v, layers = facts.model.layers;
  const bool interleaved = pipeline.schedule == "interleaved";
  rules.require(v >= 1, "parallel.pipeline.virtual_stages", "expected at least 1, got ", v);
  rules.require(v <= 1 || (interleaved && o.pp > 1), "parallel.pipeline.virtual_stages", v,
                " stages per rank need schedule: interleaved and pp above 1, got schedule: ",
                pipeline.schedule, " and pp = ", o.pp, "; set virtual_stages: 1");
  const std::vector<int64_t>& layout = pipeline.layout;
  const std::string stages_text = str("pp (", o.pp, ") x virtual_stages (", v, ") = ", stages, " stages");
  if (layout.empty()) {
    rules.require(layers == 0 || stages <= layers, "parallel.pp", stages_text, " are more than the model's ",
                  layers, " layers; lower pp or virtual_stages, or set parallel.pipeline.layout");
  } else {
    const int64_t sum = std::accumulate(layout.begin(), layout.end(), int64_t{0});
    rules.require(std::ssize(layout) == stages, "parallel.pipeline.layout", "expected the layers of ",
                  stages_text, ", got ", layout.size(), " numbers");
    rules.require(sum == layers, "parallel.pipeline.layout", "expected numbers whose sum is model.layers (",
                  layers, "), got ", sum);
    for (size_t i = 1; i + 1 < layout.size(); i++) {
      rules.require(layout[i] >= 1, "parallel.pipeline.layout", "stage ", i,
                    " has no layers; only the first (embedding) and the last (head) may have none");
    }
  }
  const int64_t sequences = facts.global_batch / dp;
  if (!interleaved || o.pp == 1 || sequences < 1 || facts.micro_batch < 0) return;
  ParallelLayout resolved;
  resolved.pp = static_cast<int>(o.pp);
  resolved.pipeline.schedule = PipelineKind::interleaved;
  const int64_t count =
      facts.micro_batch == 0 ? auto_micro_batches(sequences, resolved) : sequences / facts.micro_batch;
  rules.require(count % o.pp == 0, "parallel.pipeline.schedule",
                "interleaved runs micro-batches in groups of pp (", o.pp, "), got ", count,
                " = global_batch (", facts.global_batch, ") / dp (", dp,
                ") / micro_batch; change data.global_batch or data.micro_batch, or use 1f1b");
}

}  // namespace

int64_t auto_micro_batches(int64_t sequences, const ParallelLayout& layout) {
  if (layout.pp == 1) return 1;
  const int64_t group = layout.pipeline.schedule == PipelineKind::interleaved ? layout.pp : 1;
  for (int64_t count = layout.pp; count <= sequences; count++) {
    if (sequences % count == 0 && count % group == 0) return count;
  }
  return std::max<int64_t>(1, sequences);
}

ParallelLayout resolve_layout(const ParallelOptions& options, const LayoutFacts& facts,
                              const ConfigNode& origins, ConfigErrors& errors) {
  Rules rules(origins, errors);
  check_degrees(options, rules);
  const bool positive = options.tp >= 1 && options.cp >= 1 && options.pp >= 1 && options.etp >= 1 &&
                        options.ep.value_or(1) >= 1 && options.dp.value_or(1) >= 1;
  if (!positive) return {};  // the products below would say nothing more
  const int64_t dp = check_world(options, facts, rules);
  check_experts(options, facts, rules);
  check_nodes(options, facts, rules);
  check_tensor(options, facts.model, rules);
  check_whole_matrices(options, facts, rules);
  check_batch(dp, facts, rules);
  check_pipeline(options, facts, dp, rules);
  if (rules.failed()) return {};
  ParallelLayout layout;
  layout.tp = static_cast<int>(options.tp);
  layout.cp = static_cast<int>(options.cp);
  layout.pp = static_cast<int>(options.pp);
  layout.context = options.context == "ring" ? ContextKind::ring : ContextKind::all_gather;
  layout.dp = static_cast<int>(dp);
  layout.etp = static_cast<int>(options.etp);
  layout.ep = static_cast<int>(resolve_ep(options, facts));
  layout.ranks_per_node = static_cast<int>(options.ranks_per_node.value_or(0));
  layout.edp = facts.world_size / (layout.etp * layout.ep * layout.pp);
  layout.pipeline = {pipeline_kind(options.pipeline.schedule),
                     static_cast<int>(options.pipeline.virtual_stages), options.pipeline.layout};
  return layout;
}

namespace {

int degree(const ParallelLayout& layout, Axis axis) {
  switch (axis) {
    case Axis::tp:
      return layout.tp;
    case Axis::cp:
      return layout.cp;
    case Axis::dp:
      return layout.dp;
    case Axis::pp:
      return layout.pp;
    case Axis::etp:
      return layout.etp;
    case Axis::ep:
      return layout.ep;
    case Axis::edp:
      return layout.edp;
  }
  return 1;
}

}  // namespace

namespace {

/// Equal on ranks of one node, and on no others.
std::string node_name() {
  const std::string domain = memory_domain();
  if (!domain.empty()) return domain;
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  return host.data();
}

/// Of each rank of the world.
std::vector<int> find_nodes(Communicator& world, int ranks_per_node) {
  std::vector<int> nodes;
  if (ranks_per_node > 0) {
    for (int r = 0; r < world.size(); r++) nodes.push_back(r / ranks_per_node);
    return nodes;
  }
  std::vector<std::string> known;
  for (const std::string& domain : world.gather_strings(node_name())) {
    const auto found = std::ranges::find(known, domain);
    nodes.push_back(static_cast<int>(found - known.begin()));
    if (found == known.end()) known.push_back(domain);
  }
  return nodes;
}

}  // namespace

AxisCoords coords_of(const ParallelLayout& layout, int rank) {
  AxisCoords coords;
  const auto fill = [&](std::initializer_list<Axis> axes) {
    int stride = 1;
    for (const Axis axis : axes) {
      const int n = degree(layout, axis);
      coords[axis] = {rank / stride % n, n};
      stride *= n;
    }
  };
  fill({Axis::tp, Axis::cp, Axis::dp, Axis::pp});
  fill({Axis::etp, Axis::ep, Axis::edp});  // pp is the dense grid's
  return coords;
}

int rank_along(const ParallelLayout& layout, int rank, Axis axis, int index) {
  const bool in_expert_grid = axis == Axis::etp || axis == Axis::ep || axis == Axis::edp;
  int stride = 1;
  for (const Axis before : in_expert_grid ? std::array{Axis::etp, Axis::ep, Axis::edp, Axis::edp}
                                          : std::array{Axis::tp, Axis::cp, Axis::dp, Axis::pp}) {
    if (before == axis) break;
    stride *= degree(layout, before);
  }
  return rank + (index - rank / stride % degree(layout, axis)) * stride;
}

Mesh::Mesh(std::shared_ptr<Communicator> world, const ParallelLayout& layout)
    : world_(std::move(world)), layout_(layout) {
  const int size = world_->size();
  SHOAL_CHECK(layout.tp * layout.cp * layout.dp * layout.pp == size &&
                  layout.etp * layout.ep * layout.edp * layout.pp == size,
              "Mesh: tp ", layout.tp, " x cp ", layout.cp, " x dp ", layout.dp, " x pp ", layout.pp,
              " and etp ", layout.etp, " x ep ", layout.ep, " x edp ", layout.edp, " x pp ", layout.pp,
              " must both equal the world size ", size);
  coords_ = coords_of(layout_, world_->rank());
  world_->traffic().set_nodes(find_nodes(*world_, layout_.ranks_per_node));
  using Place = Communicator::Place;
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::dp, Axis::pp, Axis::etp, Axis::ep, Axis::edp}) {
    const auto place = [&](int rank) {  // the color is the lowest rank of the group
      return Place{rank_along(layout_, rank, axis, 0), coords_of(layout_, rank)[axis].index};
    };
    comms_[static_cast<size_t>(axis)] = coords_[axis].size == 1
                                            ? make_single_communicator()->split(0, 0, axis_name(axis))
                                            : world_->split_by(place, axis_name(axis));
  }
  const AxisCoord cp = coords_[Axis::cp], dp = coords_[Axis::dp], pp = coords_[Axis::pp];
  if (cp.size == 1 || dp.size == 1) {
    tokens_ = comms_[static_cast<size_t>(cp.size == 1 ? Axis::dp : Axis::cp)];
  } else {
    const auto place = [&](int rank) {
      const AxisCoords c = coords_of(layout_, rank);
      return Place{c[Axis::pp].index * c[Axis::tp].size + c[Axis::tp].index, rank};
    };
    tokens_ = world_->split_by(place, "tokens");
  }
  const auto stage = [&](int rank) { return Place{coords_of(layout_, rank)[Axis::pp].index, rank}; };
  stage_ = pp.size == 1 ? world_ : world_->split_by(stage, "stage");
  const auto end = [&](int index) {
    return Place{index == 0 || index == pp.size - 1 ? 0 : 1 + index, index};
  };
  ends_ = pp.size == 1 ? make_single_communicator() : comm(Axis::pp).split_by(end, "first and last stage");
}

namespace {

/// Which part of how many a rank holds of a parameter.
AxisCoord whole_part(const Placement& placement, const AxisCoords& coords) {
  AxisCoord whole;
  for (const ShardedDim& sharded : placement.sharded) {
    if (sharded.dim < 0) continue;
    const AxisCoord part = part_of(sharded, coords);
    whole = {whole.index * part.size + part.index, whole.size * part.size};
  }
  return whole;
}

}  // namespace

Communicator& Mesh::replicas(const Placement& placement) const {
  Cut cut{};  // no text: this is asked for every parameter of every step
  cut[0] = static_cast<int>(placement.grid);
  for (size_t i = 0; i < placement.sharded.size(); i++) {
    const ShardedDim& sharded = placement.sharded[i];
    if (sharded.dim < 0) continue;
    const AxisCoord coord = part_of(sharded, coords_);
    if (coord.size == 1) continue;
    cut[1 + 3 * i] = static_cast<int>(sharded.axis);
    cut[2 + 3 * i] = coord.size;
    cut[3 + 3 * i] = sharded.within ? 1 : 0;
  }
  std::shared_ptr<Communicator>& group = replicas_[cut];
  if (group) return *group;
  const int num_parts = whole_part(placement, coords_).size;
  if (num_parts == 1) return *(group = stage_);
  // Groups along one axis exist already.
  const bool dense = placement.grid == Grid::dense;
  const int64_t rest = stage_->size() / num_parts;
  for (const Axis axis :
       dense ? std::array{Axis::tp, Axis::cp, Axis::dp} : std::array{Axis::etp, Axis::ep, Axis::edp}) {
    const bool is_cut = std::any_of(
        placement.sharded.begin(), placement.sharded.end(),
        [&](const ShardedDim& s) { return s.dim >= 0 && s.axis == axis && part_of(s, coords_).size > 1; });
    if (!is_cut && degree(layout_, axis) == rest) return *(group = comms_[static_cast<size_t>(axis)]);
  }
  const int first = coords_[Axis::pp].index * stage_->size();  // of the stage, in the world
  const auto place = [&](int rank) {
    return Communicator::Place{whole_part(placement, coords_of(layout_, first + rank)).index, rank};
  };
  group = stage_->split_by(place, dense ? "replicas" : "expert replicas");
  return *group;
}

}  // namespace shoal
