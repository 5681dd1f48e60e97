#include "data/prefetching_loader.h"

#include <utility>

#include "core/base/error.h"

namespace shoal {

PrefetchingLoader::PrefetchingLoader(std::shared_ptr<const BatchLoader> loader, Plan plan, int64_t depth)
    : loader_(std::move(loader)), plan_(std::move(plan)), depth_(static_cast<size_t>(depth)) {
  SHOAL_CHECK(depth >= 1, "prefetching loader: expected a depth >= 1, got ", depth);
  thread_ = std::thread([this] { run(); });
}

PrefetchingLoader::~PrefetchingLoader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Batch PrefetchingLoader::next() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !ready_.empty() || error_; });
  if (ready_.empty()) std::rethrow_exception(error_);
  Batch batch = std::move(ready_.front());
  ready_.pop_front();
  lock.unlock();
  changed_.notify_all();
  return batch;
}

void PrefetchingLoader::recycle(Batch&& batch) {
  const std::lock_guard lock(mutex_);
  if (free_.size() < depth_) free_.push_back(std::move(batch));
}

void PrefetchingLoader::run() {
  try {
    for (int64_t call = 0;; call++) {
      Batch batch;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return stop_ || ready_.size() < depth_; });
        if (stop_) return;
        if (!free_.empty()) {
          batch = std::move(free_.front());
          free_.pop_front();
        }
      }
      const Range range = plan_(call);
      loader_->fill(range.first_sample, range.count, batch);
      {
        const std::lock_guard lock(mutex_);
        ready_.push_back(std::move(batch));
      }
      changed_.notify_all();
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    error_ = std::current_exception();
    changed_.notify_all();
  }
}

}  // namespace shoal
