// Profiler: spans, rows and their sums. Times are real, so only sums and orders are checked.
#include "core/base/profiler.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace shoal::testing {
namespace {

using Phase = Profiler::Phase;

int64_t sum_of_rows(const Profiler& profiler) {
  int64_t sum = 0;
  for (const Profiler::Row& row : profiler.rows()) sum += row.total_ns();
  return sum;
}

const Profiler::Row& row(const Profiler& profiler, const std::string& name) {
  for (const Profiler::Row& row : profiler.rows()) {
    if (row.name == name) return row;
  }
  throw std::runtime_error("no row " + name);
}

bool has_row(const Profiler& profiler, const std::string& name) {
  for (const Profiler::Row& row : profiler.rows()) {
    if (row.name == name) return true;
  }
  return false;
}

/// "name" of every span in the order of their ends.
std::vector<std::string> names(const Profiler& profiler) {
  std::vector<std::string> out;
  for (const auto* e = profiler.events_begin(); e != profiler.events_end(); e++) {
    out.push_back(e->index < 0 ? e->name : std::string(e->name) + " " + std::to_string(e->index));
  }
  return out;
}

[[gnu::noinline]] void kernel(const char* name, const Cost& cost) {
  const ProfileCall call(*Profiler::active(), name, cost);
}

TEST(Profiler, RowsSumToTheWholeToTheNanosecond) {
  Profiler profiler(100);
  for (int64_t step = 1; step <= 3; step++) {
    profiler.start(step);
    {
      const ProfileSection outer("outer");
      for (int i = 0; i < 5; i++) {
        const ProfileSection inner("inner");
        kernel("k", {.flops = 2, .bytes = 3});
      }
    }
    profiler.stop();
  }
  EXPECT_EQ(profiler.num_stretches(), 3);
  EXPECT_EQ(sum_of_rows(profiler), profiler.total_ns());
  EXPECT_GT(profiler.total_ns(), 0);
  EXPECT_EQ(row(profiler, "inner").calls, 15);
  EXPECT_EQ(row(profiler, "inner").cost.flops, 30);
  EXPECT_EQ(row(profiler, "inner").cost.bytes, 45);
  EXPECT_EQ(row(profiler, "outer").calls, 0);
}

TEST(Profiler, NothingIsSeenWhenItIsOffOrOnOtherThreads) {
  EXPECT_EQ(Profiler::active(), nullptr);
  { const ProfileSection section("before"); }
  Profiler profiler(100);
  profiler.start(1);
  std::thread([] {
    EXPECT_EQ(Profiler::active(), nullptr);
    const ProfileSection section("elsewhere");
  }).join();
  profiler.stop();
  { const ProfileSection section("after"); }
  EXPECT_EQ(names(profiler), std::vector<std::string>{"step 1"});
}

TEST(Profiler, AProfilerThatGoesAwayIsNoLongerActive) {
  {
    Profiler profiler(10);
    profiler.start(1);
  }
  EXPECT_EQ(Profiler::active(), nullptr);
}

TEST(Profiler, ScopesWithoutASectionCountForTheOneAround) {
  Profiler profiler(100);
  profiler.start(1);
  {
    const ProfileSection section("section");
    const ProfileScope scope("layer", 3);
    kernel("k", {.bytes = 7});
  }
  profiler.stop();
  EXPECT_EQ(row(profiler, "section").cost.bytes, 7);
  EXPECT_EQ(names(profiler), (std::vector<std::string>{"k", "layer 3", "section", "step 1"}));
}

TEST(Profiler, CollectivesAreExchangeExceptInWholeSectionsWhichTakeEverything) {
  const int group = 0;
  const CollectiveId id{"all_to_all", &group, 4, 100};
  Profiler profiler(100);
  profiler.start(1);
  {
    const ProfileSection section("dispatch");
    { const ProfileCall start(id, /*waits=*/false); }
    { const ProfileCall wait(id, /*waits=*/true); }
  }
  {
    const ProfileSection section("optimizer", ProfileSection::kWhole);
    const ProfileSection inside("norms");
    { const ProfileCall wait(id, /*waits=*/true); }
    kernel("k", {.bytes = 1});
  }
  { const ProfileCall none(CollectiveId{}, /*waits=*/true); }  // a call that was made while it was off
  profiler.stop();
  EXPECT_EQ(row(profiler, Profiler::kExchange).calls, 1);
  EXPECT_EQ(row(profiler, Profiler::kExchange).collective_bytes, 100);
  EXPECT_EQ(row(profiler, "optimizer").collective_bytes, 100);
  EXPECT_EQ(row(profiler, "optimizer").cost.bytes, 1);
  EXPECT_FALSE(has_row(profiler, "norms"));
  for (const auto* e = profiler.events_begin(); e != profiler.events_end(); e++) {
    if (e->kind == Profiler::Kind::collective) {
      EXPECT_EQ(e->collective.call, 4U);
      EXPECT_LT(profiler.row_of(*e), profiler.rows().size());
    }
  }
}

TEST(Profiler, AKernelInsideAKernelIsPartOfIt) {
  Profiler profiler(100);
  profiler.start(1);
  {
    const ProfileCall outer(profiler, "outer", {.flops = 10});
    const ProfileCall inner(profiler, "inner", {.flops = 4});
  }
  kernel("next", {});
  profiler.stop();
  EXPECT_EQ(row(profiler, Profiler::kOther).cost.flops, 10);
  EXPECT_EQ(row(profiler, Profiler::kOther).calls, 2);
  EXPECT_EQ(names(profiler), (std::vector<std::string>{"outer", "next", "step 1"}));
}

TEST(Profiler, ACollectiveThatIsPassedOnIsOneCall) {
  const int outer_group = 0, inner_group = 0;
  Profiler profiler(100);
  profiler.start(1);
  {
    const ProfileCall outer(CollectiveId{"all_reduce", &outer_group, 0, 8}, /*waits=*/false);
    const ProfileCall inner(CollectiveId{"all_reduce", &inner_group, 5, 8}, /*waits=*/false);
    kernel("sum", {.bytes = 1});  // the work of a collective counts for it
  }
  profiler.stop();
  EXPECT_EQ(names(profiler), (std::vector<std::string>{"sum", "all_reduce", "step 1"}));
  EXPECT_EQ(row(profiler, Profiler::kExchange).cost.bytes, 1);
  EXPECT_EQ(row(profiler, Profiler::kExchange).calls, 2);
}

TEST(Profiler, BackwardEntersThePlacesOfForwardAgainWithoutLeavingWhatIsCommon) {
  Profiler profiler(100);
  profiler.start(1);
  Profiler::Node up = 0, down = 0, other = 0;
  {
    const ProfileForward forward;
    const ProfileScope layer("layer", 0);
    {
      const ProfileSection section("up");
      up = profiler.node();
    }
    {
      const ProfileSection section("down");
      down = profiler.node();
    }
  }
  {
    const ProfileForward forward;
    const ProfileScope layer("layer", 1);
    other = profiler.node();
  }
  const int before = profiler.depth();
  profiler.enter_phase(Phase::backward);
  const int depth = profiler.depth();
  for (const Profiler::Node node : {other, down, down, up}) {
    profiler.move_to(node, depth);
    EXPECT_EQ(profiler.node(), node);
    kernel("k", {});
  }
  profiler.leave_to(depth - 1);
  EXPECT_EQ(profiler.depth(), before);
  kernel("after", {});
  profiler.stop();
  const std::vector<std::string> all = names(profiler);
  EXPECT_EQ(std::vector<std::string>(all.begin() + 6, all.end()),
            (std::vector<std::string>{"k", "layer 1", "k", "k", "down", "k", "up", "layer 0", "backward",
                                      "after", "step 1"}));
  for (const auto* e = profiler.events_begin(); e != profiler.events_end(); e++) {
    const std::string name = e->name;
    if (name == "k" || name == "backward") {
      EXPECT_EQ(e->phase, Phase::backward);
    }
    if (name == "after" || name == "step") {
      EXPECT_EQ(e->phase, Phase::none);
    }
  }
  EXPECT_GT(row(profiler, "down").ns[static_cast<size_t>(Phase::backward)], 0);
  EXPECT_EQ(sum_of_rows(profiler), profiler.total_ns());
}

TEST(Profiler, WhatTheTraceHasNoRoomForIsCountedAndTheTableStaysWhole) {
  Profiler profiler(3);
  profiler.start(1);
  for (int i = 0; i < 10; i++) kernel("k", {.bytes = 1});
  profiler.stop();
  EXPECT_EQ(profiler.events_end() - profiler.events_begin(), 3);
  EXPECT_EQ(profiler.num_dropped(), 8);
  EXPECT_EQ(row(profiler, Profiler::kOther).calls, 10);
  EXPECT_EQ(row(profiler, Profiler::kOther).cost.bytes, 10);
  EXPECT_EQ(sum_of_rows(profiler), profiler.total_ns());
}

void nest(int levels) {
  if (levels == 0) return;
  const ProfileScope scope("level");
  nest(levels - 1);
}

TEST(Profiler, DeeperNestingThanItKeepsIsLeftOut) {
  Profiler profiler(1000);
  profiler.start(1);
  for (int i = 0; i < 2; i++) nest(200);
  EXPECT_EQ(profiler.depth(), 1);
  { const ProfileSection section("again"); }
  profiler.stop();
  EXPECT_GT(row(profiler, "again").total_ns(), 0);
  EXPECT_EQ(sum_of_rows(profiler), profiler.total_ns());
}

TEST(Profiler, MoreDifferentScopesThanItKeepsCountForTheOneAround) {
  Profiler profiler(10);
  profiler.start(1);
  for (int i = 0; i < 20'000; i++) {
    const ProfileScope scope("layer", i);
    kernel("k", {.bytes = 1});
  }
  profiler.stop();
  EXPECT_EQ(row(profiler, Profiler::kOther).calls, 20'000);
}

TEST(Profiler, CannotBeStartedTwiceOnAThreadNorStoppedOnAnother) {
  Profiler first(10), second(10);
  first.start(1);
  EXPECT_ANY_THROW(second.start(1));
  EXPECT_ANY_THROW(second.stop());
  first.stop();
}

}  // namespace
}  // namespace shoal::testing
