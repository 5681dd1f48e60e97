// PrefetchingLoader: fills the next batches in a thread while the current one is used.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "data/batch_loader.h"

namespace shoal {

class PrefetchingLoader {
 public:
  struct Range {
    int64_t first_sample, count;
  };
  /// Which samples call number i (0, 1, ...) of next() returns. Called in the prefetching thread.
  using Plan = std::function<Range(int64_t call)>;

  /// Keeps up to `depth` batches ready.
  PrefetchingLoader(std::shared_ptr<const BatchLoader> loader, Plan plan, int64_t depth = 2);
  /// Stops and joins the thread; never throws.
  ~PrefetchingLoader();
  PrefetchingLoader(const PrefetchingLoader&) = delete;
  PrefetchingLoader& operator=(const PrefetchingLoader&) = delete;

  /// Blocks until the batch is ready. An error met while filling it is thrown here, and again by later calls.
  Batch next();
  /// Gives a used batch back so that its memory is reused (optional).
  void recycle(Batch&& batch);

 private:
  void run();

  std::shared_ptr<const BatchLoader> loader_;
  Plan plan_;
  size_t depth_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Batch> ready_, free_;
  std::exception_ptr error_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace shoal
