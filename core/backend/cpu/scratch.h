// Scratch: working memory of one kernel on one thread, kept between calls so that a steady-state step
// allocates nothing. Used as `static thread_local Scratch scratch;` inside a kernel file.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "core/tensor/storage.h"

namespace shoal::cpu {

class Scratch {
 public:
  /// `count` uninitialised elements, aligned to 64 bytes; earlier pointers of this object become invalid when
  /// it has to grow.
  template <class T>
  T* get(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    if (!storage_ || storage_->bytes() < bytes) {
      const int64_t grown = storage_ ? std::max(bytes, storage_->bytes() * 3 / 2) : bytes;
      storage_.reset();
      storage_ = std::make_unique<Storage>(grown, Device{});
    }
    return static_cast<T*>(storage_->data());
  }

 private:
  std::unique_ptr<Storage> storage_;
};

}  // namespace shoal::cpu
