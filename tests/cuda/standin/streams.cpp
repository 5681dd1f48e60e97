#include "tests/cuda/standin/streams.h"

namespace shoal::standin {

void enqueue(cudaStream_t, const char*, std::function<void()> work) {
  work();
}

}  // namespace shoal::standin
