// StepProfile: `run.profile`. Observes some steps of a training on every rank, then rank 0 prints a table,
// and every rank writes a trace into the run's folder.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "launch/profile_table.h"
#include "parallel/mesh.h"

namespace shoal {

/// How far this rank's steady clock is behind that of rank 0, in ns; 0 whenever both may be one. Collective.
int64_t clock_offset_ns(Communicator& world);

/// How long this rank waited inside collectives until the last rank of the group had come, by row of
/// profiler.rows(). Collective over the groups of the mesh.
std::vector<Profiler::PhaseTimes> waited_times(const Profiler& profiler, const Mesh& mesh, int64_t offset_ns);

/// The summary of rank 0, with the extremes of all ranks in its rows; the other ranks get their own rows
/// only. Collective.
ProfileSummary summarize_profile(const Profiler& profiler, const Ceilings& ceilings, const Mesh& mesh,
                                 int64_t offset_ns);

inline constexpr size_t kProfileEvents = size_t{1} << 17;  // that a rank keeps: about 12 MB

struct ProfileOptions {
  int64_t after = 0, steps = 0;  // begins after so many steps of this start
  std::filesystem::path folder;  // of the files
  std::string title;
  double tokens_per_step = 0, model_flops_per_token = 0;
};

class StepProfile {
 public:
  /// Makes the folder (UsageError when that fails) and measures the ceilings. Collective.
  StepProfile(ProfileOptions options, const Ceilings& ceilings, const Mesh& mesh);
  ~StepProfile();

  /// Around everything that belongs to one step. After the last profiled one the table is printed and the
  /// files are written; that is collective.
  void begin_step(int64_t step);
  void end_step();
  /// When the training ends: what is there so far.
  void finish();

 private:
  ProfileOptions options_;
  Ceilings ceilings_;
  const Mesh& mesh_;
  std::unique_ptr<Profiler> profiler_;
  int64_t steps_seen_ = 0, offset_ns_ = 0;
  bool running_ = false, reported_ = false;
};

}  // namespace shoal
