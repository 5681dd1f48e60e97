// Streams of the stand-in device: queues of closures, run on the CPU. Whatever goes to a device goes through
// enqueue: emulated kernels, stand-ins of library calls, copies, fills. It runs when something waits for it,
// or earlier if the policy likes. Thread-safe: ranks may be threads. To TSan every stream is a thread,
// ordered with the host and other streams by launches, events and waits only.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

struct CUstream_st;
using cudaStream_t = CUstream_st*;

namespace shoal::standin {

enum class Policy : uint8_t {
  eager,   // everything as soon as it can be done
  lazy,    // only what a wait of the host needs
  favour,  // work of one stream at once, of the others as late as possible
  random,  // now and then some work of some streams
};
struct Options {
  Policy policy = Policy::eager;
  int favoured = 0;   // Policy::favour: 0 is the default stream, k the k-th that the calling thread created
  uint64_t seed = 1;  // Policy::random
};
Options options();
/// Finishes all work first. Streams that are created from here on are numbered anew.
void set_options(const Options& options);

/// Puts `work` into the stream (nullptr: the default stream), called `name` in messages. It must own what it
/// needs of the host's memory. What it throws is thrown by the call that made it run. Returns its number in
/// the stream.
uint64_t enqueue(cudaStream_t stream, const char* name, std::function<void()> work);

/// Work of another stream.
struct Need {
  cudaStream_t stream;
  uint64_t number;
};
/// For work that waits for other streams', such as collectives of ranks that are threads: `attempt` is called
/// until it returns true. Otherwise it puts into its argument which work must be done first, all of it, as
/// far as that is in a stream. No thread is held up by an attempt. To TSan this orders nothing.
uint64_t enqueue_attempts(cudaStream_t stream, const char* name,
                          std::function<bool(std::vector<Need>&)> attempt);

/// What a library call reads and writes, for TSan; to be called in its work.
void will_read(const void* data, size_t bytes);
void will_write(void* data, size_t bytes);
/// Orders work for TSan: a release of an address happens before a later acquire.
void release(void* address);
void acquire(void* address);

struct Counts {
  uint64_t enqueued = 0;  // pieces of work
  // Times that the host waited for a stream, an event or the device: in a call, or by asking again and again.
  uint64_t host_waits = 0;
};
/// Of the calling thread.
Counts& counts();

}  // namespace shoal::standin
