// Time of whole training steps of one rank with one thread: the quickstart's model, and the reference
// configuration of docs/performance.md at its full batch and at a quarter of it. Prints tokens/s and GFLOP/s;
// page faults and system allocations per step should be 0 in a steady step.
#include <benchmark/benchmark.h>
#include <sys/resource.h>

#include "launch/bench.h"
#include "launch/engine.h"

namespace shoal {
namespace {

void run_steps(benchmark::State& state, const std::string& model, int64_t vocab, int64_t rows, int64_t seq,
               bool bf16) {
  ConfigErrors errors;
  EngineOptions options;
  options.model = Choice{"transformer", ModelRegistry::instance().make_options("transformer")};
  parse_fields(
      load_yaml_text("{model: {" + model + "}}", "bench", errors), "",
      [&](FieldVisitor& v) { v.choice("model", options.model, ModelRegistry::instance(), ""); }, errors);
  errors.throw_if_any();
  options.optimizer = Choice{"adamw", nullptr};
  options.dispatcher = Choice{"local", nullptr};
  options.bf16 = bf16;
  options.vocab_size = vocab;
  options.seq_len = seq;
  const Mesh mesh(make_single_communicator(), ParallelLayout{});
  TrainEngine engine(options, mesh);
  const std::vector<ModelBatch> batches = {random_batch(rows, seq, vocab, 3)};
  for (int i = 0; i < 3; i++) engine.step(batches, 1e-4);

  auto faults = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt + usage.ru_majflt;
  };
  const auto faults_before = faults();
  const int64_t allocations_before = device_runtime(DeviceType::cpu).stats().num_system_allocations;
  for (auto _ : state) benchmark::DoNotOptimize(engine.step(batches, 1e-4).loss);
  const auto steps = static_cast<double>(state.iterations());
  const double tokens = steps * static_cast<double>(rows * seq);
  state.counters["tokens/s"] = benchmark::Counter(tokens, benchmark::Counter::kIsRate);
  state.counters["GFLOP/s"] = benchmark::Counter(tokens * engine.model().facts().flops_per_token() / 1e9,
                                                 benchmark::Counter::kIsRate);
  state.counters["faults/step"] = static_cast<double>(faults() - faults_before) / steps;
  state.counters["allocations/step"] =
      static_cast<double>(device_runtime(DeviceType::cpu).stats().num_system_allocations -
                          allocations_before) /
      steps;
}

void quickstart(benchmark::State& state, bool bf16) {
  run_steps(state,
            "layers: 4, hidden_size: 192, heads: 6, kv_heads: 2, moe: {num_experts: 16, top_k: 4, hidden: "
            "128, shared_experts: 1, "
            "first_dense: 1, router: {kind: top_k, score: sigmoid, bias_rate: 0.01}}",
            4096, 4, 256, bf16);
}
BENCHMARK_CAPTURE(quickstart, f32, false)->Unit(benchmark::kMillisecond)->MeasureProcessCPUTime();
BENCHMARK_CAPTURE(quickstart, bf16, true)->Unit(benchmark::kMillisecond)->MeasureProcessCPUTime();

void reference(benchmark::State& state, int64_t rows, bool bf16) {
  run_steps(state,
            "layers: 8, hidden_size: 512, heads: 8, kv_heads: 4, tie_embeddings: false, moe: {num_experts: "
            "16, top_k: 2, hidden: 704, "
            "shared_experts: 1}",
            8192, rows, 512, bf16);
}
BENCHMARK_CAPTURE(reference, quarter_batch_f32, 1, false)
    ->Unit(benchmark::kMillisecond)
    ->MeasureProcessCPUTime();
BENCHMARK_CAPTURE(reference, quarter_batch_bf16, 1, true)
    ->Unit(benchmark::kMillisecond)
    ->MeasureProcessCPUTime();
BENCHMARK_CAPTURE(reference, f32, 4, false)->Unit(benchmark::kMillisecond)->MeasureProcessCPUTime();
BENCHMARK_CAPTURE(reference, bf16, 4, true)->Unit(benchmark::kMillisecond)->MeasureProcessCPUTime();

}  // namespace
}  // namespace shoal
