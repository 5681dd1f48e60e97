// The message of an expected failure, so that a test can look into its text.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "core/base/error.h"

namespace shoal::testing {

/// What the E that `call` throws says; "" when it throws nothing. Other exceptions pass through.
template <class E = Error, class F>
std::string error_of(const F& call) {
  try {
    call();
  } catch (const E& e) {
    return e.what();
  }
  return "";
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "expected '" << part << "' in '" << text << "'";
}

}  // namespace shoal::testing
