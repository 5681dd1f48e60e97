// Schedules against a simulation of their own: each action once, nothing before what it needs, no waiting in
// a circle even when every message waits for its receiver, micro-batches held, idle time.
#include "parallel/pipeline_schedule.h"

#include <deque>
#include <map>
#include <set>
#include <tuple>

#include "tests/support/error_of.h"

namespace shoal {
namespace {

using Kind = PipelineAction::Kind;
using testing::error_of;

std::vector<std::pair<PipelineKind, PipelineShape>> legal_cases() {
  std::vector<std::pair<PipelineKind, PipelineShape>> all;
  for (const int p : {1, 2, 3, 4, 7}) {
    for (const int m : {1, 2, 3, 4, 6, 8, 12, 21}) {
      for (const PipelineKind kind :
           {PipelineKind::gpipe, PipelineKind::one_f_one_b, PipelineKind::zero_bubble})
        all.push_back({kind, {p, 1, m}});
      for (const int v : {1, 2, 3}) {
        if (m % p == 0 && (v == 1 || p > 1)) all.push_back({PipelineKind::interleaved, {p, v, m}});
      }
    }
  }
  return all;
}

std::string text_of(const PipelineShape& s) {
  return str("p ", s.num_ranks, ", v ", s.virtual_stages, ", m ", s.num_micro_batches);
}

TEST(PipelineSchedule, EveryStageRunsEveryMicroBatchOnceOnItsRank) {
  for (const auto& [kind, shape] : legal_cases()) {
    const PipelineSchedule schedule = make_pipeline_schedule(kind, shape);
    const bool split = kind == PipelineKind::zero_bubble;
    std::set<std::tuple<Kind, int, int>> seen;
    for (size_t r = 0; r < schedule.ranks.size(); r++) {
      for (const PipelineAction& a : schedule.ranks[r]) {
        EXPECT_EQ(a.stage % shape.num_ranks, static_cast<int>(r));
        EXPECT_LT(a.stage, shape.num_stages());
        EXPECT_LT(a.micro_batch, shape.num_micro_batches);
        EXPECT_EQ(a.kind == Kind::backward, !split && a.kind != Kind::forward);
        EXPECT_TRUE(seen.insert({a.kind, a.stage, a.micro_batch}).second) << a.text();
      }
    }
    EXPECT_EQ(std::ssize(seen), int64_t{split ? 3 : 2} * shape.num_stages() * shape.num_micro_batches);
  }
}

/// Runs the steps of all ranks with messages that both sides wait for, and checks what each action finds.
void run_with_rendezvous(const PipelineSchedule& schedule) {
  struct Call {
    PipelineTransfer transfer;
    bool operator==(const Call& o) const {
      return transfer.from == o.transfer.from && transfer.to == o.transfer.to &&
             transfer.made_by == o.transfer.made_by;
    }
  };
  struct Event {
    std::optional<Call> call;
    PipelineAction action;
  };
  const int p = schedule.shape.num_ranks, last = schedule.shape.num_stages() - 1;
  std::vector<std::deque<Event>> todo(static_cast<size_t>(p));
  for (int r = 0; r < p; r++) {
    for (const PipelineStep& step : pipeline_steps(schedule, r)) {
      for (const PipelineTransfer& t : step.receives) todo[static_cast<size_t>(r)].push_back({Call{t}, {}});
      todo[static_cast<size_t>(r)].push_back({std::nullopt, step.action});
      for (const PipelineTransfer& t : step.sends) todo[static_cast<size_t>(r)].push_back({Call{t}, {}});
    }
  }
  std::vector<std::set<std::tuple<bool, int, int>>> has(
      static_cast<size_t>(p));  // gradient?, stage, micro-batch
  std::set<std::tuple<Kind, int, int>> done;
  size_t left = 0;
  for (const auto& events : todo) left += events.size();
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t r = 0; r < todo.size(); r++) {
      if (todo[r].empty()) continue;
      const Event event = todo[r].front();
      if (event.call) {
        const PipelineTransfer& t = event.call->transfer;
        const size_t other = static_cast<size_t>(static_cast<int>(r) == t.from ? t.to : t.from);
        if (todo[other].empty() || !todo[other].front().call || !(*todo[other].front().call == *event.call))
          continue;
        const auto [kind, stage, b] = std::tuple{t.made_by.kind, t.made_by.stage, t.made_by.micro_batch};
        EXPECT_TRUE(done.contains({kind, stage, b})) << "sent before it was made: " << t.made_by.text();
        has[static_cast<size_t>(t.to)].insert({kind != Kind::forward, stage, b});
        todo[other].pop_front();
        left--;
      } else {
        const auto [kind, stage, b] = event.action;
        const auto& mine = has[r];
        if (kind == Kind::forward && stage > 0 && p > 1) {
          EXPECT_TRUE(mine.contains({false, stage - 1, b}));
        }
        if ((kind == Kind::backward || kind == Kind::backward_input)) {
          EXPECT_TRUE(done.contains({Kind::forward, stage, b})) << event.action.text();
          if (stage < last && p > 1) {
            EXPECT_TRUE(mine.contains({true, stage + 1, b})) << event.action.text();
          }
        }
        if (kind == Kind::backward_weight) {
          EXPECT_TRUE(done.contains({Kind::backward_input, stage, b}));
        }
        done.insert({kind, stage, b});
      }
      todo[r].pop_front();
      left--;
      moved = true;
    }
  }
  EXPECT_EQ(left, 0U) << "ranks wait for each other";
}

TEST(PipelineSchedule, RanksNeverWaitInACircleEvenWhenEveryMessageWaitsForItsReceiver) {
  for (const auto& [kind, shape] : legal_cases()) {
    SCOPED_TRACE(text_of(shape));
    run_with_rendezvous(make_pipeline_schedule(kind, shape));
    run_with_rendezvous(make_forward_schedule(shape));
  }
}

/// The most activations of a stage that a rank keeps at once.
int peak_kept(const std::vector<PipelineAction>& actions) {
  int kept = 0, peak = 0;
  for (const PipelineAction& a : actions) {
    kept += a.kind == Kind::forward ? 1 : a.kind == Kind::backward_input ? 0 : -1;
    peak = std::max(peak, kept);
  }
  return peak;
}

TEST(PipelineSchedule, RanksKeepAsManyMicroBatchesAsThePapersSay) {
  for (const auto& [kind, shape] : legal_cases()) {
    SCOPED_TRACE(text_of(shape));
    const auto [p, v, m] = shape;
    const PipelineSchedule schedule = make_pipeline_schedule(kind, shape);
    for (int r = 0; r < p; r++) {
      const int peak = peak_kept(schedule.ranks[static_cast<size_t>(r)]);
      if (kind == PipelineKind::gpipe) {
        EXPECT_EQ(peak, m);
      }
      if (kind == PipelineKind::one_f_one_b) {
        EXPECT_EQ(peak, std::min(m, p - r));
      }
      if (kind == PipelineKind::interleaved) {
        EXPECT_EQ(peak, std::min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1));
      }
      if (kind == PipelineKind::zero_bubble) {
        EXPECT_LE(peak, std::min(m, p));  // ZB-H1: 1f1b's largest
      }
    }
  }
}

TEST(PipelineSchedule, RanksAreIdleAsLongAsThePapersSay) {
  const PipelineCosts costs;  // forward, input and weight gradients take equally long
  for (const auto& [kind, shape] : legal_cases()) {
    SCOPED_TRACE(text_of(shape));
    const auto [p, v, m] = shape;
    const int64_t total = time_schedule(make_pipeline_schedule(kind, shape), costs).total, work = 3 * m * v;
    if (kind == PipelineKind::gpipe || kind == PipelineKind::one_f_one_b) {
      EXPECT_EQ(total - work, 3 * (p - 1));
    }
    // A stage is 1/v as long: the bubble of p - 1 stages is 1/v of the above.
    if (kind == PipelineKind::interleaved) {
      EXPECT_EQ(total - work, 3 * (p - 1));
    }
    // (p - 1)(F + B - W), where there are enough weight gradients to fill it with.
    if (kind == PipelineKind::zero_bubble && m >= p) {
      EXPECT_EQ(total - work, p - 1);
    }
    if (kind == PipelineKind::zero_bubble) {
      EXPECT_LE(total - work, 3 * (p - 1));
    }
  }
}

TEST(PipelineSchedule, RefusesWhatAScheduleCannotRun) {
  EXPECT_NE(error_of([] {
              make_pipeline_schedule(PipelineKind::interleaved, {4, 2, 6});
            }).find("multiple of 4"),
            std::string::npos);
  EXPECT_NE(error_of([] {
              make_pipeline_schedule(PipelineKind::one_f_one_b, {4, 2, 8});
            }).find("got 2 stages"),
            std::string::npos);
  EXPECT_NE(error_of([] {
              make_pipeline_schedule(PipelineKind::gpipe, {0, 1, 8});
            }).find("got 0, 1 and 8"),
            std::string::npos);
  EXPECT_NE(error_of([] { pipeline_kind("2f2b"); }).find("got '2f2b'"), std::string::npos);
}

TEST(PipelineSchedule, TimingNamesRanksThatWaitForEachOther) {
  // Stage 1 wants a gradient of its own stage before it makes the forward.
  const PipelineSchedule schedule{
      {2, 1, 1},
      {{{Kind::forward, 0, 0}, {Kind::backward, 0, 0}}, {{Kind::backward, 1, 0}, {Kind::forward, 1, 0}}}};
  const std::string error = error_of([&] { time_schedule(schedule); });
  EXPECT_NE(error.find("rank 0 in backward of micro-batch 0 by stage 0"), std::string::npos) << error;
  EXPECT_NE(error.find("rank 1 in backward of micro-batch 0 by stage 1"), std::string::npos) << error;
}

}  // namespace
}  // namespace shoal
