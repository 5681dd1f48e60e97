#include "core/backend/cuda/staging.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>

#include "core/backend/cuda/error.h"
#include "core/backend/cuda/runtime.h"
#include "core/backend/cuda/wait.h"

namespace shoal::cuda {

namespace {

constexpr int64_t kSmallBytes = int64_t{64} << 10, kLargeBytes = int64_t{4} << 20;
constexpr size_t kMostSmall = 256, kMostLarge = 8;

struct Buffer {
  char* data = nullptr;
  cudaEvent_t done = nullptr;  // the latest copy from or to it
};

/// Buffers of threads that have ended; their copies may be on the way.
class Abandoned {
 public:
  void put(const std::deque<Buffer>& buffers) {
    const std::lock_guard lock(mutex_);
    idle_.insert(idle_.end(), buffers.begin(), buffers.end());
  }
  /// data is null when there is none.
  Buffer take() {
    Buffer buffer;
    {
      const std::lock_guard lock(mutex_);
      if (idle_.empty()) return buffer;
      buffer = idle_.front();
      idle_.pop_front();
    }
    if (cudaEventQuery(buffer.done) == cudaSuccess) return buffer;
    put({buffer});
    return {};
  }
  /// For a buffer that nobody may use again.
  void keep(const Buffer& buffer) {
    const std::lock_guard lock(mutex_);
    lost_.push_back(buffer);
  }

 private:
  std::mutex mutex_;
  std::deque<Buffer> idle_, lost_;
};

/// Buffers of one size of a thread, the one used longest ago first. A thread has its own, so that it never
/// waits for streams of others (ranks may be threads).
class Buffers {
 public:
  Buffers(int64_t bytes, size_t most, Abandoned& abandoned)
      : bytes_(bytes), most_(most), abandoned_(abandoned) {}
  ~Buffers() { abandoned_.put(idle_); }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  int64_t bytes() const { return bytes_; }

  /// One whose copies are done.
  Buffer take() {
    const bool ready = !idle_.empty() && cudaEventQuery(idle_.front().done) == cudaSuccess;
    if (!ready && num_buffers_ < most_) {
      const Buffer abandoned = abandoned_.take();
      const Buffer buffer = abandoned.data != nullptr ? abandoned : make();
      num_buffers_++;
      return buffer;
    }
    if (idle_.empty()) return make();
    if (!ready) wait_for(idle_.front().done);
    const Buffer buffer = idle_.front();
    idle_.pop_front();
    return buffer;
  }
  void give_back(const Buffer& buffer) { idle_.push_back(buffer); }
  void lose(const Buffer& buffer) {
    abandoned_.keep(buffer);
    num_buffers_--;
  }

 private:
  Buffer make() const {
    Buffer buffer;
    SHOAL_CUDA_CALL(cudaEventCreateWithFlags(&buffer.done, cudaEventDisableTiming));
    const cudaError_t status = cudaHostAlloc(reinterpret_cast<void**>(&buffer.data),
                                             static_cast<size_t>(bytes_), cudaHostAllocDefault);
    if (status != cudaSuccess) cudaEventDestroy(buffer.done);
    check_call(status, "cudaHostAlloc()");
    return buffer;
  }

  int64_t bytes_;
  size_t most_;
  Abandoned& abandoned_;
  std::deque<Buffer> idle_;
  size_t num_buffers_ = 0;
};

/// A buffer in use. An error gives it back with its copy on the way, which the next user waits for; unless
/// the end of that copy could not be marked.
class Lease {
 public:
  explicit Lease(Buffers& buffers) : buffers_(buffers), buffer_(buffers.take()) {}
  ~Lease() {
    if (unmarked_)
      buffers_.lose(buffer_);
    else
      buffers_.give_back(buffer_);
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  char* data() const { return buffer_.data; }
  cudaEvent_t done() const { return buffer_.done; }

  void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    SHOAL_CUDA_CALL(cudaMemcpyAsync(to, from, bytes, kind, stream));
    unmarked_ = true;
    SHOAL_CUDA_CALL(cudaEventRecord(buffer_.done, stream));
    unmarked_ = false;
  }

 private:
  Buffers& buffers_;
  Buffer buffer_;
  bool unmarked_ = false;
};

/// For a copy of so many bytes; a large one is cut into parts.
Buffers& buffers_for(int64_t bytes) {
  static auto* small_abandoned = new Abandoned;  // leaked: threads may end late
  static auto* large_abandoned = new Abandoned;
  static thread_local Buffers small(kSmallBytes, kMostSmall, *small_abandoned);
  static thread_local Buffers large(kLargeBytes, kMostLarge, *large_abandoned);
  return bytes <= kSmallBytes ? small : large;
}

}  // namespace

void copy_to_device(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  Buffers& buffers = buffers_for(bytes);
  for (int64_t at = 0; at < bytes; at += buffers.bytes()) {
    const auto part = static_cast<size_t>(std::min(buffers.bytes(), bytes - at));
    Lease buffer(buffers);
    std::memcpy(buffer.data(), static_cast<const char*>(from) + at, part);
    buffer.copy(static_cast<char*>(to) + at, buffer.data(), part, cudaMemcpyHostToDevice, stream);
  }
}

void copy_to_host(std::initializer_list<ToHost> copies, cudaStream_t stream) {
  struct Part {
    Part(Buffers& buffers, char* its_to, size_t its_bytes) : buffer(buffers), to(its_to), bytes(its_bytes) {}
    Lease buffer;
    char* to;
    size_t bytes;
  };
  constexpr size_t kMostParts = 4;
  std::deque<Part> on_the_way;
  const auto empty_first = [&] {
    const Part& part = on_the_way.front();
    std::memcpy(part.to, part.buffer.data(), part.bytes);
    on_the_way.pop_front();
  };
  for (const ToHost& copy : copies) {
    Buffers& buffers = buffers_for(copy.bytes);
    for (int64_t at = 0; at < copy.bytes; at += buffers.bytes()) {
      const auto size = static_cast<size_t>(std::min(buffers.bytes(), copy.bytes - at));
      Lease& buffer = on_the_way.emplace_back(buffers, static_cast<char*>(copy.to) + at, size).buffer;
      buffer.copy(buffer.data(), static_cast<const char*>(copy.from) + at, size, cudaMemcpyDeviceToHost,
                  stream);
      if (on_the_way.size() < kMostParts) continue;
      wait_for(on_the_way.front().buffer.done());
      empty_first();
    }
  }
  if (!on_the_way.empty()) wait_for(on_the_way.back().buffer.done());
  while (!on_the_way.empty()) empty_first();
}

}  // namespace shoal::cuda
