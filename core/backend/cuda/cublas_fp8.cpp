// CUDA kernel fp8_gemm (core/ops/fp8_linear.h): by the fp8 products of cublasLt, or where it has none by its
// bf16 products of the same numbers.
#include <algorithm>
#include <atomic>
#include <vector>

#include "core/backend/cuda/cublas.h"
#include "core/backend/cuda/fp8.h"
#include "core/base/log.h"
#include "core/ops/fp8_linear.h"

namespace shoal::cuda {

namespace {

Fp8Reading reading(const Fp8Operand& operand, const Fp8Matrix& m) {
  return {operand.format, operand.kind, operand.scales.data<float>() + m.scales};
}

/// The products of the groups, with codes as operands.
std::vector<Product> products_of(bool accumulate, const Fp8Operand& a, const Fp8Operand& b, const Tensor& c) {
  std::vector<Product> products;
  int64_t first = 0;
  // The rows of an expert differ with each step, in number or as what is summed.
  bool same_sums = true;
  for (const Fp8Matrix& m : a.matrices) same_sums = same_sums && m.sum == a.matrices[0].sum;
  for (size_t g = 0; g < a.matrices.size(); g++) {
    const Fp8Matrix &of_a = a.matrices[g], &of_b = b.matrices[g];
    Product p;
    p.m = of_a.outer;
    p.n = of_b.outer;
    p.k = of_a.sum;
    p.transpose_b = true;
    p.accumulate = accumulate;
    p.operands = DType::u8;
    p.result = c.dtype();
    p.a = a.codes.bytes() + of_a.codes;
    p.b = b.codes.bytes() + of_b.codes;
    p.c = c.bytes() + first * dtype_size(c.dtype());
    if (a.matrices.size() > 1) p.ragged = same_sums ? Product::Ragged::m : Product::Ragged::k;
    p.fp8_a = reading(a, of_a);
    p.fp8_b = reading(b, of_b);
    products.push_back(p);
    first += p.m * p.n;
  }
  return products;
}

/// Scales of vectors and blocks want multiples of 4 rows. So a product writes up to three rows more, into
/// those of later groups, whose own products follow in order. Where that would be behind the end of c the
/// result goes to memory of its own first. x has spare rows (fp8_along_rows).
void multiply_in_fours(Device device, std::vector<Product>& products, const Tensor& c) {
  struct Aside {
    Tensor result;
    int64_t first, count;
  };
  std::vector<Aside> asides;
  int64_t first = 0;
  for (Product& p : products) {
    const int64_t count = p.m * p.n;
    const int64_t rows = fp8_round_up(p.m, 4);
    if (first + rows * p.n > c.numel()) {
      asides.push_back({Tensor::empty({rows * p.n}, c.dtype(), device), first, count});
      p.c = asides.back().result.bytes();
    }
    p.m = rows;
    first += count;
  }
  multiply(device, products, true);
  for (const Aside& aside : asides)
    c.flat(aside.first, aside.count).copy_from(aside.result.flat(0, aside.count));
}

void multiply_numbers(Device device, std::vector<Product>& products, const Fp8Operand& a,
                      const Fp8Operand& b) {
  static std::atomic<bool> said = false;
  if (!said.exchange(true)) {
    log::warn(
        "fp8: this card or version of cuBLAS has no fp8 product for these experts; they are multiplied "
        "in bf16, with the same numbers and sums but not faster (docs/cuda.md)");
  }
  const Tensor numbers_a = fp8_numbers(a), numbers_b = fp8_numbers(b);
  for (size_t g = 0; g < products.size(); g++) {
    Product& p = products[g];
    p.operands = DType::bf16;
    p.a = numbers_a.data<BFloat16>() + a.matrices[g].codes;
    p.b = numbers_b.data<BFloat16>() + b.matrices[g].codes;
  }
  multiply(device, products);
}

void gemm_impl(bool accumulate, const Fp8Operand& a, const Fp8Operand& b, const Tensor& c) {
  check_fp8_gemm(accumulate, a, b, c);
  const Device device = c.device();
  std::vector<Product> products = products_of(accumulate, a, b, c);
  const bool fours = a.kind != Fp8Scales::matrix;
  for (const Product& p : products) {
    if (p.m == 0 || p.n == 0 || p.k == 0) continue;
    Product asked = p;
    if (fours) asked.m = fp8_round_up(p.m, 4);
    const bool adds_in_fours = fours && accumulate && p.m % 4 != 0;
    if (adds_in_fours || !can_multiply(device, asked)) return multiply_numbers(device, products, a, b);
    break;
  }
  const bool whole = std::ranges::all_of(products, [](const Product& p) { return p.m % 4 == 0; });
  if (fours && !whole) return multiply_in_fours(device, products, c);
  multiply(device, products);
}

[[maybe_unused]] const bool added = fp8_gemm.add(DeviceType::cuda, &gemm_impl);

}  // namespace

}  // namespace shoal::cuda
