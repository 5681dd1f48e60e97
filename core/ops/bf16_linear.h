// Matrix products in bf16: weights are kept as bf16 copies in the layout that a backend's products read best,
// activations are bf16 rows as they are, sums run in f32. A product of two bf16 numbers is exact in f32, so a
// result differs from exact arithmetic on the same operands only by the rounding of its f32 sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "core/autograd/function.h"
#include "core/ops/linear.h"
#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// linear and grouped_linear (core/ops/linear.h) of bf16 rows. weight: f32 [N, K] or [G, N, K]. bias: f32,
/// may be undefined. y is bf16, or f32 when `result` says so; weight and bias gradients are f32.
/// rows_per_part as of grouped_linear.
Tensor bf16_linear(const Tensor& x_RK, const Tensor& weight, std::span<const int64_t> rows_per_group,
                   const Tensor& bias, DType result, std::span<const int64_t> rows_per_part = {});

enum class PackedUse : uint8_t { both, forward, backward };  // of y = x W^T and of dx = dy W

/// Fresh copies of a weight of shape [N, K] or [G, N, K], opaque to all but the backend that filled them. A
/// leaf's are kept until its value changes (Leaf::packed_fresh). Those of other weights, and of leaves that
/// keep none, are made for this call, and only the one that `use` names.
PackedWeight packed_weight(const Tensor& weight, PackedUse use = PackedUse::both);

/// Whether a copy of a weight [N, K] or [G, N, K] is the weight's elements in their order. Then one copy
/// serves both uses (PackedWeight's two tensors are the same), and one call of pack_rows may fill any rows.
inline constinit Kernel<bool(const Shape& weight)> packs_in_order("packs_in_order");

/// bf16 elements of one copy of `groups` matrices with `outputs` rows and `inputs` columns.
inline constinit Kernel<int64_t(int64_t groups, int64_t outputs, int64_t inputs)> packed_size("packed_size");

/// Blocks of a weight that are packed at a time: at most this many rows of one matrix.
inline constexpr int64_t kPackRows = 64;
/// Calls body(first, last) for the rows of each block; rows are numbered through all G matrices.
template <class Body>
void for_each_pack_block(const Shape& weight, const Body& body) {
  const int64_t n = weight[-2], groups = weight.dims() == 3 ? weight[0] : 1;
  for (int64_t g = 0; g < groups; g++) {
    for (int64_t row = 0; row < n; row += kPackRows) body(g * n + row, g * n + std::min(n, row + kPackRows));
  }
}

/// Fills the part of the copies that are defined which comes from one block of rows of the f32 weight, which
/// has the elements of to.shape. On the calling thread; blocks may be packed at the same time. Where
/// packs_in_order() there is no need for blocks.
inline constinit Kernel<void(const Tensor& weight, const PackedWeight& to, int64_t first_row,
                             int64_t last_row)>
    pack_rows("pack_rows", [](const Tensor& weight, const PackedWeight& to, int64_t first_row,
                              int64_t last_row) {
      const auto share = static_cast<double>(last_row - first_row) * static_cast<double>(to.shape[-1]) /
                         static_cast<double>(std::max<int64_t>(1, to.shape.numel()));
      const bool once = to.forward && to.backward && to.forward.bytes() == to.backward.bytes();
      return Cost{.bytes = share * bytes_of(weight, to.forward, once ? Tensor{} : to.backward)};
    });

/// Rows of x are sorted by group; group g has rows[g] >= 0 of them. y[rows of g] = x[rows of g] * M[g]^T,
/// where M are the packed matrices [G, outputs, inputs]: the weights, or with use == backward their
/// transposes. packed: the copy for that use. x_RI: bf16; y_RO: bf16 (rounded once) or f32; the sizes of the
/// matrices are those of x and y.
inline constinit Kernel<void(PackedUse use, const Tensor& x, const Tensor& packed, const Tensor& y,
                             std::span<const int64_t> rows)>
    packed_gemm_rows("packed_gemm_rows", [](PackedUse, const Tensor& x, const Tensor& packed, const Tensor& y,
                                            std::span<const int64_t> rows) {
      return product_cost(x.numel() * y.size(1), DType::bf16, bytes_of(x, y) + used_bytes(packed, rows));
    });

/// c_GNK[g] (+)= a_RN[rows of g]^T * b_RK[rows of g]: weight gradients. a, b: bf16; c: f32.
inline constinit Kernel<void(bool accumulate, const Tensor& a, const Tensor& b, const Tensor& c,
                             std::span<const int64_t> rows)>
    bf16_gemm_reduce("bf16_gemm_reduce", [](bool accumulate, const Tensor& a, const Tensor& b,
                                            const Tensor& c, std::span<const int64_t> rows) {
      const double results = accumulate ? 2 * used_bytes(c, rows) : bytes_of(c);
      return product_cost(a.numel() * b.size(1), DType::bf16, bytes_of(a, b) + results);
    });

}  // namespace shoal
