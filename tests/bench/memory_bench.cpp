// Memory of whole training steps of one rank: what the tensors of each part take, the peak beside the
// prediction of launch/memory.h, pages of the process, CPU time. One process per case, so that each starts
// with an empty allocator:
//   memory_bench [filter]      cases whose name contains the filter
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <fstream>
#include <sstream>

#include "core/autograd/tape.h"
#include "core/base/threads.h"
#include "launch/bench.h"
#include "launch/engine.h"
#include "launch/memory.h"

namespace shoal {
namespace {

constexpr double kMiB = 1 << 20;

double cpu_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

/// Kibibytes behind a name in /proc/self/status.
double status_mib(const char* name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string first;
    double kib = 0;
    if (words >> first >> kib && first == name) return kib / 1024;
  }
  return 0;
}

int64_t page_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt + usage.ru_majflt;
}

struct Case {
  std::string name, model;
  int64_t vocab, rows, seq;
  std::string precision, recompute;
};

void measure(const Case& c) {
  const std::string text =
      str("data: {text: t, seq_len: ", c.seq, ", global_batch: ", c.rows, "}\nrun: {precision: ", c.precision,
          "}\nmodel: {vocab_size: ", c.vocab, ", recompute: ", c.recompute, ", ", c.model, "}\n");
  const TrainConfig config = load_train_config_text(text, "bench", {}, 1).config;
  EngineOptions options;
  options.model = config.model;
  options.optimizer = config.optim.optimizer;
  options.dispatcher = Choice{"local", nullptr};
  options.bf16 = config.run.bf16();
  options.vocab_size = c.vocab;
  options.seq_len = c.seq;
  const Mesh mesh(make_single_communicator(), ParallelLayout{});
  DeviceRuntime& memory = device_runtime(DeviceType::cpu);
  const auto live = [&] { return static_cast<double>(memory.stats().current_bytes) / kMiB; };
  const auto peak = [&] { return static_cast<double>(memory.stats().peak_bytes) / kMiB; };
  set_num_threads(1);

  const double before = live();
  TrainEngine engine(options, mesh);
  const double built = live();
  const auto step = [&](int64_t i) {
    const ModelBatch batch = random_batch(c.rows, c.seq, c.vocab, static_cast<uint64_t>(i));
    engine.step(std::span(&batch, 1), 1e-4);
  };
  step(0);
  const double state = live();
  // One pass by hand, to see what forward leaves.
  double forward = 0;
  {
    const ModelBatch batch = random_batch(c.rows, c.seq, c.vocab, 1);
    ForwardContext context;
    context.totals = {c.rows * c.seq, c.rows * c.seq, 1};
    Tape tape;
    const LossTerms terms = engine.model().loss(batch, context);
    forward = live() - state;
    tape.backward(terms.total);
    engine.model().end_step(false);
  }
  memory.reset_peak();
  const int64_t faults = page_faults(), allocations = memory.stats().num_system_allocations;
  const double start = cpu_seconds();
  constexpr int kSteps = 2;
  for (int64_t i = 0; i < kSteps; i++) step(2 + i);
  const double ms = 1e3 * (cpu_seconds() - start) / kSteps;
  const MemoryEstimate estimate = estimate_memory(config, layout_of(config, 1), c.vocab);
  std::printf("%-10s %-4s %-42s %8.0f %8.0f %8.0f %8.0f %8.0f %8.0f %8.0f %8.0f %8.0f %7.1f %5ld\n",
              c.name.c_str(), c.precision.c_str(), c.recompute.c_str(), ms, built - before, state - built,
              forward, peak() - state, peak(), estimate.total() / kMiB,
              static_cast<double>(memory.stats().reserved_bytes) / kMiB, status_mib("VmHWM:"),
              static_cast<double>(page_faults() - faults) / kSteps,
              static_cast<long>(memory.stats().num_system_allocations - allocations));
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  const std::string reference =
      "layers: 8, hidden_size: 512, heads: 8, kv_heads: 4, tie_embeddings: false, moe: {num_experts: 16, "
      "top_k: 2, hidden: 704, shared_experts: 1}";
  const std::string quickstart =
      "layers: 4, hidden_size: 192, heads: 6, kv_heads: 2, moe: {num_experts: 16, top_k: 4, hidden: 128, "
      "shared_experts: 1, first_dense: 1, router: {kind: top_k, score: sigmoid, bias_rate: 0.01}}";
  std::printf(
      "MiB; CPU ms of a step on one thread\n%-10s %-4s %-42s %8s %8s %8s %8s %8s %8s %8s %8s %8s %7s %5s\n",
      "model", "type", "recompute", "ms", "built", "state", "forward", "in step", "peak", "predict",
      "reserved", "RSS", "faults", "alloc");
  std::fflush(stdout);
  for (const auto& [name, model, vocab, rows, seq] :
       {std::tuple{"quickstart", quickstart, 4096, 4, 256}, {"reference", reference, 8192, 4, 512}}) {
    for (const char* precision : {"f32", "bf16"}) {
      for (const char* recompute : {"none", "norms", "activations", "up_projections", "[norms, activations]",
                                    "block", "[norms, activations, up_projections]", "packed_weights",
                                    "[norms, activations, up_projections, packed_weights]"}) {
        if (precision == std::string("f32") && std::string(recompute).find("packed") != std::string::npos)
          continue;  // there are no bf16 copies
        const shoal::Case c{name, model, vocab, rows, seq, precision, recompute};
        if (argc > 1 && shoal::str(c.name, " ", precision, " ", recompute).find(argv[1]) == std::string::npos)
          continue;
        const pid_t child = fork();
        if (child == 0) {
          shoal::measure(c);
          std::fflush(stdout);
          _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        if (status != 0) return 1;
      }
    }
  }
  return 0;
}
