// What a training run prints: the summary at the start, evaluations, and the result. The table of
// steps is in step_table.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "launch/memory.h"
#include "launch/metrics.h"
#include "launch/train_config.h"

namespace shoal {

class TrainEngine;
struct TrainData;

std::string eval_line(const EvalMetrics& metrics);
/// Model, data, layout, precision and machine, before training goes on from `step`. Lines of at most 80
/// columns, as far as names and numbers of usual length allow.
std::string run_summary(const TrainConfig& config, TrainEngine& engine, const TrainData& data,
                        double peak_flops, int64_t step);
/// The first row of metrics.jsonl.
std::string run_record(const TrainConfig& config, TrainEngine& engine, int world_size);
/// <run>/config.yaml, through a temporary name.
void write_resolved_config(const TrainConfig& config);
/// What a run has reached, from its metrics file: validation loss, speed, expert load of the last logged
/// step. Rows of steps after `last_step` are left out: they were logged, but no checkpoint holds them. ""
/// when no row is left.
std::string run_result(const std::filesystem::path& metrics_file, int64_t last_step);
struct MemoryUse {
  int64_t peak_bytes = 0;  // of tensors, of the fullest rank
  MemoryEstimate predicted;
};
/// How long steps first_step..last_step took with everything, the memory it took, where the results lie, what
/// to do with them. saved: there is a checkpoint.
std::string run_end(const TrainConfig& config, int64_t first_step, int64_t last_step, double seconds,
                    const MemoryUse& memory, bool saved);

}  // namespace shoal
