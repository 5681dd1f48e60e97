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

/// What a rank holds of a tensor: the values of boxes, one box after the other.
struct HeldPart {
  std::vector<double> values;
  std::vector<Box> boxes;
  HeldPart(const Tensor& local, std::vector<Box> boxes)
      : values(to_doubles(local)), boxes(std::move(boxes)) {}
};

/// The whole tensor, on every rank. Throws Error when replicas differ in a bit, or elements are missing.
/// Collective.
inline std::vector<double> gather_global(const HeldPart& mine, const Shape& global_shape,
                                         Communicator& world) {
  std::vector<int64_t> place;
  for (const Box& box : mine.boxes)
    for (int d = 0; d < global_shape.dims(); d++) place.insert(place.end(), {box.start[d], box.extent[d]});
  const auto raw = [](const auto& numbers) {
    return std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(numbers[0]));
  };
  const std::vector<std::string> all_values = world.gather_strings(raw(mine.values)),
                                 all_places = world.gather_strings(raw(place));
  std::vector<double> whole(static_cast<size_t>(global_shape.numel()));
  std::vector<bool> known(whole.size());
  for (size_t rank = 0; rank < all_values.size(); rank++) {
    std::vector<double> values(all_values[rank].size() / sizeof(double));
    std::memcpy(values.data(), all_values[rank].data(), all_values[rank].size());
    place.resize(all_places[rank].size() / sizeof(int64_t));
    std::memcpy(place.data(), all_places[rank].data(), all_places[rank].size());
    const int64_t* box = place.data();
    size_t first = 0;  // value of the box
    const auto numbers_of_box = static_cast<size_t>(2 * global_shape.dims());
    const size_t num_boxes = numbers_of_box == 0 ? (values.empty() ? 0 : 1) : place.size() / numbers_of_box;
    for (size_t b = 0; b < num_boxes; b++, box += numbers_of_box) {
      size_t count = 1;
      for (int d = 0; d < global_shape.dims(); d++) count *= static_cast<size_t>(box[2 * d + 1]);
      for (size_t i = 0; i < count; i++) {
        int64_t rest = static_cast<int64_t>(i), index = 0, stride = 1;
        for (int d = global_shape.dims() - 1; d >= 0; d--) {
          const int64_t start = box[2 * d], extent = box[2 * d + 1];
          index += (start + rest % extent) * stride;
          rest /= extent;
          stride *= global_shape[d];
        }
        const auto at = static_cast<size_t>(index);
        const double value = values.at(first + i);
        SHOAL_CHECK(!known[at] || std::memcmp(&whole[at], &value, sizeof(double)) == 0,
                    "gather_global: replicas differ at element ", index, ": ", whole[at], " and ", value);
        whole[at] = value;
        known[at] = true;
      }
      first += count;
    }
  }
  for (size_t i = 0; i < known.size(); i++) SHOAL_CHECK(known[i], "gather_global: no rank holds element ", i);
  return whole;
}
inline std::vector<double> gather_global(const Tensor& local, const Box& box, const Shape& global_shape,
                                         Communicator& world) {
  return gather_global(HeldPart(local, {box}), global_shape, world);
}

}  // namespace shoal::testing
