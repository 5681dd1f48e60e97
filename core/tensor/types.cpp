#include "core/tensor/types.h"

#include <algorithm>

namespace shoal {

int64_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 4;
    case DType::bf16:
      return 2;
    case DType::f64:
      return 8;
    case DType::i32:
      return 4;
    case DType::i64:
      return 8;
    case DType::u8:
      return 1;
  }
  return 0;
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f64:
      return "f64";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::u8:
      return "u8";
  }
  return "?";
}

std::ostream& operator<<(std::ostream& out, DType dtype) {
  return out << dtype_name(dtype);
}

std::ostream& operator<<(std::ostream& out, DeviceType type) {
  return out << (type == DeviceType::cpu ? "cpu" : "cuda");
}

std::ostream& operator<<(std::ostream& out, Device device) {
  out << device.type;
  return device.type == DeviceType::cpu ? out : out << ':' << device.index;
}

Shape::Shape(std::span<const int64_t> sizes) {
  SHOAL_CHECK(sizes.size() <= kMaxDims, "Shape: expected at most ", kMaxDims, " dimensions, got ",
              sizes.size());
  dims_ = static_cast<int>(sizes.size());
  for (int d = 0; d < dims_; d++) {
    SHOAL_CHECK(sizes[d] >= 0, "Shape: expected sizes >= 0, got ", sizes[d], " in dimension ", d);
    sizes_[d] = sizes[d];
  }
}

int64_t Shape::operator[](int dim) const {
  const int d = dim < 0 ? dim + dims_ : dim;
  SHOAL_CHECK(d >= 0 && d < dims_, "Shape ", *this, ": no dimension ", dim);
  return sizes_[d];
}

void Shape::set(int dim, int64_t size) {
  const int d = dim < 0 ? dim + dims_ : dim;
  SHOAL_CHECK(d >= 0 && d < dims_ && size >= 0, "Shape ", *this, ": cannot set dimension ", dim, " to ",
              size);
  sizes_[d] = size;
}

int64_t Shape::numel() const {
  int64_t n = 1;
  for (int d = 0; d < dims_; d++) {
    SHOAL_CHECK(!__builtin_mul_overflow(n, sizes_[d], &n), "Shape ", *this, ": more elements than 2^63");
  }
  return n;
}

bool Shape::operator==(const Shape& other) const {
  return std::ranges::equal(sizes(), other.sizes());
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (int d = 0; d < shape.dims(); d++) out << (d > 0 ? ", " : "") << shape.sizes()[d];
  return out << ']';
}

}  // namespace shoal
