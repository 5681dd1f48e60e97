// Streams of the stand-in device: queues of closures, run on the CPU. Whatever goes to a device goes through
// enqueue: emulated kernels, stand-ins of library calls, copies, fills. When it runs is the choice of a
// policy. Thread-safe: ranks may be threads.
#pragma once

#include <cstdint>
#include <functional>

struct CUstream_st;
using cudaStream_t = CUstream_st*;

namespace shoal::standin {

/// Puts `work` into the stream (nullptr: the default stream), called `name` in messages. It must own what it
/// needs of the host's memory. What it throws is thrown by the call that made it run.
void enqueue(cudaStream_t stream, const char* name, std::function<void()> work);

}  // namespace shoal::standin
