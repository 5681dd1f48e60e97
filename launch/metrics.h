// What a training step reports, and the JSON Lines file it goes to. One row per logged step, one per
// evaluation:
//   {"kind":"run","name":..,"config":{..},"params_total":..,"params_active":..,"world":..}          first row
//   {"kind":"step","step":10,"tokens":40960,"loss":..,"aux_loss":..,"z_loss":..,"learning_rate":..,"grad_norm":..,
//    "max_load":..,"dropped":..,"skipped":0,"tokens_per_s":..,"tflops":..,"mfu":..,"step_ms":..,"peak_bytes":..,
//    "traffic":{"dp":{"within_node":..,"between_nodes":..},..},
//    "moe":[{"layer":1,"counts":[..E..],"max_vio":..,"entropy":..,"dead":0,"dropped":..,"bias_min":..,"bias_max":..}]}
//   {"kind":"eval","step":10,"loss":..,"perplexity":..,"tokens":..}
// Losses are per token (nats); the LM loss never includes aux or z-loss. Shares are 0..1. Written by the
// trainer, read by `shoal report`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "parallel/traffic.h"

namespace shoal {

struct LayerMetrics {
  int64_t layer = 0;            // index of the MoE layer in the model
  std::vector<int64_t> counts;  // assignments per expert over the whole step, all ranks, before drops
  double max_vio = 0;           // max(counts) / mean(counts) - 1
  double entropy = 0;           // mean entropy of the router's distribution, nats
  int64_t dead = 0;             // experts without any token in this step
  double dropped = 0;           // share of assignments dropped by the capacity limit
  double bias_min = 0, bias_max = 0;
};

struct StepMetrics {
  int64_t step = 0;    // 1-based: the step that has just been done
  int64_t tokens = 0;  // consumed since the start of training, 64 bit
  double loss = 0, aux_loss = 0, z_loss = 0;
  double learning_rate = 0;  // used in this step
  double grad_norm = 0;      // before clipping
  double max_load = 0;       // max over MoE layers of max(counts) / mean(counts); 0 without MoE
  double dropped = 0;        // share over all MoE layers
  int64_t skipped = 0;       // steps skipped so far for want of finite numbers or labels
  double tokens_per_s = 0, tflops = 0, mfu = 0, step_ms = 0;
  int64_t peak_bytes = 0;
  std::map<std::string, LinkBytes> traffic;  // sent by rank 0 in this step, by group
  std::vector<LayerMetrics> layers;
};

struct EvalMetrics {
  int64_t step = 0, tokens = 0;
  double loss = 0;  // mean over the evaluated tokens; NaN when no token had a label
};

/// Bytes of each group of a step's traffic.
std::map<std::string, LinkBytes> bytes_of_groups(const Traffic& traffic);
/// "12.30 MiB (dp 10.00 MiB, ep 2.30 MiB), 0 B between nodes"; the groups with most, and the others together.
/// "" when nothing was sent.
std::string traffic_text(const std::map<std::string, LinkBytes>& traffic);

/// Appends rows to <run>/metrics.jsonl on rank 0, each with one write() in append mode, so that a killed run
/// leaves whole rows and at most one torn last line. Numbers read back to the same bits; NaN and infinity are
/// null. A row that cannot be written (disk full) is left out with a warning; training goes on.
class MetricsWriter {
 public:
  explicit MetricsWriter(std::filesystem::path file) : file_(std::move(file)) {}
  /// Before the first row. Keeps only complete rows with step <= last_step, and run rows; the file is
  /// replaced by rename. -1: starts a new file. Error when the file cannot be read or written.
  void begin(int64_t last_step);
  /// `json_object`: the members of the first row; "kind" is set here. Error when it is no JSON object.
  void write_run(const std::string& json_object);
  void write(const StepMetrics& metrics);
  void write(const EvalMetrics& metrics);
  int64_t num_lost_rows() const { return num_lost_rows_; }

 private:
  void append(const std::string& line);
  std::filesystem::path file_;
  int64_t num_lost_rows_ = 0;
};

}  // namespace shoal
