#include "launch/memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

#include "core/base/text.h"
#include "core/tensor/device_facts.h"
#include "launch/engine_options.h"
#include "launch/trainer.h"
#include "optim/optimizer.h"

namespace shoal {

namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

std::string bytes_text(double bytes) {
  constexpr double kMost = 9e18;
  return human_bytes(static_cast<int64_t>(std::min(bytes, kMost)));
}

/// The number in a file that holds one; infinity for "max" or no file.
double number_in_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  double value = 0;
  return file >> value ? value : kUnlimited;
}

/// The number behind a name at the start of a line, or `otherwise`.
double value_after(const std::filesystem::path& path, const std::string& name, double otherwise) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string first;
    double value = 0;
    if (words >> first >> value && first == name) return value;
  }
  return otherwise;
}

/// What is left in a control group and those above it.
double left_in_groups(const std::filesystem::path& mount, std::filesystem::path group, const char* limit_name,
                      const char* usage_name, const char* cache_name) {
  double left = kUnlimited;
  group = group.relative_path();
  while (true) {
    const std::filesystem::path folder = mount / group;
    const double limit = number_in_file(folder / limit_name), usage = number_in_file(folder / usage_name);
    if (limit < kUnlimited && usage < kUnlimited) {
      const double cache = value_after(folder / "memory.stat", cache_name, 0);
      left = std::min(left, std::max(0.0, limit - usage + cache));
    }
    if (group.empty()) return left;
    group = group.parent_path();
  }
}

double left_in_groups(const std::filesystem::path& root) {
  double left = kUnlimited;
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "0::/path" (v2) or "4:memory:/path" (v1)
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1),
                      path = line.substr(second + 1);
    if (controllers.empty()) {
      left = std::min(left, left_in_groups(root / "sys/fs/cgroup", path, "memory.max", "memory.current",
                                           "inactive_file"));
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      left = std::min(left, left_in_groups(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes",
                                           "memory.usage_in_bytes", "total_inactive_file"));
    }
  }
  return left;
}

}  // namespace

std::string MemoryEstimate::total_text() const {
  return bytes_text(total());
}

std::array<std::string, 3> MemoryEstimate::parts() const {
  const std::string copies = packed_weights > 0 ? str("bf16 copies ", bytes_text(packed_weights), ", ") : "";
  return {str("weights ", bytes_text(weights)),
          str("gradients ", bytes_text(gradients), ", optimizer state ", bytes_text(optimizer)),
          str(copies, "activations ", bytes_text(activations), ", work ", bytes_text(work))};
}

std::string MemoryEstimate::text() const {
  const auto [first, second, third] = parts();
  return str(total_text(), " (", first, ", ", second, ", ", third, ")");
}

namespace {

/// Of `count` things that are spread over ranks, the share of the rank with most of them.
double largest_share(int64_t count, int ranks) {
  const ShardRange first = shard_range(count, {0, ranks});
  return count == 0 ? 1 : static_cast<double>(first.end) / static_cast<double>(count);
}

/// Forward passes whose activations a rank of a pipeline keeps at most, each of all its stages: the first
/// rank's number (parallel/pipeline_schedule.h).
double passes_kept(const ParallelLayout& layout, int64_t num_micro_batches) {
  const auto m = static_cast<double>(num_micro_batches), p = static_cast<double>(layout.pp),
             v = static_cast<double>(layout.pipeline.virtual_stages);
  if (layout.pipeline.schedule == PipelineKind::gpipe) return m;
  if (layout.pipeline.schedule == PipelineKind::interleaved)
    return std::min(m, (2 * (p - 1) + (v - 1) * p + 1) / v);
  return std::min(m, p);
}

/// Parameters that a rank holds a part of.
struct HeldParams {
  double dense = 0, experts = 0;
  double total() const { return dense + experts; }
  /// What is left where the replicas of each divide it.
  double divided(const ParallelLayout& l) const { return dense / (l.dp * l.cp) + experts / l.edp; }
};

/// Bytes of weights. Where they are divided, some units exist in full beside the pieces: a layer with its
/// experts, and the one gathered ahead, which may be the embedding or the head.
double weight_bytes(const HeldParams& params, const ModelFacts& facts, const ParallelOptions& options,
                    const ParallelLayout& layout, double element) {
  const double whole = params.total() * element;
  if (options.zero < 3) return whole;
  const double tp = layout.dp * layout.cp > 1 ? layout.tp : kUnlimited,  // not divided: nothing is gathered
      experts = layout.edp > 1 ? layout.ep * layout.etp : kUnlimited,
               layer = static_cast<double>(facts.params_layer_dense) / tp,
               table = static_cast<double>(facts.params_embedding) / tp,
               gathered =
                   layer + std::max(layer, table) + static_cast<double>(facts.params_layer_expert) / experts;
  return std::min(whole, (params.divided(layout) + gathered) * element);
}

/// Bytes of gradients. Where they are divided, some buckets exist in full beside the pieces: one that fills,
/// that of tied embeddings, and two whose sums are under way, with pieces of their own.
double gradient_bytes(const HeldParams& params, const ParallelOptions& options, const ParallelLayout& layout,
                      double element) {
  const double whole = params.total() * element;
  if (options.zero < 2) return whole;
  constexpr double kBuckets = 5;
  const double pieces = params.divided(layout) * element;
  return std::min(whole, pieces + kBuckets * options.bucket_mb * (1 << 20));
}

}  // namespace

MemoryEstimate estimate_memory(const TrainConfig& config, const ParallelLayout& layout, int64_t vocab_size) {
  const ModelFacts facts = config.model_options().facts(vocab_size, config.data.seq_len);
  const auto element = static_cast<double>(dtype_size(config.run.dtype()));
  const auto experts = static_cast<double>(facts.params_expert);
  // Tensor parallel ranks cut all dense matrices; activations are not known to be cut, so they are an upper
  // bound.
  HeldParams params{
      (static_cast<double>(facts.params_total) - experts) / layout.tp,
      experts * largest_share(config.model_options().sizes().num_experts, layout.ep) / layout.etp};
  // A pipeline rank has some of the layers, and at an end the embedding or the head beside them; layers count
  // alike.
  double share = 1, passes = 1;
  if (layout.pp > 1) {
    const int64_t sequences = config.data.global_batch / layout.dp;
    share = config.model_options().largest_share(layout, vocab_size, config.data.seq_len);
    passes = passes_kept(layout, sequences / sequences_per_pass(config, layout));
    const double table = static_cast<double>(facts.params_embedding) / static_cast<double>(layout.tp);
    params = {(params.dense - table) * share + table, params.experts * share};
  }
  const auto optimizer = OptimizerRegistry::make(config.optim.optimizer, {});
  PassShape pass;
  pass.vocab_size = vocab_size;
  const auto held = [&](int rank) { return context_runs(config.data.seq_len, {rank, layout.cp}).rows(); };
  const int64_t most = std::max(held(0), held(layout.cp - 1));  // no rank between them holds more
  pass.tokens = static_cast<double>(sequences_per_pass(config, layout)) * static_cast<double>(most);
  pass.cp = layout.cp;
  pass.ep = layout.ep;
  pass.etp = layout.etp;
  pass.dtype = config.run.dtype();
  pass.bf16 = config.run.bf16();
  pass.device = device_of(config).type;
  pass.drops_copies =
      config.parallel.zero == 3 && layout.dp * layout.cp > 1 && (facts.params_expert == 0 || layout.edp > 1);
  const PassMemory memory = config.model_options().pass_memory(pass);
  MemoryEstimate out;
  out.gradients = gradient_bytes(params, config.parallel, layout, element);
  constexpr double kExactBytes = 16;
  if (config.run.rank_invariant()) out.gradients += params.total() * kExactBytes;
  out.weights = weight_bytes(params, facts, config.parallel, layout, element);
  const double updated = config.parallel.zero > 0 ? params.divided(layout) : params.total();
  const double tables = std::min(updated, static_cast<double>(facts.params_embedding + facts.params_head));
  const auto state = [&](ParamKind kind) {
    return static_cast<double>(optimizer->state_bytes_per_element(kind)) * element / 4;
  };
  out.optimizer = tables * state(ParamKind::embedding) + (updated - tables) * state(ParamKind::matrix);
  out.packed_weights = memory.packed_weights * share;
  out.activations = memory.activations * share * passes;
  out.work = memory.work;
  return out;
}

ExpectedVocab expected_vocab(const TrainConfig& config, bool prepared) {
  if (const auto& set = config.model_options().vocab_size.value) return {*set, true};
  const Choice& tokenizer = config.data.prepare.tokenizer;
  const auto* bpe = dynamic_cast<const BpeOptions*>(tokenizer.options.get());
  if (config.data.sources.empty() && bpe != nullptr) return {bpe->vocab_size, true};
  try {
    if (!config.data.sources.empty()) return {open_tokenizer(config)->vocab_size(), true};
    const auto trainer = TokenizerTrainerRegistry::make(tokenizer);
    if (!trainer->needs_text()) return {trainer->train().tokenizer->vocab_size(), true};
    if (prepared) return {open_tokenizer(config)->vocab_size(), true};
  } catch (const UsageError&) {  // no such file here: a training will say so
  }
  return {};
}

double available_memory(const std::filesystem::path& root) {
  const double kibibytes = value_after(root / "proc/meminfo", "MemAvailable:", kUnlimited);
  return std::min(kibibytes * 1024, left_in_groups(root));
}

double available_to_rank(Device device, const LaunchInfo& info, int world_size) {
  const int host_ranks = info.mpi ? info.local_size : world_size;
  if (device.type == DeviceType::cpu) return available_memory() / host_ranks;
  const DeviceFacts facts = device_facts(device.type);
  int sharers = 0;
  for (int rank = 0; rank < host_ranks; rank++)
    sharers += !info.mpi || rank % facts.devices == info.local_rank % facts.devices ? 1 : 0;
  return facts.available_bytes / std::max(1, sharers);
}

void check_memory(const LoadedConfig& loaded, const MemoryEstimate& estimate, double available) {
  if (estimate.total() <= available) return;
  const bool on_host = device_of(loaded.config).type == DeviceType::cpu;
  const bool batch = estimate.activations + estimate.work > estimate.total() / 2;
  const std::string key = batch ? "data" : "model";
  const char* fix =
      batch ? "lower data.micro_batch (or data.global_batch, when it is auto) or data.seq_len, or "
              "set model.recompute (block keeps least)"
            : "lower model.layers, hidden_size, vocab_size, the FFN widths or moe.num_experts, or "
              "spread experts over more ranks with parallel.ep, or divide optimizer state, gradients and "
              "weights "
              "among ranks with parallel.zero: 3";
  throw UsageError(str("config ", key, " (", origin_of(loaded.tree, key).text(), "): a rank needs about ",
                       estimate.text(), ", expected at most ", bytes_text(available), ", its share of the ",
                       on_host ? "memory" : "device's memory", " that is available; ", fix));
}

void require_memory(const LoadedConfig& loaded, const MemoryEstimate& estimate, Communicator& world) {
  const double mine = available_to_rank(open_device(loaded.config), launch_info(), world.size());
  const Tensor share = Tensor::from(std::vector<double>{mine}, Shape{1});
  world.all_reduce(share, ReduceOp::min).wait();
  check_memory(loaded, estimate, share.to_vector<double>()[0]);
}

void require_memory(const LoadedConfig& loaded, Communicator& world) {
  const ParallelLayout layout = layout_of(loaded.config, world.size());
  require_memory(loaded, estimate_memory(loaded.config, layout, expected_vocab(loaded.config, false).size),
                 world);
}

}  // namespace shoal
