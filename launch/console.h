// What a training run prints: the summary at the start and one aligned line per log interval.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "launch/metrics.h"
#include "launch/train_config.h"

namespace shoal {

class TrainEngine;
struct TrainData;

std::string step_header();
/// eta_seconds: expected time to the end of training.
std::string step_line(const StepMetrics& metrics, double eta_seconds);
std::string eval_line(const EvalMetrics& metrics);
/// Model, data, layout and machine, before training.
std::string run_summary(const TrainConfig& config, TrainEngine& engine, const TrainData& data,
                        double peak_flops, int64_t num_micro_batches, int64_t micro_batch);
/// The first row of metrics.jsonl.
std::string run_record(const TrainConfig& config, TrainEngine& engine, int world_size);
/// <run>/config.yaml, through a temporary name.
void write_resolved_config(const TrainConfig& config);
/// What a run has reached, from its metrics file: validation loss, speed, expert load of the last logged
/// step. "" when the file has no step yet.
std::string run_result(const std::filesystem::path& metrics_file);

}  // namespace shoal
