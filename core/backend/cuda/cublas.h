// Matrix products by cublasLt, for row-major matrices. Each thread has its own handle, workspaces and choices
// of algorithms, so that nothing is shared and nothing locks. The kernels of core/ops are in
// cublas_linear.cpp.
#pragma once

#include <cstdint>
#include <span>

#include "core/ops/fp8.h"
#include "core/tensor/types.h"

namespace shoal::cuda {

/// How the codes of an fp8 operand are read.
struct Fp8Reading {
  Fp8Format format = Fp8Format::e4m3;
  Fp8Scales kind = Fp8Scales::matrix;
  const float* scales = nullptr;
};

/// c[m, n] (+)= sum_k op(a)[m, k] * op(b)[k, n]; all dense. a is stored [m, k] or, transposed, [k, m]; b is
/// stored [k, n] or, transposed, [n, k]. Sums are f64 for f64 and f32 for the rest (never TF32, nor the fast
/// sums of fp8); a bf16 result is rounded once.
struct Product {
  int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false, accumulate = false;
  /// f32 f32, f64 f64, bf16 f32 or bf16 bf16; u8, which stands for fp8, with f32 or bf16.
  DType operands = DType::f32, result = DType::f32;
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  /// The size that is another one in each step (the rows of an expert): one algorithm serves a range of it.
  enum class Ragged : uint8_t { none, m, k } ragged = Ragged::none;
  Fp8Reading fp8_a = {}, fp8_b = {};
};

/// Puts the products, whose results must not overlap, behind the work of the current stream of `device`. With
/// more than one they are spread over that stream and some of this thread's own, which have come together
/// again behind it. in_order: one after the other in the current stream, so that a result may be written over
/// by the next product. Throws Error.
void multiply(Device device, std::span<const Product> products, bool in_order = false);

/// Whether the library has an algorithm for such a product on this card. Throws Error when it cannot say.
bool can_multiply(Device device, const Product& product);

struct ProductCounts {
  int64_t products = 0,
          choices = 0;  // calls of cublasLtMatmul; questions to the library which algorithm is best
};
/// Of the calling thread.
const ProductCounts& product_counts();
/// Of the workspaces of the calling thread, which stay: at most 32 MiB for each of its streams.
int64_t product_workspace_bytes(Device device);

/// The top of the range for which the algorithm for `size` is chosen: at most a quarter above it, or 16.
int64_t ragged_range(int64_t size);

}  // namespace shoal::cuda
