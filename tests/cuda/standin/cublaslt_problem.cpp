// What the documentation of cublasLt asks of a product, and its calculation.
#include "tests/cuda/standin/cublaslt_problem.h"

#include <algorithm>
#include <vector>

#include "core/ops/fp8.h"
#include "tests/cuda/standin/streams.h"

namespace shoal::standin {

namespace {

size_t bytes_of(cudaDataType_t type) {
  return type == CUDA_R_64F ? 8 : type == CUDA_R_16BF ? 2 : is_fp8(type) ? 1 : 4;
}
/// Columns of a matrix as TSan is to see them used.
void touch(const void* data, const Layout& layout, bool written) {
  const size_t size = bytes_of(layout.type);
  for (uint64_t j = 0; j < layout.columns; j++) {
    char* column = static_cast<char*>(const_cast<void*>(data)) + j * static_cast<uint64_t>(layout.ld) * size;
    if (written) will_write(column, layout.rows * size);
    if (!written) will_read(column, layout.rows * size);
  }
}

/// The elements of op(matrix) in the type of the sums, [columns][rows] of the operand as it is used.
template <class Sum, class T>
std::vector<Sum> operand(const void* data, const Layout& layout, bool transpose) {
  const T* from = static_cast<const T*>(data);
  std::vector<Sum> values(layout.rows * layout.columns);
  for (uint64_t j = 0; j < layout.columns; j++) {
    for (uint64_t i = 0; i < layout.rows; i++) {
      const auto value = static_cast<Sum>(from[j * static_cast<uint64_t>(layout.ld) + i]);
      values[transpose ? i * layout.columns + j : j * layout.rows + i] = value;
    }
  }
  return values;
}

/// The scales of an operand: of a matrix [outer, k], k below each other in a column.
struct Scales {
  const float* data;
  int32_t mode;
  uint64_t outer, k;

  uint64_t count() const {
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) return 1;
    const uint64_t blocks = (k + 127) / 128;
    return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F ? blocks * outer
                                                           : (blocks + 3) / 4 * 4 * ((outer + 127) / 128);
  }
  float of(uint64_t i, uint64_t at) const {
    if (data == nullptr) return 1;
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) return *data;
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F) return data[at / 128 * outer + i];
    return data[i / 128 * (((k + 127) / 128 + 3) / 4 * 4) + at / 128];
  }
};

/// The same of codes [k below each other][outer] with scales.
std::vector<float> fp8_operand(const void* data, const Layout& layout, const Scales& scales, bool is_a) {
  const auto* codes = static_cast<const uint8_t*>(data);
  const Fp8Format format = layout.type == CUDA_R_8F_E4M3 ? Fp8Format::e4m3 : Fp8Format::e5m2;
  if (scales.data != nullptr) will_read(const_cast<float*>(scales.data), scales.count() * sizeof(float));
  std::vector<float> values(layout.rows * layout.columns);
  for (uint64_t j = 0; j < layout.columns; j++) {
    for (uint64_t i = 0; i < layout.rows; i++) {
      const float value = from_fp8(codes[j * static_cast<uint64_t>(layout.ld) + i], format) * scales.of(j, i);
      values[is_a ? i * layout.columns + j : j * layout.rows + i] = value;
    }
  }
  return values;
}

template <class Sum, class T>
std::vector<Sum> operand_a(const Work& w) {
  const Problem& p = w.problem;
  if constexpr (std::is_same_v<T, uint8_t>)
    return fp8_operand(w.a, p.a, {static_cast<const float*>(p.how.scale_a), p.how.scale_mode_a, p.m, p.k},
                       true);
  else
    return operand<Sum, T>(w.a, p.a, p.how.transpose_a == CUBLAS_OP_T);
}
template <class Sum, class T>
std::vector<Sum> operand_b(const Work& w) {
  const Problem& p = w.problem;
  if constexpr (std::is_same_v<T, uint8_t>)
    return fp8_operand(w.b, p.b, {static_cast<const float*>(p.how.scale_b), p.how.scale_mode_b, p.n, p.k},
                       false);
  else
    return operand<Sum, T>(w.b, p.b, p.how.transpose_b == CUBLAS_OP_T);
}

/// What the documentation asks of fp8 products, on the card that there is.
cublasStatus_t understand_fp8(const Problem& p) {
  constexpr int32_t kScalar = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
                    kVector = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
                    kBlock = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  const int32_t a = p.how.scale_mode_a, b = p.how.scale_mode_b;
  const bool types = is_fp8(p.a.type) && is_fp8(p.b.type) &&
                     !(p.a.type == CUDA_R_8F_E5M2 && p.b.type == CUDA_R_8F_E5M2) &&
                     (p.c.type == CUDA_R_16BF || p.c.type == CUDA_R_32F) &&
                     p.how.compute == CUBLAS_COMPUTE_32F && p.how.scale == CUDA_R_32F;
  const bool transposes = p.how.transpose_a == CUBLAS_OP_T && p.how.transpose_b == CUBLAS_OP_N;
  const bool sizes = p.k % 16 == 0 && p.a.ld % 16 == 0 && p.b.ld % 16 == 0 &&
                     p.m * bytes_of(p.c.type) % 16 == 0 &&
                     static_cast<uint64_t>(p.c.ld) * bytes_of(p.c.type) % 16 == 0;
  const bool scalar = a == kScalar && b == kScalar;
  const bool blocks = (a == kVector && (b == kVector || b == kBlock)) || (a == kBlock && b == kVector);
  if (!types || !transposes || !sizes || !(scalar || blocks)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (compute_capability() < 89 || (blocks && compute_capability() != 90)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (!blocks) return CUBLAS_STATUS_SUCCESS;
  if (p.m % 4 != 0 || p.n % 4 != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  for (const void* scale : {p.how.scale_a, p.how.scale_b}) {
    if (scale == nullptr || reinterpret_cast<uintptr_t>(scale) % 16 != 0) return CUBLAS_STATUS_INVALID_VALUE;
  }
  return CUBLAS_STATUS_SUCCESS;
}

template <class Sum, class T, class Out>
void calculate_in(const Work& w) {
  const Problem& p = w.problem;
  touch(w.a, p.a, false);
  touch(w.b, p.b, false);
  if (w.beta != 0) touch(w.c, p.c, false);
  touch(w.d, p.c, true);
  const auto a = operand_a<Sum, T>(w);  // k columns of m
  const auto b = operand_b<Sum, T>(w);  // n columns of k
  Sum* first_part = static_cast<Sum*>(w.workspace);
  if (w.parts > 1) touch(first_part, {Kind::layout, p.c.type, p.m, p.n, static_cast<int64_t>(p.m)}, true);
  const uint64_t middle = w.parts > 1 ? p.k / 2 : 0;
  std::vector<Sum> sums(p.m);
  const auto add = [&](uint64_t column, uint64_t from, uint64_t to) {
    std::fill(sums.begin(), sums.end(), Sum(0));
    for (uint64_t k = from; k < to; k++) {
      const Sum factor = b[column * p.k + k];
      for (uint64_t i = 0; i < p.m; i++) sums[i] += a[k * p.m + i] * factor;
    }
  };
  for (uint64_t j = 0; j < p.n && w.parts > 1; j++) {
    add(j, 0, middle);
    std::copy(sums.begin(), sums.end(), first_part + j * p.m);
  }
  for (uint64_t j = 0; j < p.n; j++) {
    add(j, middle, p.k);
    const uint64_t at = j * static_cast<uint64_t>(p.c.ld);
    for (uint64_t i = 0; i < p.m; i++) {
      const Sum sum = w.parts > 1 ? first_part[j * p.m + i] + sums[i] : sums[i];
      Sum value = static_cast<Sum>(w.alpha) * sum;
      if (w.beta != 0)
        value += static_cast<Sum>(w.beta) * static_cast<Sum>(static_cast<const Out*>(w.c)[at + i]);
      static_cast<Out*>(w.d)[at + i] = Out(value);
    }
  }
}

}  // namespace

int& compute_capability() {
  static int value = 90;
  return value;
}
bool is_fp8(cudaDataType_t type) {
  return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

cublasStatus_t understand(cublasLtMatmulDesc_t how, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                          cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, Problem& p) {
  if (how == nullptr || a == nullptr || b == nullptr || c == nullptr || d == nullptr)
    return CUBLAS_STATUS_INVALID_VALUE;
  p = {read<How>(how), read<Layout>(a), read<Layout>(b), read<Layout>(c), 0, 0, 0};
  const auto to = read<Layout>(d);
  if (p.how.kind != Kind::how) return CUBLAS_STATUS_INVALID_VALUE;
  for (const Layout& layout : {p.a, p.b, p.c, to}) {
    if (layout.kind != Kind::layout || layout.rows == 0 || layout.columns == 0 ||
        layout.ld < static_cast<int64_t>(layout.rows) || layout.rows > INT32_MAX ||
        layout.columns > INT32_MAX)
      return CUBLAS_STATUS_INVALID_VALUE;
  }
  const bool ta = p.how.transpose_a == CUBLAS_OP_T, tb = p.how.transpose_b == CUBLAS_OP_T;
  p.m = ta ? p.a.columns : p.a.rows;
  p.k = ta ? p.a.rows : p.a.columns;
  p.n = tb ? p.b.rows : p.b.columns;
  if ((tb ? p.b.columns : p.b.rows) != p.k || p.c.rows != p.m || p.c.columns != p.n)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (to.type != p.c.type || to.rows != p.m || to.columns != p.n || to.ld != p.c.ld)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (is_fp8(p.a.type) || is_fp8(p.b.type)) return understand_fp8(p);
  if (p.how.scale_a != nullptr || p.how.scale_b != nullptr || p.how.scale_mode_a != 0 ||
      p.how.scale_mode_b != 0)
    return CUBLAS_STATUS_INVALID_VALUE;
  const bool f64 = p.how.compute == CUBLAS_COMPUTE_64F && p.how.scale == CUDA_R_64F &&
                   p.a.type == CUDA_R_64F && p.b.type == CUDA_R_64F && p.c.type == CUDA_R_64F;
  const bool in_f32 =
      p.how.compute == CUBLAS_COMPUTE_32F && p.how.scale == CUDA_R_32F && p.a.type == p.b.type;
  const bool f32 = in_f32 && p.a.type == CUDA_R_32F && p.c.type == CUDA_R_32F;
  const bool bf16 = in_f32 && p.a.type == CUDA_R_16BF && (p.c.type == CUDA_R_16BF || p.c.type == CUDA_R_32F);
  return f64 || f32 || bf16 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

uint32_t types_of(const Problem& p) {
  return static_cast<uint32_t>(p.a.type) << 16U | static_cast<uint32_t>(p.b.type) << 8U |
         static_cast<uint32_t>(p.c.type);
}
size_t workspace_for(const Problem& p, uint32_t parts) {
  return parts > 1 ? p.m * p.n * std::max(sizeof(float), bytes_of(p.c.type)) : 0;
}
Algorithm algorithm_for(const Problem& p, uint32_t alignment, uint32_t parts) {
  return {Kind::algorithm,
          p.how.compute,
          p.how.transpose_a * 16 + p.how.transpose_b,
          p.how.scale_mode_a * 16 + p.how.scale_mode_b,
          types_of(p),
          alignment,
          parts};
}
bool fits(const Algorithm& algorithm, const Problem& p) {
  const Algorithm like = algorithm_for(p, 0, 0);
  return algorithm.kind == Kind::algorithm && algorithm.types == like.types &&
         algorithm.compute == like.compute && algorithm.transposes == like.transposes &&
         algorithm.scale_modes == like.scale_modes;
}

void calculate(const Work& w) {
  const Layout &in = w.problem.a, &out = w.problem.c;
  if (in.type == CUDA_R_64F) return calculate_in<double, double, double>(w);
  if (in.type == CUDA_R_32F) return calculate_in<float, float, float>(w);
  if (is_fp8(in.type)) {
    return out.type == CUDA_R_32F ? calculate_in<float, uint8_t, float>(w)
                                  : calculate_in<float, uint8_t, BFloat16>(w);
  }
  if (out.type == CUDA_R_32F) return calculate_in<float, BFloat16, float>(w);
  calculate_in<float, BFloat16, BFloat16>(w);
}

}  // namespace shoal::standin
