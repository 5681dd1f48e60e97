// Metrics of made-up runs for the tests of the report: curves of the usual shapes, all from (seed, step).
#pragma once

#include <filesystem>
#include <string>

namespace shoal::testing {

struct ExampleRun {
  std::string name = "example";
  uint64_t seed = 1;
  int64_t num_steps = 2000, log_every = 1, eval_every = 100, tokens_per_step = 4096;
  int64_t num_layers = 3, first_layer = 1, num_experts = 16, top_k = 2;
  bool balanced = true;   // aux-free bias at work; false: some experts starve
  double drop_share = 0;  // at the start
  double final_loss = 3.1;
};

/// Writes <folder>/metrics.jsonl through MetricsWriter.
void write_example_run(const std::filesystem::path& folder, const ExampleRun& run);

}  // namespace shoal::testing
