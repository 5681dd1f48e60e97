// One suite for every communicator: called on each rank with a world of any size. Used with ranks as threads
// and under MPI.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/communicator.h"

namespace shoal::testing {

struct CommunicatorCase {
  const char* name;
  std::function<void(const std::shared_ptr<Communicator>& world)> run;
};
const std::vector<CommunicatorCase>& communicator_cases();

/// Where the cases of the calling rank put the tensors that they give to calls.
inline Device& suite_device() {
  thread_local Device device;
  return device;
}
/// Runs a case on tensors of `device`; called on each rank.
inline void run_case_on(Device device, const CommunicatorCase& one,
                        const std::shared_ptr<Communicator>& world) {
  suite_device() = device;
  one.run(world);
  suite_device() = {};
}
template <class T>
Tensor on_device(const std::vector<T>& values, const Shape& shape) {
  return Tensor::from(values, shape, suite_device());
}

/// Distinct values per rank and element; floats have many significant bits, so the order of sums shows.
template <class T>
std::vector<T> rank_values(int rank, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); i++) {
    const int whole = static_cast<int>((i * 7 + static_cast<size_t>(rank) * 13) % 23);
    if constexpr (std::is_integral_v<T>) {
      values[i] = static_cast<T>(whole);
    } else {
      values[i] = T(static_cast<float>(whole - 11) / 7.0F + static_cast<float>(rank) * 0.1F);
    }
  }
  return values;
}

/// Equal bytes, so that NaN, -0 and the last bit count.
inline ::testing::AssertionResult equal_bits(const Tensor& got_somewhere, const Tensor& want_somewhere) {
  const Tensor got = got_somewhere.to(Device{}), want = want_somewhere.to(Device{});
  if (got.dtype() != want.dtype() || got.numel() != want.numel())
    return ::testing::AssertionFailure()
           << "got " << got.dtype() << ' ' << got.shape() << ", want " << want.dtype() << ' ' << want.shape();
  for (int64_t i = 0; i < got.num_bytes(); i++) {
    if (got.bytes()[i] != want.bytes()[i])
      return ::testing::AssertionFailure()
             << "element " << i / dtype_size(got.dtype()) << " of " << got.numel() << " differs";
  }
  return ::testing::AssertionSuccess();
}

}  // namespace shoal::testing
