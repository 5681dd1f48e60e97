#include "core/autograd/late_weights.h"

#include <utility>

#include "core/base/profiler.h"

namespace shoal {

namespace {
thread_local WeightQueue* active_queue = nullptr;
}

WeightQueue* WeightQueue::active() {
  return active_queue;
}

WeightQueue::Scope::Scope(WeightQueue& queue) : before_(std::exchange(active_queue, &queue)) {}
WeightQueue::Scope::~Scope() {
  active_queue = before_;
}

void WeightQueue::run() {
  Profiler* profiler = Profiler::active();
  if (profiler != nullptr) profiler->enter_phase(Profiler::Phase::backward);
  for (Entry& entry : entries_) {
    entry.late->backward_weights();
    entry.function.reset();
    for (Leaf* leaf : std::exchange(entry.leaves, {})) {
      leaf->end_use();
      if (--leaf->uses_left == 0 && leaf->on_grad_ready) leaf->on_grad_ready();
    }
  }
  entries_.clear();
  if (profiler != nullptr) profiler->leave();
}

WeightQueue::~WeightQueue() {
  // A step that failed must not leave uses counted.
  for (const Entry& entry : entries_) {
    for (Leaf* leaf : entry.leaves) leaf->uses_left--;
  }
}

}  // namespace shoal
