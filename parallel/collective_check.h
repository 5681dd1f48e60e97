// SHOAL_CHECK_COLLECTIVES: every call is compared between the ranks of its group before it starts.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "parallel/collective_call.h"

namespace shoal {

/// SHOAL_CHECK_COLLECTIVES is 1; unset, empty and 0 are no. Throws UsageError for anything else.
bool collective_checks_enabled();

struct CheckedGroup {
  int size;
  std::string name;
  uint64_t call_number;                       // for messages
  std::function<Work(CollectiveCall)> begin;  // starts a call without a check
};
/// Gathers every rank's signature (and the counts of an all_to_all). Throws Error with both calls when two
/// differ. Collective; blocks.
void compare_calls(const CheckedGroup& group, const CollectiveCall& call);

}  // namespace shoal
