// `shoal bench`: what this machine can do, measured, and how near kernels, collectives and the training step
// of a config come to it.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "launch/profile_table.h"
#include "launch/train_config.h"

namespace shoal {

struct BenchOptions {
  double seconds = 0.1;                   // per measurement
  int64_t tokens = 2048;                  // rows of the dense products
  int64_t memory = int64_t{192} << 20;    // bytes of a pass over memory
  int64_t parameters = int64_t{8} << 20;  // of the optimizer step
  std::vector<int64_t> message_bytes = {64 << 10, 1 << 20, 16 << 20};
  int64_t max_steps = 20;  // of the config
};

/// One rate, in units of 1e9 per second.
struct BenchRow {
  std::string group;  // "f32", "bf16", "f64": FLOP; "memory": bytes
  std::string name;
  double one_thread = 0;  // rank 0 alone, with one thread
  double all = 0;         // all threads of all ranks at once, summed
};
struct CollectiveRow {
  std::string name;
  int64_t bytes = 0;  // of the larger of a rank's two buffers
  double seconds = 0;
  double rate() const { return seconds > 0 ? static_cast<double>(bytes) * 1e-9 / seconds : 0; }
};
struct BenchReport {
  int ranks = 1, threads = 1;
  std::vector<BenchRow> rows;
  std::vector<CollectiveRow> collectives;  // empty on one rank
  std::optional<ProfileSummary> step;      // of a config
  std::string step_name;

  /// The first row of each group is the ceiling of the others.
  std::string text() const;
  nlohmann::json to_json() const;
};

/// Rows of random tokens, which are their own labels.
ModelBatch random_batch(int64_t rows, int64_t seq, int64_t vocab, uint64_t seed, Device device = Device{});

/// Collective. The same on every rank, except `step`, which is rank 0's.
BenchReport bench_machine(const BenchOptions& options, Communicator& world);
/// Trains the model of a config on random tokens for a few steps and profiles them. Writes nothing.
/// Collective.
ProfileSummary bench_step(const LoadedConfig& loaded, const BenchOptions& options,
                          const std::shared_ptr<Communicator>& world);

}  // namespace shoal
