#include "launch/ceilings.h"

#include <algorithm>
#include <chrono>

#include "core/ops/bf16_linear.h"
#include "core/ops/linear.h"
#include "core/tensor/device_runtime.h"

namespace shoal {

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double measure_multiply_adds(DType dtype, double seconds) {
  constexpr int64_t kRounds =
      500'000;  // about 1 ms: long enough to start a team, too short to be disturbed each time
  return best_rate(seconds, [&] { return multiply_add_rounds(Device{}, dtype, kRounds); });
}

double measure_gemm(Device device, DType dtype, double seconds) {
  constexpr int64_t n = 512;
  constexpr int kProducts = 4;
  const bool bf16 = dtype == DType::bf16;
  const Tensor a = Tensor::zeros({n, n}, dtype, device), c = Tensor::zeros({n, n}, dtype, device);
  const Tensor b = Tensor::zeros({n, n}, stats_dtype(dtype), device);
  const PackedWeight copies = bf16 ? packed_weight(b) : PackedWeight{};
  return best_rate(seconds, [&] {
    for (int i = 0; i < kProducts; i++) {
      if (bf16) {
        packed_gemm_rows(device, PackedUse::forward, a, copies.forward, c, {&n, 1});
      } else {
        gemm(device, Gemm{false, true, false}, a, b, c);
      }
    }
    device_runtime(device.type).synchronize();
    return kProducts * 2.0 * static_cast<double>(n * n * n);
  });
}

double measure_gemm_flops(Device device, DType dtype, Communicator& world) {
  world.barrier();
  return measure_gemm(device, dtype, 0.25);
}

double measure_memory(MemoryPattern pattern, int64_t bytes, double seconds) {
  const bool two = pattern == MemoryPattern::copy || pattern == MemoryPattern::triad;
  const Shape shape{bytes / 4 / (pattern == MemoryPattern::triad ? 3 : two ? 2 : 1)};
  const Tensor a = Tensor::zeros(shape, DType::f32);
  const Tensor b = two ? Tensor::zeros(shape, DType::f32) : Tensor{};
  const Tensor c = pattern == MemoryPattern::triad ? Tensor::zeros(shape, DType::f32) : Tensor{};
  return best_rate(seconds, [&] { return memory_pass(Device{}, pattern, a, b, c); });
}

double Ceilings::seconds(const Cost& cost) const {
  const auto part = [](double work, double rate) { return rate > 0 ? work / rate : 0; };
  return std::max(part(cost.flops, flops) + part(cost.flops_bf16, flops_bf16), part(cost.bytes, bytes));
}

Ceilings measure_ceilings(DType dtype, Communicator& world) {
  constexpr int64_t kBytes = int64_t{96} << 20;
  constexpr double kSeconds = 0.08;
  Ceilings out;
  world.barrier();
  out.flops = measure_multiply_adds(dtype, kSeconds);
  out.flops_bf16 = measure_multiply_adds(DType::bf16, kSeconds);
  for (const MemoryPattern pattern :
       {MemoryPattern::read, MemoryPattern::copy, MemoryPattern::triad, MemoryPattern::update})
    out.bytes = std::max(out.bytes, measure_memory(pattern, kBytes, kSeconds));
  return out;
}

}  // namespace shoal
