// CUDA kernels of the products in core/ops/linear.h and core/ops/bf16_linear.h: which library or kernel does
// them.
#include <vector>

#include "core/backend/cuda/cublas.h"
#include "core/backend/cuda/grouped_gemm.h"
#include "core/ops/bf16_linear.h"
#include "core/ops/linear.h"

namespace shoal::cuda {

namespace {

// Groups with fewer rows than this share launches of our own kernel. A call of cuBLAS takes the host about
// 5 us; our kernel is to make some 180 rows of a matrix of 2048 x 2048 in that time, at 300 TFLOP/s. To be
// tuned on hardware. It is the group's own rows that decide, so that its bits do not depend on the others of
// the call: experts may be computed in parts.
constexpr int64_t kFewRowsPerGroup = 128;

bool has_few_rows(std::span<const int64_t> rows, size_t group) {
  return rows.size() > 1 && rows[group] < kFewRowsPerGroup;
}

/// Neighbouring groups that share a launch.
struct FewRows {
  int64_t first_group, first_row, num_rows;
  std::span<const int64_t> rows;
};
template <class Body>
void for_each_few_rows(std::span<const int64_t> rows, const Body& body) {
  int64_t first_row = 0;
  for (size_t g = 0; g < rows.size();) {
    size_t end = g;
    int64_t num_rows = 0;
    while (end < rows.size() && has_few_rows(rows, end)) num_rows += rows[end++];
    if (end > g) body(FewRows{static_cast<int64_t>(g), first_row, num_rows, rows.subspan(g, end - g)});
    first_row += num_rows;
    if (end < rows.size()) first_row += rows[end++];
    g = end;
  }
}

void check_dtypes(const char* where, const Tensor& a, const Tensor& b, const Tensor& c) {
  SHOAL_CHECK(a.dtype() == c.dtype() && b.dtype() == c.dtype() &&
                  (c.dtype() == DType::f32 || c.dtype() == DType::f64),
              where, ": expected operands and result of f32 or f64, got ", a.dtype(), " x ", b.dtype(),
              " -> ", c.dtype(), "; cast the operands, or use the products of core/ops/bf16_linear.h");
}

void check_rows(const char* where, std::span<const int64_t> rows, int64_t expected) {
  int64_t total = 0;
  for (const int64_t count : rows) {
    SHOAL_CHECK(count >= 0, where, ": expected at least 0 rows per group, got ", count);
    total += count;
  }
  SHOAL_CHECK(total == expected, where, ": rows per group sum to ", total, ", but the operand has ",
              expected);
}

/// The products of a call: a list of this thread, for one call at a time.
std::vector<Product>& empty_list() {
  static thread_local std::vector<Product> list;
  list.clear();
  return list;
}

Product product_of(const Tensor& a, const Tensor& b, const Tensor& c) {
  Product p;
  p.operands = a.dtype();
  p.result = c.dtype();
  p.a = a.bytes();
  p.b = b.bytes();
  p.c = c.bytes();
  return p;
}

const void* advance(const void* data, int64_t elements, DType dtype) {
  return static_cast<const std::byte*>(data) + elements * dtype_size(dtype);
}
void* advance(void* data, int64_t elements, DType dtype) {
  return static_cast<std::byte*>(data) + elements * dtype_size(dtype);
}

void gemm_impl(Gemm how, const Tensor& a, const Tensor& b, const Tensor& c) {
  check_dtypes("gemm", a, b, c);
  SHOAL_CHECK(a.dims() == 2 && b.dims() == 2 && c.dims() == 2, "gemm: expected matrices, got ", a.shape(),
              " x ", b.shape(), " -> ", c.shape());
  Product p = product_of(a, b, c);
  p.m = a.size(how.transpose_a ? 1 : 0);
  p.k = a.size(how.transpose_a ? 0 : 1);
  p.n = b.size(how.transpose_b ? 0 : 1);
  SHOAL_CHECK(b.size(how.transpose_b ? 1 : 0) == p.k && c.size(0) == p.m && c.size(1) == p.n,
              "gemm: shapes do not fit: ", a.shape(), how.transpose_a ? "^T" : "", " x ", b.shape(),
              how.transpose_b ? "^T" : "", " -> ", c.shape());
  p.transpose_a = how.transpose_a;
  p.transpose_b = how.transpose_b;
  p.accumulate = how.accumulate;
  multiply(c.device(), {&p, 1});
}

/// Group g: c[rows of g] (+)= a[rows of g] * op(b[g]). but_few: without groups of few rows.
void multiply_rows(Product p, Device device, std::span<const int64_t> rows, bool but_few = false) {
  std::vector<Product>& products = empty_list();
  if (rows.size() > 1) p.ragged = Product::Ragged::m;
  for (size_t g = 0; g < rows.size(); g++) {
    const int64_t count = rows[g];
    p.m = count;
    if (!but_few || !has_few_rows(rows, g)) products.push_back(p);
    p.a = advance(p.a, count * p.k, p.operands);
    p.b = advance(p.b, p.k * p.n, p.operands);
    p.c = advance(p.c, count * p.n, p.result);
  }
  multiply(device, products);
}

/// Group g: c[g] (+)= a[rows of g]^T * b[rows of g]. but_few: as above.
void multiply_reduce(Product p, Device device, std::span<const int64_t> rows, bool but_few = false) {
  std::vector<Product>& products = empty_list();
  p.transpose_a = true;
  if (rows.size() > 1) p.ragged = Product::Ragged::k;
  for (size_t g = 0; g < rows.size(); g++) {
    const int64_t count = rows[g];
    p.k = count;
    if ((count > 0 || !p.accumulate) && (!but_few || !has_few_rows(rows, g))) products.push_back(p);
    p.a = advance(p.a, count * p.m, p.operands);
    p.b = advance(p.b, count * p.n, p.operands);
    p.c = advance(p.c, p.m * p.n, p.result);
  }
  multiply(device, products);
}

void grouped_rows_impl(Gemm how, const Tensor& a, const Tensor& b, const Tensor& c,
                       std::span<const int64_t> rows) {
  const char* where = "grouped_gemm_rows";
  check_dtypes(where, a, b, c);
  const auto groups = static_cast<int64_t>(rows.size());
  SHOAL_CHECK(!how.transpose_a && a.dims() == 2 && b.dims() == 3 && c.dims() == 2 && b.size(0) == groups,
              where, ": expected [R, K] x [", groups, ", K, N] -> [R, N], got ", a.shape(), " x ", b.shape(),
              " -> ", c.shape(), "; transpose_a is not possible here");
  Product p = product_of(a, b, c);
  p.k = a.size(1);
  p.n = b.size(how.transpose_b ? 1 : 2);
  SHOAL_CHECK(b.size(how.transpose_b ? 2 : 1) == p.k && c.size(1) == p.n && c.size(0) == a.size(0), where,
              ": shapes do not fit: ", a.shape(), " x ", b.shape(), how.transpose_b ? "^T" : "", " -> ",
              c.shape());
  check_rows(where, rows, a.size(0));
  p.transpose_b = how.transpose_b;
  p.accumulate = how.accumulate;
  multiply_rows(p, c.device(), rows);
}

void grouped_reduce_impl(Gemm how, const Tensor& a, const Tensor& b, const Tensor& c,
                         std::span<const int64_t> rows) {
  const char* where = "grouped_gemm_reduce";
  check_dtypes(where, a, b, c);
  const auto groups = static_cast<int64_t>(rows.size());
  SHOAL_CHECK(a.dims() == 2 && b.dims() == 2 && c.dims() == 3 && a.size(0) == b.size(0) &&
                  c.size(0) == groups && c.size(1) == a.size(1) && c.size(2) == b.size(1),
              where, ": expected [R, N]^T x [R, K] -> [", groups, ", N, K], got ", a.shape(), "^T x ",
              b.shape(), " -> ", c.shape());
  check_rows(where, rows, a.size(0));
  Product p = product_of(a, b, c);
  p.m = a.size(1);
  p.n = b.size(1);
  p.accumulate = how.accumulate;
  multiply_reduce(p, c.device(), rows);
}

void packed_rows_impl(PackedUse use, const Tensor& x, const Tensor& packed, const Tensor& y,
                      std::span<const int64_t> rows) {
  const char* where = "packed_gemm_rows";
  SHOAL_CHECK(x.dims() == 2 && y.dims() == 2 && x.size(0) == y.size(0) && x.dtype() == DType::bf16 &&
                  packed.dtype() == DType::bf16 &&
                  packed.numel() == static_cast<int64_t>(rows.size()) * y.size(1) * x.size(1),
              where, ": expected bf16 x [R, I], y [R, O] and ", rows.size(),
              " packed matrices [O, I], got x ", x.dtype(), ' ', x.shape(), ", y ", y.shape(), " and ",
              packed.numel(), " packed elements");
  SHOAL_CHECK(y.dtype() == DType::bf16 || y.dtype() == DType::f32, where, ": expected y of bf16 or f32, got ",
              y.dtype());
  SHOAL_CHECK(use != PackedUse::both, where, ": expected the use `forward` or `backward`");
  check_rows(where, rows, x.size(0));
  const bool transposed = use == PackedUse::forward;  // the copy is [N, K], of y = x W^T
  const int64_t matrix = x.size(1) * y.size(1);
  for_each_few_rows(rows, [&](const FewRows& few) {
    if (few.num_rows == 0) return;
    const int64_t end = few.first_row + few.num_rows, groups = std::ssize(few.rows);
    grouped_rows_product(x.rows(few.first_row, end), packed.flat(few.first_group * matrix, groups * matrix),
                         transposed, y.rows(few.first_row, end), few.rows);
  });
  Product p = product_of(x, packed, y);
  p.k = x.size(1);
  p.n = y.size(1);
  p.transpose_b = transposed;
  multiply_rows(p, y.device(), rows, /*but_few=*/true);
}

void bf16_reduce_impl(bool accumulate, const Tensor& a, const Tensor& b, const Tensor& c,
                      std::span<const int64_t> rows) {
  const char* where = "bf16_gemm_reduce";
  const auto groups = static_cast<int64_t>(rows.size());
  SHOAL_CHECK(a.dims() == 2 && b.dims() == 2 && a.size(0) == b.size(0) && a.dtype() == DType::bf16 &&
                  b.dtype() == DType::bf16 && c.dtype() == DType::f32 &&
                  c.numel() == groups * a.size(1) * b.size(1),
              where, ": expected bf16 [R, N]^T x [R, K] -> f32 [", groups, ", N, K], got ", a.dtype(), ' ',
              a.shape(), "^T x ", b.dtype(), ' ', b.shape(), " -> ", c.dtype(), ' ', c.shape());
  check_rows(where, rows, a.size(0));
  const int64_t matrix = a.size(1) * b.size(1);
  for_each_few_rows(rows, [&](const FewRows& few) {
    if (few.num_rows == 0 && accumulate) return;
    const int64_t end = few.first_row + few.num_rows, groups = std::ssize(few.rows);
    grouped_reduce_product(accumulate, a.rows(few.first_row, end), b.rows(few.first_row, end),
                           c.flat(few.first_group * matrix, groups * matrix), few.rows);
  });
  Product p = product_of(a, b, c);
  p.m = a.size(1);
  p.n = b.size(1);
  p.accumulate = accumulate;
  multiply_reduce(p, c.device(), rows, /*but_few=*/true);
}

[[maybe_unused]] const bool added[] = {
    gemm.add(DeviceType::cuda, &gemm_impl),
    grouped_gemm_rows.add(DeviceType::cuda, &grouped_rows_impl),
    grouped_gemm_reduce.add(DeviceType::cuda, &grouped_reduce_impl),
    packed_gemm_rows.add(DeviceType::cuda, &packed_rows_impl),
    bf16_gemm_reduce.add(DeviceType::cuda, &bf16_reduce_impl),
};

}  // namespace

}  // namespace shoal::cuda
