// Speed of attention, forward and backward, in GF/s of the work that causality leaves (half of the square).
#include <benchmark/benchmark.h>

#include "core/base/threads.h"
#include "core/ops/attention.h"

namespace shoal {
namespace {

/// Arguments: sequence, heads, kv heads, head size, backward.
void causal_attention(benchmark::State& state) {
  AttentionSpec spec;
  spec.batch = 2;
  spec.seq = state.range(0);
  spec.heads = state.range(1);
  spec.kv_heads = state.range(2);
  spec.head_size = state.range(3);
  const bool backward = state.range(4) != 0;
  const Shape shape{spec.batch * spec.seq, spec.kv_heads, spec.heads / spec.kv_heads + 2, spec.head_size};
  std::vector<float> values(static_cast<size_t>(shape.numel()));
  for (size_t i = 0; i < values.size(); i++) values[i] = 0.002F * static_cast<float>(i % 997) - 1;
  const Tensor qkv = Tensor::from(values, shape), dqkv = Tensor::empty_like(qkv);
  const Tensor y = Tensor::empty({shape[0], spec.heads * spec.head_size}, DType::f32);
  const Tensor lse = Tensor::empty({shape[0], spec.heads}, DType::f32);
  attention_fwd(Device{}, qkv, spec, y, lse);
  for (auto _ : state) {
    if (backward) {
      attention_bwd(Device{}, {.dy = y, .qkv = qkv, .y = y, .lse = lse, .dqkv = dqkv}, spec);
    } else {
      attention_fwd(Device{}, qkv, spec, y, lse);
    }
  }
  const auto products = static_cast<double>((backward ? 5 : 2) * spec.batch * spec.heads * spec.head_size) *
                        static_cast<double>(spec.seq * (spec.seq + 1) / 2);
  state.counters["GF/s"] = {2e-9 * products * static_cast<double>(state.iterations()),
                            benchmark::Counter::kIsRate};
}
BENCHMARK(causal_attention)
    ->ArgsProduct({{512, 2048}, {8}, {4}, {64}, {0, 1}})
    ->Args({64, 4, 4, 32, 0})
    ->Args({64, 4, 4, 32, 1});

}  // namespace
}  // namespace shoal
