// The table that a training run prints: one aligned line per log interval, and the line that shows where it
// is in between. Columns that mean nothing for the model are left out; in a narrow terminal the least
// important go too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/metrics.h"
#include "launch/train_config.h"

namespace shoal {

struct StepTableOptions {
  int64_t steps = 0;  // of the whole training
  bool moe = true, aux_loss = true, z_loss = true, drops = true;
  int columns = 0;  // of the terminal; 0: not limited
};
StepTableOptions step_table_options(const TrainConfig& config, int columns);

class StepTable {
 public:
  explicit StepTable(const StepTableOptions& options);
  std::string header() const;
  /// eta_seconds: expected time to the end of training; NaN: not known yet.
  std::string line(const StepMetrics& metrics, double eta_seconds) const;
  /// Step of steps, a bar, speed and time left, in less than options.columns columns.
  std::string status(int64_t step, double tokens_per_s, double eta_seconds) const;

 private:
  struct Column;
  static const std::vector<Column>& all_columns();
  StepTableOptions options_;
  std::vector<const Column*> shown_;
};

}  // namespace shoal
