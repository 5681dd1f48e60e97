// Work and Pending: results that are still on their way (a collective in flight). Both must be waited for.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "core/base/profiler.h"

namespace shoal {

/// An asynchronous operation. wait() finishes it: on a CPU the caller blocks, on a GPU the current stream
/// waits. Keeps the tensors of the operation alive until then.
class [[nodiscard]] Work {
 public:
  class Impl {
   public:
    virtual ~Impl() = default;
    virtual void wait() = 0;
    /// Pushes the operation forward without blocking; true when it is done: whoever waits then waits for
    /// nothing.
    virtual bool test() { return true; }
  };

  Work() = default;  // nothing to wait for
  explicit Work(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
  Work(Work&&) = default;
  Work& operator=(Work&& other) noexcept {
    finish();
    impl_ = std::move(other.impl_);
    collective_ = other.collective_;
    return *this;
  }
  ~Work() { finish(); }

  void wait() {
    if (auto impl = std::exchange(impl_, nullptr)) {
      const ProfileCall span(collective_, /*waits=*/true);
      impl->wait();
    }
  }
  /// For the profiler: which call this is.
  void set_collective(const CollectiveId& id) { collective_ = id; }
  bool test() { return impl_ == nullptr || impl_->test(); }

 private:
  // Forgetting a Work would leave a buffer in use; while an exception unwinds, the peers may be gone, so the
  // operation is dropped instead.
  void finish() noexcept {
    if (impl_ != nullptr && std::uncaught_exceptions() == 0) wait();
    impl_ = nullptr;
  }
  std::unique_ptr<Impl> impl_;
  CollectiveId collective_;
};

/// A value that exists once its work is done.
template <class T>
class [[nodiscard]] Pending {
 public:
  explicit Pending(std::function<T()> finish) : finish_(std::move(finish)) {}
  T wait() && { return std::exchange(finish_, nullptr)(); }

 private:
  std::function<T()> finish_;
};

}  // namespace shoal
