#include "parallel/open_calls.h"

#include <algorithm>
#include <vector>

#include "parallel/waiting.h"

namespace shoal {

namespace {

/// Ranks may be threads, and each has its own calls.
std::vector<std::shared_ptr<OpenCalls>>& open_calls() {
  thread_local std::vector<std::shared_ptr<OpenCalls>> calls;
  return calls;
}

void wait_for(const AwaitedCall& call) {
  if (call.done()) return;
  Waiting waiting;
  for (;;) {
    progress_open_calls();
    if (call.done()) return;
    waiting.pause([&] { return WaitedFor{call.text(), call.missing()}; });
  }
}

struct CallWork final : Work::Impl {
  explicit CallWork(std::shared_ptr<AwaitedCall> call) : call(std::move(call)) {}
  void wait() override { wait_for(*call); }
  bool test() override {
    if (!call->done()) progress_open_calls();
    return call->done();
  }
  std::shared_ptr<AwaitedCall> call;
};

}  // namespace

void add_open_calls(const std::shared_ptr<OpenCalls>& calls) {
  auto& open = open_calls();
  if (calls->num_open() > 0 && std::find(open.begin(), open.end(), calls) == open.end())
    open.push_back(calls);
}

void progress_open_calls() {
  auto& open = open_calls();
  for (size_t i = 0; i < open.size(); i++) open[i]->progress();
  std::erase_if(open, [](const auto& calls) { return calls->num_open() == 0; });
}

size_t num_open_calls() {
  size_t count = 0;
  for (const auto& calls : open_calls()) count += calls->num_open();
  return count;
}

Work work_for(std::shared_ptr<AwaitedCall> call) {
  return Work(std::make_unique<CallWork>(std::move(call)));
}

void MissingRanks::add(int world_rank) {
  text_ += (text_.empty() ? "" : ", ") + describe_rank(world_rank);
}

}  // namespace shoal
