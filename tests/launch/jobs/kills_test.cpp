// kill -9 of ranks and of mpirun at random moments, several times in a row on one run. The next start goes on
// from the newest checkpoint and clears up what the killed job left.
#include <map>
#include <mutex>

#include "tests/launch/jobs/disturbed_run.h"

namespace shoal::testing {
namespace {

enum class Moment { load, first_step, training, save };
constexpr int kMpirun = -1, kEverything = -2;
// At each point of a save: long against the time that a busy machine may take to carry a kill out.
constexpr int kPointDelayMs = 100;

struct Kill {
  Moment moment;
  int victim;  // a rank, kMpirun, kEverything
  int at;      // load, save: points passed in the job; training: rows of the log
  std::chrono::microseconds delay;
  std::string text() const {
    const char* const moments[] = {"load", "first step", "training", "save"};
    const std::string who = victim == kMpirun       ? "mpirun"
                            : victim == kEverything ? "everything"
                                                    : str("rank ", victim);
    return str("kill of ", who, " in ", moments[static_cast<int>(moment)], " at ", at, " + ", delay.count(),
               " us");
  }
};

/// Where rank 0 was, by its log: the last point of loading or saving; "" in the steps between.
std::string last_point(const std::string& log) {
  const size_t point = log.rfind("failpoint "), saved = log.rfind("  checkpoint of step ");
  if (point == std::string::npos || (saved != std::string::npos && saved > point)) return "";
  return log.substr(point + 10, log.find(':', point) - point - 10);
}
bool is_load_point(const std::string& point) {
  return point == "before-verify" || point == "before-load" || point == "after-load";
}
int points_of_saving(const std::string& log) {
  int n = count(log, "failpoint ");
  for (const char* point : {"before-verify", "before-load", "after-load"})
    n -= count(log, str("failpoint ", point));
  return n;
}

/// Where kills have hit.
class Hits {
 public:
  void add(const std::string& point) {
    const std::lock_guard lock(mutex_);
    points_[point]++;
  }
  int in_saves() const {
    int n = 0;
    for (const auto& [point, times] : points_) n += point.empty() || is_load_point(point) ? 0 : times;
    return n;
  }
  int num_points() const { return static_cast<int>(points_.size()); }
  std::string text() const {
    std::string out;
    for (const auto& [point, times] : points_)
      out += str(point.empty() ? "(steps)" : point, ' ', times, "  ");
    return out;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int> points_;
};

bool reached(const Kill& kill, const DisturbedRun& run, const Job& job) {
  switch (kill.moment) {
    case Moment::load:
      return count(run.log(), "failpoint ") >= kill.at;
    case Moment::first_step:
      return contains(job.out_so_far(), "grad norm");
    case Moment::training:
      // The rows may be those of the job before; the header of the table is of this one.
      return contains(job.out_so_far(), "grad norm") && run.folder().num_rows() >= kill.at;
    case Moment::save:
      return points_of_saving(run.log()) >= kill.at;
  }
  return false;
}

void kill_once(DisturbedRun& run, const Kill& kill, Hits& hits) {
  SCOPED_TRACE(kill.text());
  std::vector<std::string> slowly;
  // Saving without delays takes a few milliseconds, so that hardly any kill would hit it.
  if (kill.moment == Moment::load || kill.moment == Moment::save)
    slowly = {str("SHOAL_CHECKPOINT_FAILPOINT=*:delay:", kPointDelayMs)};
  const std::unique_ptr<Job> job = run.start(slowly);
  std::optional<pid_t> rank;  // looked up first: that takes time, and the job goes on
  const auto ready = [&] {
    if (kill.victim >= 0 && !rank) rank = job->rank(kill.victim);
    return job->has_ended() || ((kill.victim < 0 || rank) && reached(kill, run, *job));
  };
  ASSERT_TRUE(wait_until(ready, kTimeLimit)) << job->wait(0).all();
  std::this_thread::sleep_for(kill.delay);
  ASSERT_FALSE(job->has_ended()) << "the run was over before the kill:\n" << job->wait().all();
  // Now, because other ranks may go on for a second until mpirun ends them.
  const std::string hit = last_point(run.log());
  if (kill.victim == kEverything) {
    ::kill(job->pid(), SIGKILL);
    for (const pid_t process : job->processes()) ::kill(process, SIGKILL);
  } else {
    ::kill(rank.value_or(job->pid()), SIGKILL);
  }
  const Ended ended = job->wait(kTimeLimit);
  EXPECT_NE(ended.code, 124) << "the job hangs";
  EXPECT_NE(ended.code, 0) << ended.all();
  run.check_ended(*job);
  hits.add(hit);
}

class Kills : public ::testing::Test {
 protected:
  /// A run with five kills in a row, then its undisturbed rest.
  void disturb(int chain, int ranks, const std::vector<Moment>& moments) {
    DisturbedRun run(ranks);
    for (size_t k = 0; k < moments.size(); k++) {
      const auto number = static_cast<uint64_t>(100 * chain) + 10 * k;
      Kill kill{moments[k], 0, 0, std::chrono::microseconds(random_.below(number, 25000))};
      kill.victim = static_cast<int>(random_.below(number + 1, static_cast<uint64_t>(ranks) + 2)) - 2;
      const auto pick = [&](int n) {
        return static_cast<int>(random_.below(number + 2, static_cast<uint64_t>(n)));
      };
      if (kill.moment == Moment::training) kill.at = 2 + 15 * static_cast<int>(k) + pick(15);
      // A save passes 17 to 21 points: one of the first save, or of the second.
      if (kill.moment == Moment::save) {
        kill.at = random_.below(number + 3, 3) < 2 ? 1 + pick(17) : 20 + pick(10);
        kill.delay *= 4;
      }
      if (kill.moment == Moment::load) kill.at = 1 + pick(3);
      kill_once(run, kill, hits_);
      if (HasFatalFailure()) return;
    }
    run.expect_the_undisturbed_end();
  }
  void disturb_all(int chains, const std::vector<Moment>& moments) {
    undisturbed(2);
    undisturbed(3);
    two_at_a_time(chains, [&](int chain) { disturb(chain, chain % 4 == 3 ? 3 : 2, moments); });
    std::printf("hit: %s\n", hits_.text().c_str());
  }

  const RandomStream random_{test_seed(), "kills"};
  Hits hits_;
};

constexpr auto kTraining = Moment::training, kSave = Moment::save, kLoad = Moment::load,
               kFirstStep = Moment::first_step;

TEST_F(Kills, FortyDuringTrainingLoseNothing) {
  disturb_all(8, {kTraining, kTraining, kTraining, kTraining, kTraining});
}

TEST_F(Kills, CK_01_FortyDuringSavesLoseNothing) {
  disturb_all(8, {kSave, kSave, kSave, kSave, kSave});
  EXPECT_GE(hits_.in_saves(), 36) << "too few kills hit a save: " << hits_.text();
  EXPECT_GE(hits_.num_points(), 8) << "the kills hit the same few points: " << hits_.text();
}

TEST_F(Kills, InARowDuringLoadingAndTheFirstStepsLoseNothing) {
  undisturbed(2);
  two_at_a_time(2, [&](int chain) {
    disturb(chain, 2,
            chain == 0 ? std::vector{kFirstStep, kTraining, kLoad, kLoad, kLoad, kLoad}
                       : std::vector{kFirstStep, kSave, kTraining, kFirstStep, kFirstStep, kLoad});
  });
}

/// A rank dies while the others wait for it: within 30 s the job is over, the launcher has named the rank,
/// and nothing is left.
void expect_the_end(Job& job, int victim) {
  const Ended ended = job.wait(30);
  EXPECT_NE(ended.code, 124) << "the job hangs";
  EXPECT_NE(ended.code, 0) << ended.all();
  EXPECT_TRUE(contains(ended.all(), str("rank ", victim))) << ended.all();
  EXPECT_TRUE(job.leaves_nothing_alive()) << job.processes().size() << " processes are alive";
}

std::vector<std::string> trained_under(const std::vector<std::string>& layout,
                                       const std::vector<std::string>& variables = {}) {
  std::vector<std::string> command = train_command(2, variables);
  command.insert(command.end(), layout.begin(), layout.end());
  return command;
}

TEST_F(Kills, OfARankAtAnyTimeEndTheJobUnderEveryLayoutWithItsName) {
  const std::vector<std::vector<std::string>> layouts = {
      {"parallel.ep=2"},
      {"parallel.tp=2"},
      {"parallel.pp=2"},
      {"parallel.pp=2", "parallel.pipeline.schedule=zero_bubble"},
      {"parallel.cp=2", "parallel.context=ring"},
      {"parallel.zero=2"},
      {"parallel.zero=3"},
      {"parallel.zero=3", "parallel.pp=2"}};
  two_at_a_time(static_cast<int>(layouts.size()), [&](int i) {
    const auto number = static_cast<size_t>(i);
    SCOPED_TRACE(layouts[number].back());
    const ShoalFolder folder(/*slow=*/true);
    const int victim = i % 2;
    Job job(trained_under(layouts[number]), folder.path(""));
    std::optional<pid_t> rank;
    ASSERT_TRUE(wait_until(
        [&] {
          if (!rank) rank = job.rank(victim);
          return job.has_ended() || (rank && folder.num_rows() >= 5 + 2 * i);
        },
        kTimeLimit));
    std::this_thread::sleep_for(std::chrono::microseconds(random_.below(number, 20000)));
    ASSERT_FALSE(job.has_ended()) << job.wait().all();
    ::kill(*rank, SIGKILL);
    expect_the_end(job, victim);
  });
}

/// The calls of a group that come before tell the phase: a micro-batch makes three all_to_all for each of its
/// three MoE layers in forward (counts, which are i64, rows, results), then two in backward.
TEST_F(Kills, OfARankInEveryPhaseEndTheJobWithItsName) {
  struct Phase {
    const char* name;
    std::vector<std::string> layout;
    std::string point, before;
  };
  constexpr int kForward = 9, kMicroBatch = 15, kFar = 20 * kMicroBatch;
  const std::vector<Phase> phases = {
      {"forward exchange", {"parallel.ep=2"}, str("ep:all_to_all:", kFar + 1), " i64 f32 f32"},
      {"results of experts", {"parallel.ep=2"}, str("ep:all_to_all:", kFar + 2), " f32 i64 f32"},
      {"backward exchange", {"parallel.ep=2"}, str("ep:all_to_all:", kFar + kForward), " f32 f32 i64"},
      {"pipeline send", {"parallel.pp=2"}, "pp:broadcast:41", " f32"},
      {"reduction of gradients", {"parallel.ep=1"}, "world:all_reduce(sum, f32:7", " f32"},
      {"optimizer gather", {"parallel.zero=1", "parallel.ep=1"}, "world:all_gather(f32:7", " f32"}};
  two_at_a_time(static_cast<int>(phases.size()), [&](int i) {
    const Phase& phase = phases[static_cast<size_t>(i)];
    SCOPED_TRACE(phase.name);
    const ShoalFolder folder(/*slow=*/true);
    const int victim = i % 2;
    Job job(trained_under(phase.layout, {str("SHOAL_COLLECTIVE_FAILPOINT=", victim, ':', phase.point)}),
            folder.path(""));
    ASSERT_TRUE(wait_until([&] { return job.has_ended(); }, kTimeLimit));
    const std::string all = job.wait(0).all();
    EXPECT_TRUE(contains(all, str("failpoint: rank ", victim, " is killed"))) << all;
    EXPECT_TRUE(contains(all, str(", after", phase.before))) << all;
    expect_the_end(job, victim);
  });
}

/// What runs under ASan too.
TEST_F(Kills, OneOfEachKindLosesNothing) {
  disturb(0, 2, {kTraining, kSave, kLoad, kFirstStep});
}

}  // namespace
}  // namespace shoal::testing
