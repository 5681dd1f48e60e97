// Compiled without -fsanitize=thread.
#include "tests/cuda/standin/failures.h"

#include <cstring>

namespace shoal::standin {

namespace {

struct Plan {
  const char* next_function = nullptr;  // of fail_next
  int next_error = 0;
  uint64_t calls = 0, failing = UINT64_MAX;
  int error = 0;
  bool stays = false;
  const char* failed = nullptr;
};
thread_local Plan plan;

bool is(const char* a, const char* b) {
  return std::strcmp(a, b) == 0;
}

}  // namespace

void fail_next(const char* function, int error) {
  plan.next_function = function;
  plan.next_error = error;
}
void fail_call(uint64_t number, int error, bool stays) {
  plan = {};
  plan.failing = number;
  plan.error = error;
  plan.stays = stays;
}
void fail_nothing() {
  plan = {};
}
uint64_t num_library_calls() {
  return plan.calls;
}
const char* failed_function() {
  return plan.failed;
}

int planted_failure(const char* function) {
  const bool asks = is(function, "cudaEventQuery") || is(function, "ncclCommGetAsyncError");
  const uint64_t number = asks ? plan.calls : plan.calls++;
  const bool now = number == plan.failing && !asks, later = plan.stays && number > plan.failing;
  int error = now || later ? plan.error : 0;
  if (plan.next_function != nullptr && is(plan.next_function, function)) {
    plan.next_function = nullptr;
    error = plan.next_error;
  }
  if (error != 0 && plan.failed == nullptr) plan.failed = function;
  return error;
}

}  // namespace shoal::standin
