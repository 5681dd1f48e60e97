#include "core/backend/cuda/memory_pool.h"

#include <algorithm>
#include <iterator>

namespace shoal::cuda {

MemoryPool::Segment& MemoryPool::segment_of(char* data) {
  return std::prev(segments_.upper_bound(data))->second;
}

void MemoryPool::add_free(char* data, int64_t bytes) {
  by_address_[data] = bytes;
  free_bytes_ += bytes;
  by_size_.insert({bytes, data});
}

void MemoryPool::remove_free(char* data, int64_t bytes) {
  by_address_.erase(data);
  free_bytes_ -= bytes;
  by_size_.erase({bytes, data});
}

char* MemoryPool::take(int64_t bytes) {
  const auto fit = by_size_.lower_bound({bytes, nullptr});
  if (fit == by_size_.end()) return nullptr;
  const auto [free_bytes, data] = *fit;
  remove_free(data, free_bytes);
  if (free_bytes > bytes) add_free(data + bytes, free_bytes - bytes);
  segment_of(data).used += bytes;
  return data;
}

void MemoryPool::give_back(char* data, int64_t bytes) {
  Segment& segment = segment_of(data);
  segment.used -= bytes;
  segment.last_release = ++num_releases_;
  const auto next = by_address_.find(data + bytes);
  if (next != by_address_.end() && next->first < segment.data + segment.bytes) {
    const auto [at, more] = *next;
    remove_free(at, more);
    bytes += more;
  }
  const auto after = by_address_.lower_bound(data);
  if (after != by_address_.begin()) {
    const auto [at, before] = *std::prev(after);
    if (at >= segment.data && at + before == data) {
      remove_free(at, before);
      data = at;
      bytes += before;
    }
  }
  add_free(data, bytes);
}

void MemoryPool::add(const Segment& segment) {
  segments_[segment.data] = {segment.data, segment.bytes, 0, 0};
  add_free(segment.data, segment.bytes);
}

bool MemoryPool::has_unused() const {
  return std::any_of(segments_.begin(), segments_.end(), [](const auto& s) { return s.second.used == 0; });
}

std::vector<MemoryPool::Segment> MemoryPool::take_unused(uint64_t up_to_release) {
  std::vector<Segment> unused;
  for (auto it = segments_.begin(); it != segments_.end();) {
    const Segment& segment = it->second;
    if (segment.used > 0 || segment.last_release > up_to_release) {
      ++it;
      continue;
    }
    remove_free(segment.data, segment.bytes);
    unused.push_back(segment);
    it = segments_.erase(it);
  }
  return unused;
}

}  // namespace shoal::cuda
