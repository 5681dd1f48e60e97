// Element types, devices and shapes. Plain values, used everywhere.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <span>

#include "core/base/error.h"

namespace shoal {

/// f64 exists on the CPU, for gradient checks and exact parity tests.
enum class DType : uint8_t { f32, bf16, f64, i32, i64, u8 };

/// bfloat16 storage: the upper half of an IEEE f32; conversions round to nearest even and keep NaN a NaN.
/// constexpr, so that CUDA kernels may call them.
struct BFloat16 {
  uint16_t bits = 0;
  BFloat16() = default;
  constexpr explicit BFloat16(float value) {
    const auto u = std::bit_cast<uint32_t>(value);
    const bool nan = (u & 0x7FFFFFFFU) > 0x7F800000U;
    bits = static_cast<uint16_t>(nan ? (u >> 16) | 0x40U : (u + 0x7FFFU + ((u >> 16) & 1U)) >> 16);
  }
  /// Loops that store by `y[i] = value` vectorise, whereas `y[i] = BFloat16(value)` does not.
  constexpr BFloat16& operator=(float value) {
    bits = BFloat16(value).bits;
    return *this;
  }
  constexpr explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};

int64_t dtype_size(DType dtype);  // bytes per element
const char* dtype_name(DType dtype);
inline bool is_float(DType d) {
  return d == DType::f32 || d == DType::bf16 || d == DType::f64;
}
/// The dtype of statistics, scales and parameters that go with values stored as `d`: f32 for bf16, else d.
inline DType stats_dtype(DType d) {
  return d == DType::bf16 ? DType::f32 : d;
}
std::ostream& operator<<(std::ostream& out, DType dtype);

template <class T>
inline constexpr DType dtype_of = [] {
  if constexpr (std::is_same_v<T, float>)
    return DType::f32;
  else if constexpr (std::is_same_v<T, BFloat16>)
    return DType::bf16;
  else if constexpr (std::is_same_v<T, double>)
    return DType::f64;
  else if constexpr (std::is_same_v<T, int32_t>)
    return DType::i32;
  else if constexpr (std::is_same_v<T, int64_t>)
    return DType::i64;
  else {
    static_assert(std::is_same_v<T, uint8_t>, "no DType for this type");
    return DType::u8;
  }
}();

/// Calls f.template operator()<T>() with T = float or double; throws for other types, naming `where`.
template <class F>
decltype(auto) dispatch_float(DType dtype, const char* where, F&& f) {
  if (dtype == DType::f32) return f.template operator()<float>();
  SHOAL_CHECK(dtype == DType::f64, where, ": expected dtype f32 or f64, got ", dtype);
  return f.template operator()<double>();
}
/// The same with BFloat16 as a third possibility (storage type; kernels compute in f32).
template <class F>
decltype(auto) dispatch_storage(DType dtype, const char* where, F&& f) {
  if (dtype == DType::bf16) return f.template operator()<BFloat16>();
  return dispatch_float(dtype, where, std::forward<F>(f));
}

enum class DeviceType : uint8_t { cpu, cuda };
inline constexpr int kNumDeviceTypes = 2;
struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};
std::ostream& operator<<(std::ostream& out, Device device);    // cpu, cuda:1
std::ostream& operator<<(std::ostream& out, DeviceType type);  // cpu

/// Up to 6 dimensions, stored inline. A scalar has 0 dimensions and 1 element.
class Shape {
 public:
  static constexpr int kMaxDims = 6;
  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes) : Shape(std::span(sizes.begin(), sizes.size())) {}
  explicit Shape(std::span<const int64_t> sizes);

  int dims() const { return dims_; }
  int64_t operator[](int dim) const;  // negative dim counts from the end
  void set(int dim, int64_t size);
  int64_t numel() const;  // product of all sizes
  std::span<const int64_t> sizes() const { return {sizes_.data(), static_cast<size_t>(dims_)}; }
  bool operator==(const Shape& other) const;

 private:
  std::array<int64_t, kMaxDims> sizes_{};
  int dims_ = 0;
};
std::ostream& operator<<(std::ostream& out, const Shape& shape);  // [2, 3]

}  // namespace shoal
