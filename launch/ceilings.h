// Ceilings: what this machine can do at best, measured. Every rate is of the calling rank's team; under
// several ranks all measure at the same time, because they share memory and caches.
#pragma once

#include "core/base/profiler.h"
#include "core/ops/machine.h"
#include "parallel/communicator.h"

namespace shoal {

/// The steady clock.
double now_seconds();

/// Calls body() until `seconds` have passed, at least three times; the best of work() per second. body
/// returns what it did (FLOP, bytes).
template <class Body>
double best_rate(double seconds, const Body& body) {
  double best = 0;
  const double start = now_seconds();
  double before = start;
  for (int i = 0; i < 3 || before - start < seconds; i++) {
    const double work = body();
    const double after = now_seconds();
    if (after > before && work / (after - before) > best) best = work / (after - before);
    before = after;
  }
  return best;
}

/// FLOP/s of multiply-adds in registers.
double measure_multiply_adds(DType dtype, double seconds);
/// FLOP/s of products of square matrices by the engine itself: what MFU is counted against.
double measure_gemm(Device device, DType dtype, double seconds);
/// For a quarter of a second, while all ranks do the same. Collective.
double measure_gemm_flops(Device device, DType dtype, Communicator& world);
/// Bytes/s of passes over tensors of `bytes` in all, which should be more than the caches hold.
double measure_memory(MemoryPattern pattern, int64_t bytes, double seconds);

/// What profiled time is compared with.
struct Ceilings {
  double flops = 0, flops_bf16 = 0, bytes = 0;  // per second
  /// The shortest time that this much work can take: its arithmetic or its memory traffic, whichever is
  /// longer.
  double seconds(const Cost& cost) const;
};
/// Takes about half a second. Collective. `dtype`: of what is not bf16.
Ceilings measure_ceilings(DType dtype, Communicator& world);

}  // namespace shoal
