// CPU kernels of core/autograd/exact_sum.h.
#include "core/autograd/exact_sum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"

SHOAL_KERNELS_BEGIN

// x + kRound - kRound is x rounded to a whole number, for |x| < 2^51; the bits of the first sum are then the
// whole number beside those of kRound. Both ways are single instructions on vectors, where conversions
// between f64 and i64 are not.
constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
constexpr int64_t kRoundBits = std::bit_cast<int64_t>(kRound);

[[gnu::always_inline]] inline double rounded(double x) {
  return x + kRound - kRound;
}
[[gnu::always_inline]] inline int64_t to_integer(double whole) {
  return std::bit_cast<int64_t>(whole + kRound) - kRoundBits;
}
[[gnu::always_inline]] inline double to_double(int64_t whole) {
  return std::bit_cast<double>(whole + kRoundBits) - kRound;
}

constexpr double kHighUnits = 1 << 12;  // in 1
constexpr int kLowBits = 50;            // of one unit of `high`
constexpr double kLowUnits = static_cast<double>(int64_t{1} << kLowBits);

/// Leaves at most half a unit of `high` in `low`; returns the rest, in such units.
[[gnu::always_inline]] inline int64_t take_carry(int64_t& low) {
  const int64_t carry = (low + (int64_t{1} << (kLowBits - 1))) >> kLowBits;
  low -= carry << kLowBits;
  return carry;
}

template <class T>
void add_range(const T* from, double* high, int64_t* low, int64_t begin, int64_t end) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
#pragma omp simd
  for (int64_t i = begin; i < end; i++) {
    const auto v = static_cast<double>(from[i]);
    const bool fits = std::abs(v) < ExactSum::kMaxSummand;  // false for NaN
    const double x = fits ? v * kHighUnits : 0.0;
    const double whole = rounded(x);
    int64_t sum = low[i] + to_integer((x - whole) * kLowUnits);
    const double carry = to_double(take_carry(sum));
    low[i] = sum;
    high[i] += fits ? whole + carry : kNaN;
  }
}

void exact_add_impl(const ExactSum& sum, const Tensor& summand) {
  const int64_t n = summand.numel();
  SHOAL_CHECK(sum.high.numel() == n && sum.low.numel() == n, "exact_add: expected ", sum.high.numel(),
              " elements like the sum, got ", summand.shape());
  double* high = sum.high.data<double>();
  int64_t* low = sum.low.data<int64_t>();
  dispatch_float(summand.dtype(), "exact_add", [&]<class T>() {
    const T* from = summand.data<T>();
    cpu::parallel_blocks(n, [=](int64_t begin, int64_t end) { add_range(from, high, low, begin, end); });
  });
}

template <class T>
void value_range(const double* high, const int64_t* low, T* out, int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; i++) {
    int64_t rest = low[i];
    const double whole = high[i] + to_double(take_carry(rest));
    out[i] = static_cast<T>((whole + to_double(rest) * (1 / kLowUnits)) * (1 / kHighUnits));
  }
}

void exact_value_impl(const ExactSum& sum, const Tensor& out) {
  const int64_t n = out.numel();
  SHOAL_CHECK(sum.high.numel() == n && sum.low.numel() == n, "exact_value: expected ", sum.high.numel(),
              " elements like the sum, got ", out.shape());
  const double* high = sum.high.data<double>();
  const int64_t* low = sum.low.data<int64_t>();
  dispatch_float(out.dtype(), "exact_value", [&]<class T>() {
    T* to = out.data<T>();
    cpu::parallel_blocks(n, [=](int64_t begin, int64_t end) { value_range(high, low, to, begin, end); });
  });
}

constexpr int kLimbs = ExactSquares::kLimbs;

struct SquareSum {
  std::array<int64_t, ExactSquares::kSize> sums{};
  SquareSum& operator+=(const SquareSum& other) {
    for (size_t i = 0; i < sums.size(); i++) sums[i] += other.sums[i];
    carry();
    return *this;
  }
  void carry() {
    for (size_t i = kLimbs - 1; i > 0; i--) {
      const int64_t up = (sums[i] + (int64_t{1} << (ExactSquares::kBits - 1))) >> ExactSquares::kBits;
      sums[i] -= up * (int64_t{1} << ExactSquares::kBits);
      sums[i - 1] += up;
    }
  }
};

constexpr double power_of_two(int exponent) {
  double value = 1;
  for (int i = 0; i < exponent; i++) value *= 2;
  for (int i = 0; i > exponent; i--) value /= 2;
  return value;
}

/// At most 2^13 elements, whose limbs stay below 2^36 + 13 bits, and 2^47 + 13 bits.
template <class T>
void add_squares_range(const T* x, int64_t begin, int64_t end, SquareSum& to) {
  constexpr double kTop = 1 / power_of_two(ExactSquares::kTopExponent),
                   kStep = power_of_two(ExactSquares::kBits);
  const double max = power_of_two(38);
  int64_t first = 0, second = 0, third = 0, fourth = 0, left_out = 0;
#pragma omp simd reduction(+ : first, second, third, fourth, left_out)
  for (int64_t i = begin; i < end; i++) {
    auto v = static_cast<double>(x[i]);
    const bool fits = std::abs(v) < max;
    v = fits ? v : 0.0;
    left_out += fits ? 0 : 1;
    const double square = v * v, top = square * kTop;
    const double a = rounded(top), rest_a = (top - a) * kStep;
    const double b = rounded(rest_a), rest_b = (rest_a - b) * kStep;
    const double c = rounded(rest_b), rest_c = (rest_b - c) * kStep;
    first += to_integer(a);
    second += to_integer(b);
    third += to_integer(c);
    fourth += to_integer(rest_c);
  }
  SquareSum sum;
  sum.sums = {first, second, third, fourth, left_out};
  to += sum;
}

void exact_add_squares_impl(const Tensor& x, const Tensor& sums) {
  SHOAL_CHECK(sums.dtype() == DType::i64 && sums.numel() == ExactSquares::kSize,
              "exact_add_squares: expected sums i64 [", ExactSquares::kSize, "], got ", sums.dtype(), ' ',
              sums.shape());
  dispatch_float(x.dtype(), "exact_add_squares", [&]<class T>() {
    const T* data = x.data<T>();
    const auto total = cpu::ordered_sum<SquareSum>(x.numel(), [=](int64_t begin, int64_t end) {
      SquareSum part;
      for (int64_t b = begin; b < end; b += cpu::kBlockElements)
        add_squares_range(data, b, std::min(end, b + cpu::kBlockElements), part);
      return part;
    });
    SquareSum all;
    std::copy_n(sums.data<int64_t>(), all.sums.size(), all.sums.begin());
    all += total;
    std::ranges::copy(all.sums, sums.data<int64_t>());
  });
}

void exact_squares_value_impl(const Tensor& sums, const Tensor& out) {
  SquareSum all;
  std::copy_n(sums.data<int64_t>(), all.sums.size(), all.sums.begin());
  all.carry();
  double value = 0;
  for (int i = kLimbs - 1; i >= 0; i--)
    value += std::ldexp(static_cast<double>(all.sums[static_cast<size_t>(i)]),
                        ExactSquares::kTopExponent - i * ExactSquares::kBits);
  out.data<double>()[0] = all.sums[kLimbs] == 0 ? value : std::numeric_limits<double>::quiet_NaN();
}

const bool added[] = {
    exact_add.add(DeviceType::cpu, &exact_add_impl, kIsaLevel),
    exact_value.add(DeviceType::cpu, &exact_value_impl, kIsaLevel),
    exact_add_squares.add(DeviceType::cpu, &exact_add_squares_impl, kIsaLevel),
    exact_squares_value.add(DeviceType::cpu, &exact_squares_value_impl, kIsaLevel),
};

SHOAL_KERNELS_END
