// Races that a test plants on purpose.
#pragma once

#include <gtest/gtest.h>

#include "tests/cuda/emulator/machine.h"

namespace shoal::testing {

/// How many races TSan may have reported when the running test ends.
int& expected_races();

/// Calls body; returns the number of races that TSan reported in it, which are then expected and not shown.
template <class F>
int races_in(const F& body) {
  const int before = emulator::races();
  ::testing::internal::CaptureStderr();
  body();
  ::testing::internal::GetCapturedStderr();
  const int found = emulator::races() - before;
  expected_races() += found;
  return found;
}

}  // namespace shoal::testing
