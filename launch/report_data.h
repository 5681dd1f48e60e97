// What `shoal report` knows about one run: the columns of its metrics.jsonl, read in one pass with bounded
// memory for the expert counts. Made by read_run, drawn by report.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/traffic.h"

namespace shoal {

struct Point {
  double x = 0;
  double y = 0;  // NaN: no value here, a line has a gap
};

/// Expert counts over time, summed over groups of neighbouring rows so that at most kMaxColumns remain.
class LoadHistory {
 public:
  static constexpr size_t kMaxColumns = 256;
  struct Column {
    int64_t first_step = 0, last_step = 0;
    std::vector<double> counts;  // [E], summed over the rows of the column
  };
  /// Rows with another number of experts than the first one are left out.
  void add(int64_t step, const std::vector<double>& counts_E);
  const std::vector<Column>& columns() const { return columns_; }
  size_t num_experts() const { return columns_.empty() ? 0 : columns_[0].counts.size(); }
  /// Joins neighbours until at most max_columns are left.
  void shrink(size_t max_columns);

 private:
  std::vector<Column> columns_;
  int64_t rows_per_column_ = 1, rows_in_last_ = 0;
};

/// One MoE layer; all lines have one point per logged step.
struct LayerHistory {
  int64_t layer = 0;
  LoadHistory load;
  std::vector<Point> max_vio, entropy, dead, dropped, bias_min, bias_max;
};

struct RunData {
  std::string name;  // unique among the runs of a report
  std::filesystem::path file;
  std::optional<int64_t> params_total, params_active, world;
  std::string layout;                         // "ep 2, dp 4" or ""
  std::map<std::string, std::string> config;  // dotted key -> value as JSON

  /// The columns of the step rows by the names of the JSON members; NaN where a row has null or nothing.
  static constexpr std::array kColumns = {
      "step",    "tokens",       "loss",   "aux_loss", "z_loss",  "learning_rate", "grad_norm", "max_load",
      "dropped", "tokens_per_s", "tflops", "mfu",      "skipped", "step_ms",       "peak_bytes"};
  const std::vector<double>& column(std::string_view name) const;
  /// One column over the steps, or over the consumed tokens.
  std::vector<Point> points(std::string_view name, std::string_view x = "step") const;
  size_t num_steps() const { return columns[0].size(); }

  std::array<std::vector<double>, kColumns.size()> columns;
  std::vector<Point> eval_loss;              // over the steps
  std::vector<LayerHistory> layers;          // by layer
  std::map<std::string, LinkBytes> traffic;  // of rank 0 in the last step that has it
  int64_t num_bad_rows = 0;                  // torn or broken lines, left out

  /// Seconds of training: tokens between rows over the throughput of the row.
  double training_seconds() const;
};

/// `path`: a run folder or a metrics file. UsageError when there is none; a broken line is only counted.
RunData read_run(const std::filesystem::path& path);

}  // namespace shoal
