// Training steps with the experts of each rank in parts (parallel.dispatcher.chunks), in turns with whole
// ones:
//   mpirun -n 2 build/tests/bench/dispatch_bench
// Median step in ms, and the median of the ratios to the step without parts of the same round. ep is the
// number of ranks; one thread per rank.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "core/base/threads.h"
#include "launch/bench.h"
#include "launch/engine.h"
#include "parallel/bootstrap.h"
#include "parallel/moe/dispatcher.h"

namespace {

using namespace shoal;

constexpr int kRounds = 15;
constexpr int64_t kVocab = 2048, kSeq = 512;
const char* const kModel =
    "{model: {layers: 2, hidden_size: 512, heads: 8, moe: {num_experts: 16, top_k: 2, hidden: 704, "
    "shared_experts: 1, router: {kind: top_k, aux_coeff: 0.01}}}}";

EngineOptions options_with(int64_t chunks) {
  ConfigErrors errors;
  EngineOptions options;
  options.model = Choice{"transformer", ModelRegistry::instance().make_options("transformer")};
  parse_fields(
      load_yaml_text(kModel, "bench", errors), "",
      [&](FieldVisitor& v) { v.choice("model", options.model, ModelRegistry::instance(), ""); }, errors);
  options.optimizer = Choice{"adamw", nullptr};
  options.dispatcher = Choice{"all_to_all", DispatcherRegistry::instance().make_options("all_to_all")};
  parse_fields(
      load_yaml_text(fmt::format("{{chunks: {}}}", chunks), "bench", errors), "",
      [&](FieldVisitor& v) { options.dispatcher.options->fields(v); }, errors);
  errors.throw_if_any();
  options.vocab_size = kVocab;
  options.seq_len = kSeq;
  options.bf16 = true;
  return options;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run(const std::shared_ptr<Communicator>& world) {
  if (world->size() == 1) throw UsageError("dispatch_bench: needs ranks; start it with mpirun -n 2");
  set_num_threads(1);
  ParallelLayout layout;
  layout.dp = layout.ep = world->size();
  const Mesh mesh(world, layout);
  const std::vector<int64_t> chunks = {1, 2, 4, 8};
  std::vector<std::unique_ptr<TrainEngine>> engines;
  for (const int64_t n : chunks) engines.push_back(std::make_unique<TrainEngine>(options_with(n), mesh));
  const std::vector<ModelBatch> batches = {
      random_batch(2, kSeq, kVocab, 3 + static_cast<uint64_t>(world->rank()))};
  std::vector<std::vector<double>> times(chunks.size()), ratios(chunks.size());
  for (int round = -2; round < kRounds; round++) {
    std::vector<double> ms;
    for (const auto& engine : engines) {
      world->barrier();
      const auto begin = std::chrono::steady_clock::now();
      engine->step(batches, 1e-4);
      ms.push_back(
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    }
    for (size_t i = 0; round >= 0 && i < chunks.size(); i++) {
      times[i].push_back(ms[i]);
      ratios[i].push_back(ms[i] / ms[0]);
    }
  }
  if (world->rank() != 0) return 0;
  for (size_t i = 0; i < chunks.size(); i++)
    fmt::print("chunks {}: {:>8.1f} ms, {:.3f}\n", chunks[i], median(times[i]), median(ratios[i]));
  return 0;
}

}  // namespace

int main() {
  return shoal::run_world(run);
}
