#include "core/base/threads.h"

#include "core/base/error.h"

namespace shoal {

namespace {
thread_local int team_size = 1;
}

int num_threads() {
  return team_size;
}

void set_num_threads(int threads) {
  SHOAL_CHECK(threads >= 1, "set_num_threads: expected at least 1, got ", threads);
  team_size = threads;
}

}  // namespace shoal
