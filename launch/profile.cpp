#include "launch/profile.h"

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "core/base/log.h"
#include "data/file_io.h"
#include "launch/profile_trace.h"

namespace shoal {

namespace {

int64_t first_begin(const Profiler& profiler) {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const Profiler::Event* e = profiler.events_begin(); e != profiler.events_end(); e++)
    first = std::min(first, e->begin_ns);
  return first;
}

/// When the last rank of a group came to each of its calls, on the clock of rank 0.
std::map<int64_t, int64_t> last_arrivals(const Profiler& profiler, Communicator& group, int64_t offset_ns) {
  std::vector<int64_t> mine;  // call, begin, call, begin, ...
  for (const Profiler::Event* e = profiler.events_begin(); e != profiler.events_end(); e++) {
    if (e->collective.group != &group || e->waits) continue;
    mine.push_back(e->collective.call);
    mine.push_back(e->begin_ns + offset_ns);
  }
  // A full event list may have cut the ranks off at different calls.
  mine.resize(static_cast<size_t>(group.max(std::ssize(mine))), -1);
  const Tensor all = Tensor::empty({std::ssize(mine) * group.size()}, DType::i64);
  group.all_gather(Tensor::from(mine, {std::ssize(mine)}), all).wait();
  std::map<int64_t, int64_t> last;
  const auto* pairs = all.data<int64_t>();
  for (int64_t i = 0; i + 1 < all.numel(); i += 2) {
    if (pairs[i] < 0) continue;
    const auto [at, made] = last.try_emplace(pairs[i], pairs[i + 1]);
    at->second = std::max(at->second, pairs[i + 1]);
  }
  return last;
}

}  // namespace

int64_t clock_offset_ns(Communicator& world) {
  constexpr int kRounds = 5;
  std::vector<int64_t> own, first;  // before and after each barrier
  for (int i = 0; i < kRounds; i++) {
    own.push_back(Profiler::now_ns());
    world.barrier();
    own.push_back(Profiler::now_ns());
  }
  const Tensor of_first = Tensor::from(own, {std::ssize(own)});
  world.broadcast(of_first, 0).wait();
  first = of_first.to_vector<int64_t>();
  // No rank leaves a barrier before every rank has come.
  int64_t low = std::numeric_limits<int64_t>::min(), high = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < own.size(); i += 2) {
    low = std::max(low, first[i] - own[i + 1]);
    high = std::min(high, first[i + 1] - own[i]);
  }
  return low <= 0 && high >= 0 ? 0 : low + (high - low) / 2;
}

std::vector<Profiler::PhaseTimes> waited_times(const Profiler& profiler, const Mesh& mesh,
                                               int64_t offset_ns) {
  std::vector<Profiler::PhaseTimes> waited(profiler.rows().size(), Profiler::PhaseTimes{});
  std::set<const Communicator*> seen;
  std::vector<Communicator*> groups = {&mesh.world()};
  for (int axis = 0; axis < kNumAxes; axis++) groups.push_back(&mesh.comm(static_cast<Axis>(axis)));
  for (Communicator* group : groups) {
    if (group->size() < 2 || !seen.insert(group).second) continue;
    const std::map<int64_t, int64_t> last = last_arrivals(profiler, *group, offset_ns);
    for (const Profiler::Event* e = profiler.events_begin(); e != profiler.events_end(); e++) {
      if (e->collective.group != group || !e->waits) continue;
      const auto found = last.find(e->collective.call);
      if (found == last.end()) continue;
      const int64_t until = std::min(found->second - offset_ns, e->end_ns);
      waited[profiler.row_of(*e)][static_cast<size_t>(e->phase)] += std::max<int64_t>(0, until - e->begin_ns);
    }
  }
  return waited;
}

ProfileSummary summarize_profile(const Profiler& profiler, const Ceilings& ceilings, const Mesh& mesh,
                                 int64_t offset_ns) {
  Communicator& world = mesh.world();
  ProfileSummary summary;
  summary.steps = profiler.num_stretches();
  summary.world_size = world.size();
  summary.ceilings = ceilings;
  summary.events_dropped = world.sum(profiler.num_dropped());
  summary.step_ms = static_cast<double>(profiler.total_ns()) * 1e-6 /
                    static_cast<double>(std::max<int64_t>(1, summary.steps));
  summary.rows = profile_rows(profiler, world.size() > 1 ? waited_times(profiler, mesh, offset_ns)
                                                         : std::vector<Profiler::PhaseTimes>{});
  nlohmann::json own = nlohmann::json::object();
  for (const ProfileRow& row : summary.rows) own[row.name] = row.ms;
  std::vector<nlohmann::json> of_ranks;
  for (const std::string& text : world.gather_strings(own.dump()))
    of_ranks.push_back(nlohmann::json::parse(text));
  for (ProfileRow& row : summary.rows) {
    row.min_ms = row.max_ms = row.ms;
    for (const nlohmann::json& times : of_ranks) {
      const double ms = times.value(row.name, 0.0);
      row.min_ms = std::min(row.min_ms, ms);
      row.max_ms = std::max(row.max_ms, ms);
    }
  }
  return summary;
}

StepProfile::StepProfile(ProfileOptions options, const Ceilings& ceilings, const Mesh& mesh)
    : options_(std::move(options)), ceilings_(ceilings), mesh_(mesh) {
  if (mesh.world().rank() == 0) {
    std::error_code error;
    std::filesystem::create_directories(options_.folder, error);
    if (error) {
      throw UsageError(str("run.profile: the folder of its files, ", options_.folder.string(),
                           ", cannot be created: ", error.message(),
                           "; free the name, or set run.profile: 0"));
    }
  }
  profiler_ = std::make_unique<Profiler>(kProfileEvents);
}

StepProfile::~StepProfile() = default;

void StepProfile::begin_step(int64_t step) {
  if (reported_ || steps_seen_++ < options_.after) return;
  if (profiler_->num_stretches() == 0) offset_ns_ = clock_offset_ns(mesh_.world());
  profiler_->start(step);
  running_ = true;
}

void StepProfile::end_step() {
  if (!running_) return;
  profiler_->stop();
  running_ = false;
  if (profiler_->num_stretches() == options_.steps) finish();
}

void StepProfile::finish() {
  if (reported_) return;
  reported_ = true;
  Communicator& world = mesh_.world();
  if (profiler_->num_stretches() == 0) {
    if (world.rank() == 0)
      log::warn("run.profile: the training ended before step ", options_.after + 1,
                " of this start, so nothing was profiled; lower run.profile_after or raise run.steps");
    return;
  }
  ProfileSummary summary = summarize_profile(*profiler_, ceilings_, mesh_, offset_ns_);
  summary.tokens_per_step = options_.tokens_per_step;
  summary.model_flops_per_token = options_.model_flops_per_token;
  const int64_t zero = world.min(first_begin(*profiler_) + offset_ns_);
  const auto file = [&](const std::string& name) { return (options_.folder / name).string(); };
  if (world.rank() == 0) log::info(summary.text());
  try {  // the traces last: a run that is being stopped may not have the time for them
    if (world.rank() == 0) {
      write_file(file("profile.json"), summary.to_json().dump(2) + "\n");
      write_file(file("profile.txt"), summary.text() + "\n");
    }
    write_file(file(str("trace-rank", world.rank(), ".json")),
               trace_json(*profiler_, world.rank(), options_.title, offset_ns_ - zero));
  } catch (const Error& e) {
    log::warn("run.profile: ", e.what());  // the training is worth more than its profile
  }
  if (world.rank() != 0) return;
  if (profiler_->num_stretches() < options_.steps)
    log::info("  the training ended after ", profiler_->num_stretches(), " of ", options_.steps,
              " steps to profile");
  if (summary.events_dropped > 0)
    log::info("  the traces lack ", summary.events_dropped, " spans; profile fewer steps to see all");
  log::info("  files      ", options_.folder.string(), ": profile.txt, profile.json, trace-rank*.json");
}

}  // namespace shoal
