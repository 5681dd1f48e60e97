// Streams and events: the order of work on a device. On the CPU every call has finished when it returns, so
// all of this is a no-op there; a backend with real streams registers a StreamRuntime.
#pragma once

#include <cstdint>
#include <memory>

#include "core/tensor/types.h"

namespace shoal {

/// A queue of device work. Kernels go to the current stream of the calling thread.
struct Stream {
  Device device;
  int64_t handle = 0;  // 0: the device's default stream
};

class StreamRuntime {
 public:
  virtual ~StreamRuntime() = default;
  virtual Stream create(Device device) = 0;
  virtual std::shared_ptr<void> record(const Stream& stream) = 0;  // marks the end of the work so far
  virtual void wait(const Stream& stream, const std::shared_ptr<void>&) = 0;  // later work waits for the mark
  virtual void host_wait(const std::shared_ptr<void>&) = 0;
  virtual bool reached(const std::shared_ptr<void>&) = 0;  // without waiting
};
bool register_stream_runtime(DeviceType type, StreamRuntime* runtime);

Stream make_stream(Device device);     // a new one; on the cpu always the default stream
Stream current_stream(Device device);  // of this thread: the innermost StreamScope's, else the default one

/// Makes `stream` the calling thread's current stream for its device until destroyed.
class StreamScope {
 public:
  explicit StreamScope(const Stream& stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  Stream previous_;
};

/// A point in a stream's work.
class Event {
 public:
  void record(const Stream& stream);
  void wait(const Stream& stream) const;  // `stream` waits; the host does not
  void host_wait() const;
  bool reached() const;  // the work before it is done; true when nothing was recorded

 private:
  Device device_;
  std::shared_ptr<void> mark_;
};

}  // namespace shoal
