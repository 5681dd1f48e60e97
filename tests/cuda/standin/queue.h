// What the parts of the stand-in share: streams, events and their work. Nothing here is for tests.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/cuda/emulator/fiber.h"
#include "tests/cuda/standin/streams.h"

namespace shoal::standin {

/// A point in the work of a stream; reached when work `number` has been done.
struct Mark {
  CUstream_st* stream = nullptr;
  uint64_t number = 0;
  char order = 0;  // for TSan
};

/// One of `attempt`, `wait_for` and `record`.
struct Work {
  explicit Work(const char* its_name) : name(its_name) {}
  const char* name;
  std::function<bool(std::vector<Need>&)> attempt;
  std::shared_ptr<Mark> wait_for, record;
  std::unique_ptr<char> order;  // for TSan: released by the host, acquired by the stream
  bool begun = false;
  Work* next = nullptr;     // in the stream
  std::vector<Need> needs;  // of the latest attempt
};

}  // namespace shoal::standin

struct CUstream_st {
  // Owned; deleted by the stream. Linked by themselves, since TSan would see threads share the nodes of a
  // container.
  shoal::standin::Work *first = nullptr, *last = nullptr;
  uint64_t done = 0, enqueued = 0;  // numbers of work: [done, enqueued) is in the queue or running
  int64_t runner = 0;               // the thread that does its first work; 0: none
  int64_t owner = 0;                // the thread that created it
  int index = 0;                    // of the owner's streams
  bool destroyed = false;
  char order = 0;  // for TSan: released by each work, acquired by who waits for the stream
  shoal::emulator::Fiber fiber;
};

struct CUevent_st {
  std::shared_ptr<shoal::standin::Mark> mark;
};

namespace shoal::standin {

CUstream_st* create_stream();
/// Work in it is still done; using the stream again throws Error.
void destroy_stream(CUstream_st* stream);

uint64_t push(CUstream_st* stream, Work work);
std::shared_ptr<Mark> record(CUstream_st* stream);
void wait(CUstream_st* stream, const std::shared_ptr<Mark>& mark);
/// Whether the mark has been reached; a policy may make it so, and repeated questions do.
bool query(Mark& mark);
void host_wait(Mark& mark);
void host_wait(CUstream_st* stream);
void host_wait_all();

}  // namespace shoal::standin
