// ProfileSummary: the rows of a profile, per step, with what they are compared with; as text and as JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "launch/ceilings.h"

namespace shoal {

struct ProfileRow {
  std::string name;
  double ms = 0, forward_ms = 0, backward_ms = 0;  // per step; the rest of ms belongs to neither pass
  double calls = 0;                                // of kernels and collectives, per step
  Cost cost;                                       // per step
  double collective_bytes = 0;                     // payload, per step
  double min_ms = 0, max_ms = 0;                   // over the ranks
};

struct ProfileSummary {
  int64_t steps = 0;
  int world_size = 1;
  double step_ms = 0;  // the mean; the sum of all rows
  double tokens_per_step = 0, model_flops_per_token = 0;
  Ceilings ceilings;  // of rank 0, whose rows these are
  std::vector<ProfileRow> rows;
  int64_t events_dropped = 0;  // beyond what the trace has room for

  Cost total_cost() const;
  /// The part of the ceiling that a row reaches, 0..1 (more when its data was in cache); 0: nothing to
  /// compare.
  double share_of_ceiling(const ProfileRow& row) const;
  std::string text() const;
  nlohmann::json to_json() const;
};

/// The row of the time that a rank waited for others in collectives.
inline constexpr const char* kWaitingRow = "waiting for ranks";

/// Rows of one rank, per step, in the order of a step. waited: by row, in the order of profiler.rows(); it is
/// moved to the row kWaitingRow. Empty: there is nobody to wait for.
std::vector<ProfileRow> profile_rows(const Profiler& profiler,
                                     const std::vector<Profiler::PhaseTimes>& waited);

}  // namespace shoal
