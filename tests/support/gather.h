// What ranks hold of a tensor, put together.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/nn/placement.h"
#include "parallel/communicator.h"
#include "tests/support/expect_close.h"

namespace shoal::testing {

/// The whole tensor, on every rank. Throws Error when replicas differ in a bit, or elements are missing.
/// Collective.
inline std::vector<double> gather_global(const Tensor& local, const Box& box, const Shape& global_shape,
                                         Communicator& world) {
  const std::vector<double> mine = to_doubles(local);
  std::string bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(double));
  std::vector<int64_t> place;
  for (int d = 0; d < global_shape.dims(); d++) place.insert(place.end(), {box.start[d], box.extent[d]});
  bytes.append(reinterpret_cast<const char*>(place.data()), place.size() * sizeof(int64_t));
  std::vector<double> whole(static_cast<size_t>(global_shape.numel()));
  std::vector<bool> known(whole.size());
  for (const std::string& theirs : world.gather_strings(bytes)) {
    const size_t count = (theirs.size() - place.size() * sizeof(int64_t)) / sizeof(double);
    std::vector<double> values(count);
    std::memcpy(values.data(), theirs.data(), count * sizeof(double));
    std::memcpy(place.data(), theirs.data() + count * sizeof(double), place.size() * sizeof(int64_t));
    for (size_t i = 0; i < count; i++) {
      int64_t rest = static_cast<int64_t>(i), index = 0, stride = 1;
      for (int d = global_shape.dims() - 1; d >= 0; d--) {
        const int64_t start = place[static_cast<size_t>(2 * d)],
                      extent = place[static_cast<size_t>(2 * d + 1)];
        index += (start + rest % extent) * stride;
        rest /= extent;
        stride *= global_shape[d];
      }
      const auto at = static_cast<size_t>(index);
      SHOAL_CHECK(!known[at] || std::memcmp(&whole[at], &values[i], sizeof(double)) == 0,
                  "gather_global: replicas differ at element ", index, ": ", whole[at], " and ", values[i]);
      whole[at] = values[i];
      known[at] = true;
    }
  }
  for (size_t i = 0; i < known.size(); i++) SHOAL_CHECK(known[i], "gather_global: no rank holds element ", i);
  return whole;
}

}  // namespace shoal::testing
