// Rotary position embedding, in place on packed projections. Dimensions from rotary_size on are not touched.
#include <cstdint>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"
#include "core/base/threads.h"
#include "core/ops/attention.h"

SHOAL_KERNELS_BEGIN

using cpu::Compute;

/// sign -1 turns back.
template <class T>
void rotate_half(T* x, const Compute<T>* cosine, const Compute<T>* sine, int64_t pairs, Compute<T> sign) {
  T* high = x + pairs;
#pragma omp simd
  for (int64_t i = 0; i < pairs; i++) {
    const auto a = static_cast<Compute<T>>(x[i]), b = static_cast<Compute<T>>(high[i]), s = sign * sine[i];
    x[i] = a * cosine[i] - b * s;
    high[i] = b * cosine[i] + a * s;
  }
}

template <class T>
void rotate_adjacent(T* x, const Compute<T>* cosine, const Compute<T>* sine, int64_t pairs, Compute<T> sign) {
#pragma omp simd
  for (int64_t i = 0; i < pairs; i++) {
    const auto a = static_cast<Compute<T>>(x[2 * i]), b = static_cast<Compute<T>>(x[2 * i + 1]),
               s = sign * sine[i];
    x[2 * i] = a * cosine[i] - b * s;
    x[2 * i + 1] = b * cosine[i] + a * s;
  }
}

template <class T>
void rope_typed(const Tensor& qkv, const AttentionSpec& spec, const RopeSpec& rope_spec, const Tensor& table,
                const int32_t* positions, bool inverse) {
  const int64_t c = spec.head_size, heads = spec.heads / spec.kv_heads, groups = spec.kv_heads;
  const int64_t pairs = table.size(2), num_rows = qkv.size(0);
  const auto* cosines = table.data<Compute<T>>();
  const auto* sines = cosines + table.size(1) * pairs;
  const Compute<T> sign = inverse ? -1 : 1;
  T* data = qkv.data<T>();
  parallel_for(num_rows, 16, [=](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const auto* cosine = cosines + positions[t] * pairs;
      const auto* sine = sines + positions[t] * pairs;
      for (int64_t g = 0; g < groups; g++) {
        T* group = data + (t * groups + g) * (heads + 2) * c;
        for (int64_t head = 0; head <= heads; head++) {  // the query heads and the key head
          if (rope_spec.form == RopeForm::half) {
            rotate_half(group + head * c, cosine, sine, pairs, sign);
          } else {
            rotate_adjacent(group + head * c, cosine, sine, pairs, sign);
          }
        }
      }
    }
  });
}

void rope_fwd_impl(const Tensor& qkv, const AttentionSpec& spec, const RopeSpec& rope_spec,
                   const Tensor& table, const Tensor& positions, bool inverse) {
  const int32_t* position = positions.data<int32_t>();
  for (int64_t t = 0; t < positions.numel(); t++) {
    SHOAL_CHECK(position[t] >= 0 && position[t] < table.size(1), "rope: position ", position[t], " of token ",
                t, " is outside the table of ", table.size(1), " positions; make a longer table");
  }
  dispatch_storage(qkv.dtype(), "rope",
                   [&]<class T>() { rope_typed<T>(qkv, spec, rope_spec, table, position, inverse); });
}

const bool added = rope_fwd.add(DeviceType::cpu, &rope_fwd_impl, kIsaLevel);

SHOAL_KERNELS_END
