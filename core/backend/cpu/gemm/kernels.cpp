// The gemm kernels of the CPU: checks shapes, cuts the product into parts and
// gives each part to the engine on one thread of the team.
#include <algorithm>
#include <vector>

#include "core/backend/cpu/gemm/engine.h"
#include "core/base/threads.h"
#include "core/ops/linear.h"

namespace shoal::cpu {

namespace {

// A part smaller than this many multiply-adds is not worth a thread of its own (about 20 us).
constexpr int64_t kMinPartWork = int64_t{1} << 21;
// Parts are cut at multiples of this, so that register tiles stay full.
constexpr int64_t kCut = 48;

int64_t divide_up(int64_t n, int64_t by) {
  return (n + by - 1) / by;
}

/// Appends the parts of `call`, cut along its longer side so that each has at least `work` multiply-adds.
template <class T>
void cut(const GemmCall<T>& call, int64_t work, std::vector<GemmCall<T>>& parts) {
  if (call.m == 0 || call.n == 0) return;
  const bool by_rows = call.m >= call.n;
  const int64_t length = by_rows ? call.m : call.n;
  const int64_t line_work = std::max<int64_t>(1, (by_rows ? call.n : call.m) * call.k);
  const int64_t step = divide_up(divide_up(work, line_work), kCut) * kCut;
  for (int64_t at = 0; at < length; at += step) {
    const int64_t count = std::min(step, length - at);
    parts.push_back(by_rows ? call.part(at, count, 0, call.n) : call.part(0, call.m, at, count));
  }
}

/// Runs products with disjoint results over the team. Which thread runs a part changes nothing; how the
/// products are cut depends on the shapes and the team size only.
template <class T>
void run_products(const std::vector<GemmCall<T>>& products) {
  const GemmEngine& engine = gemm_engine();
  if (num_threads() == 1) {
    for (const GemmCall<T>& call : products) engine.run(call);
    return;
  }
  int64_t total = 0;
  for (const GemmCall<T>& call : products) total += call.m * call.n * call.k;
  // A single product is cut evenly; a list gets finer parts, as its products differ in size.
  const int64_t wanted = num_threads() * (products.size() == 1 ? 1 : 4);
  static thread_local std::vector<GemmCall<T>> parts;
  parts.clear();
  for (const GemmCall<T>& call : products) cut(call, std::max(kMinPartWork, divide_up(total, wanted)), parts);
  // The workers need this thread's list, not their own.
  const std::vector<GemmCall<T>>& list = parts;
  parallel_tasks(static_cast<int64_t>(list.size()),
                 [&list, &engine](int64_t i) { engine.run(list[static_cast<size_t>(i)]); });
}

void check_dtypes(const char* where, const Tensor& a, const Tensor& b, const Tensor& c) {
  SHOAL_CHECK(a.dtype() == c.dtype() && b.dtype() == c.dtype(), where,
              ": expected operands and result of one dtype, got ", a.dtype(), " x ", b.dtype(), " -> ",
              c.dtype(), "; cast the operands, or use the products of core/ops/bf16_linear.h");
}

void gemm_impl(Gemm how, const Tensor& a, const Tensor& b, const Tensor& c) {
  check_dtypes("gemm", a, b, c);
  SHOAL_CHECK(a.dims() == 2 && b.dims() == 2 && c.dims() == 2, "gemm: expected matrices, got ", a.shape(),
              " x ", b.shape(), " -> ", c.shape());
  const int64_t m = a.size(how.transpose_a ? 1 : 0), k = a.size(how.transpose_a ? 0 : 1);
  const int64_t n = b.size(how.transpose_b ? 0 : 1);
  SHOAL_CHECK(b.size(how.transpose_b ? 1 : 0) == k && c.size(0) == m && c.size(1) == n,
              "gemm: shapes do not fit: ", a.shape(), how.transpose_a ? "^T" : "", " x ", b.shape(),
              how.transpose_b ? "^T" : "", " -> ", c.shape());
  dispatch_float(c.dtype(), "gemm", [&]<class T>() {
    GemmCall<T> call{.m = m, .n = n, .k = k};
    call.a = a.data<T>();
    call.lda = a.size(1);
    call.b = b.data<T>();
    call.ldb = b.size(1);
    call.c = c.data<T>();
    call.ldc = n;
    call.transpose_a = how.transpose_a;
    call.transpose_b = how.transpose_b;
    call.accumulate = how.accumulate;
    static thread_local std::vector<GemmCall<T>> products;
    products.assign(1, call);
    run_products(products);
  });
}

int64_t sum_rows(const char* where, std::span<const int64_t> rows, int64_t expected, const Tensor& x) {
  int64_t total = 0;
  for (const int64_t count : rows) {
    SHOAL_CHECK(count >= 0, where, ": expected at least 0 rows per group, got ", count);
    total += count;
  }
  SHOAL_CHECK(total == expected, where, ": rows per group sum to ", total, " but the operand of shape ",
              x.shape(), " has ", expected, " rows");
  return total;
}

void grouped_rows_impl(Gemm how, const Tensor& a, const Tensor& b, const Tensor& c,
                       std::span<const int64_t> rows) {
  const char* where = "grouped_gemm_rows";
  check_dtypes(where, a, b, c);
  const auto groups = static_cast<int64_t>(rows.size());
  SHOAL_CHECK(!how.transpose_a && a.dims() == 2 && b.dims() == 3 && c.dims() == 2 && b.size(0) == groups,
              where, ": expected [R, K] x [", groups, ", K, N] -> [R, N], got ", a.shape(), " x ", b.shape(),
              " -> ", c.shape(), "; transpose_a is not possible here");
  const int64_t k = a.size(1), n = b.size(how.transpose_b ? 1 : 2);
  SHOAL_CHECK(b.size(how.transpose_b ? 2 : 1) == k && c.size(1) == n && c.size(0) == a.size(0), where,
              ": shapes do not fit: ", a.shape(), " x ", b.shape(), how.transpose_b ? "^T" : "", " -> ",
              c.shape());
  sum_rows(where, rows, a.size(0), a);
  dispatch_float(c.dtype(), where, [&]<class T>() {
    static thread_local std::vector<GemmCall<T>> products;
    products.clear();
    GemmCall<T> call{.n = n, .k = k};
    call.a = a.data<T>();
    call.lda = k;
    call.b = b.data<T>();
    call.ldb = b.size(2);
    call.c = c.data<T>();
    call.ldc = n;
    call.transpose_b = how.transpose_b;
    call.accumulate = how.accumulate;
    for (const int64_t count : rows) {
      call.m = count;
      if (count > 0) products.push_back(call);
      call.a += count * k;
      call.b += k * n;
      call.c += count * n;
    }
    run_products(products);
  });
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
  const int64_t n = a.size(1), k = b.size(1);
  sum_rows(where, rows, a.size(0), a);
  dispatch_float(c.dtype(), where, [&]<class T>() {
    static thread_local std::vector<GemmCall<T>> products;
    products.clear();
    GemmCall<T> call{.m = n, .n = k};
    call.a = a.data<T>();
    call.lda = n;
    call.b = b.data<T>();
    call.ldb = k;
    call.c = c.data<T>();
    call.ldc = k;
    call.transpose_a = true;
    call.accumulate = how.accumulate;
    for (const int64_t count : rows) {
      call.k = count;
      // An empty group writes zeros, or adds nothing.
      if (count > 0 || !how.accumulate) products.push_back(call);
      call.a += count * n;
      call.b += count * k;
      call.c += n * k;
    }
    run_products(products);
  });
}

bool rows_are_independent_impl(DType) {
  return gemm_engine().rows_are_independent();
}

const bool added = rows_are_independent.add(DeviceType::cpu, &rows_are_independent_impl) &&
                   gemm.add(DeviceType::cpu, &gemm_impl) &&
                   grouped_gemm_rows.add(DeviceType::cpu, &grouped_rows_impl) &&
                   grouped_gemm_reduce.add(DeviceType::cpu, &grouped_reduce_impl);

}  // namespace

}  // namespace shoal::cpu
