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

/// Buffers of one size that nobody holds, the one used longest ago first. Their copies may be on the way.
class Buffers {
 public:
  Buffers(int64_t bytes, size_t most) : bytes_(bytes), most_(most) {}
  int64_t bytes() const { return bytes_; }

  /// One whose copies are done.
  Buffer take() {
    Buffer buffer;
    {
      const std::lock_guard lock(mutex_);
      const bool ready = !idle_.empty() && cudaEventQuery(idle_.front().done) == cudaSuccess;
      if (!ready && num_buffers_ < most_) {
        num_buffers_++;
        return make();
      }
      if (!idle_.empty()) {
        buffer = idle_.front();
        idle_.pop_front();
      }
      if (ready) return buffer;
    }
    if (buffer.data == nullptr) return make();  // all are in the hands of other threads
    wait_for(buffer.done);
    return buffer;
  }

  void give_back(Buffer buffer) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(buffer);
  }

 private:
  Buffer make() const {
    Buffer buffer;
    SHOAL_CUDA_CALL(cudaHostAlloc(reinterpret_cast<void**>(&buffer.data), static_cast<size_t>(bytes_),
                                  cudaHostAllocDefault));
    SHOAL_CUDA_CALL(cudaEventCreateWithFlags(&buffer.done, cudaEventDisableTiming));
    return buffer;
  }

  int64_t bytes_;
  size_t most_;
  std::mutex mutex_;
  std::deque<Buffer> idle_;
  size_t num_buffers_ = 0;
};

/// For a copy of so many bytes; a large one is cut into parts.
Buffers& buffers_for(int64_t bytes) {
  static auto* small =
      new Buffers(kSmallBytes, kMostSmall);  // leaked: tensors with static lifetime are copied late
  static auto* large = new Buffers(kLargeBytes, kMostLarge);
  return bytes <= kSmallBytes ? *small : *large;
}

}  // namespace

void copy_to_device(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  Buffers& buffers = buffers_for(bytes);
  for (int64_t at = 0; at < bytes; at += buffers.bytes()) {
    const auto part = static_cast<size_t>(std::min(buffers.bytes(), bytes - at));
    const Buffer buffer = buffers.take();
    std::memcpy(buffer.data, static_cast<const char*>(from) + at, part);
    SHOAL_CUDA_CALL(
        cudaMemcpyAsync(static_cast<char*>(to) + at, buffer.data, part, cudaMemcpyHostToDevice, stream));
    SHOAL_CUDA_CALL(cudaEventRecord(buffer.done, stream));
    buffers.give_back(buffer);
  }
}

void copy_to_host(std::initializer_list<ToHost> copies, cudaStream_t stream) {
  struct Part {
    Buffers* buffers;
    Buffer buffer;
    char* to;
    size_t bytes;
  };
  constexpr size_t kMostParts = 4;
  std::deque<Part> on_the_way;
  const auto empty_first = [&] {
    const Part part = on_the_way.front();
    on_the_way.pop_front();
    std::memcpy(part.to, part.buffer.data, part.bytes);
    part.buffers->give_back(part.buffer);
  };
  for (const ToHost& copy : copies) {
    Buffers& buffers = buffers_for(copy.bytes);
    for (int64_t at = 0; at < copy.bytes; at += buffers.bytes()) {
      const auto size = static_cast<size_t>(std::min(buffers.bytes(), copy.bytes - at));
      const Buffer buffer = buffers.take();
      SHOAL_CUDA_CALL(cudaMemcpyAsync(buffer.data, static_cast<const char*>(copy.from) + at, size,
                                      cudaMemcpyDeviceToHost, stream));
      SHOAL_CUDA_CALL(cudaEventRecord(buffer.done, stream));
      on_the_way.push_back({&buffers, buffer, static_cast<char*>(copy.to) + at, size});
      if (on_the_way.size() < kMostParts) continue;
      wait_for(on_the_way.front().buffer.done);
      empty_first();
    }
  }
  if (!on_the_way.empty()) wait_for(on_the_way.back().buffer.done);
  while (!on_the_way.empty()) empty_first();
}

}  // namespace shoal::cuda
