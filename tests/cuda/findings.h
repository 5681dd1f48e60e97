// Kernels with planted bugs: what running them shows.
#pragma once

#include "tests/cuda/races.h"
#include "tests/cuda/support.h"

namespace shoal::testing {

inline cuda::LaunchShape shape_of(unsigned grid, unsigned block, size_t shared_bytes = 0) {
  return {grid, 1, block, shared_bytes, nullptr};
}

/// What one run of a kernel showed, over all schedules.
struct Findings {
  std::string fault;   // the message of the first Error
  bool wrong = false;  // a result that is not the expected one, or NaN
  int races = 0;       // reported by TSan
  bool any() const { return !fault.empty() || wrong || races > 0; }
};

/// Launches under every schedule; run(out) launches into `out`, which then should be `want`.
template <class F>
Findings find(const std::vector<float>& want, const F& run) {
  Findings found;
  found.races = races_in([&] {
    for_each_schedule([&](const std::string&) {
      const Tensor out = Tensor::empty({static_cast<int64_t>(want.size())}, DType::f32, kCuda);
      const std::string fault = error_of([&] { run(out.data<float>()); });
      if (found.fault.empty()) found.fault = fault;
      found.wrong = found.wrong || (fault.empty() && out.to_vector<float>() != want);
    });
  });
  return found;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

#ifdef SHOAL_EMULATOR_TSAN
inline constexpr bool kTsan = true;
#else
inline constexpr bool kTsan = false;
#endif

}  // namespace shoal::testing
