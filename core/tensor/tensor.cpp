#include "core/tensor/tensor.h"

namespace shoal {

Tensor Tensor::empty(const Shape& shape, DType dtype, Device device) {
  Tensor t;
  t.shape_ = shape;
  t.dtype_ = dtype;
  t.storage_ = std::make_shared<Storage>(shape.numel() * dtype_size(dtype), device);
  return t;
}

Tensor Tensor::zeros(const Shape& shape, DType dtype, Device device) {
  Tensor t = empty(shape, dtype, device);
  t.set_zero();
  return t;
}

Tensor Tensor::over(std::shared_ptr<void> owner, void* data, const Shape& shape, DType dtype) {
  Tensor t;
  t.shape_ = shape;
  t.dtype_ = dtype;
  t.storage_ = std::make_shared<Storage>(data, shape.numel() * dtype_size(dtype), std::move(owner));
  return t;
}

Tensor Tensor::from_host(const void* values, int64_t count, DType dtype, const Shape& shape, Device device) {
  SHOAL_CHECK(count == shape.numel(), "Tensor::from: shape ", shape, " has ", shape.numel(),
              " elements, got ", count);
  Tensor t = empty(shape, dtype, device);
  device_runtime(device.type).copy(t.bytes(), device, values, Device{}, t.num_bytes());
  return t;
}

int64_t Tensor::num_rows() const {
  int64_t rows = 1;
  for (int d = 0; d + 1 < dims(); d++) rows *= size(d);
  return rows;
}

std::byte* Tensor::bytes() const {
  SHOAL_CHECK(defined(), "Tensor::data: the tensor is undefined");
  SHOAL_CHECK(storage_->data() != nullptr, "Tensor::data: the memory of tensor ", shape_,
              " is released: expected it to be used between allocate_memory() and release_memory()");
  return static_cast<std::byte*>(storage_->data()) + offset_bytes_;
}

void Tensor::check_dtype(DType wanted) const {
  SHOAL_CHECK(wanted == dtype_, "Tensor::data: tensor ", shape_, " holds ", dtype_, ", asked for ", wanted);
}

Tensor Tensor::view(const Shape& shape) const {
  SHOAL_CHECK(shape.numel() == numel(), "Tensor::view: ", shape_, " has ", numel(),
              " elements, cannot be viewed as ", shape);
  Tensor t = *this;
  t.shape_ = shape;
  return t;
}

Tensor Tensor::rows(int64_t begin, int64_t end) const {
  SHOAL_CHECK(dims() >= 1 && 0 <= begin && begin <= end && end <= size(0), "Tensor::rows: ", shape_,
              " has no rows [", begin, ", ", end, ")");
  Tensor t = *this;
  const int64_t row_bytes = size(0) == 0 ? 0 : num_bytes() / size(0);
  t.shape_.set(0, end - begin);
  t.offset_bytes_ += begin * row_bytes;
  t.grad_ref = {};
  t.recipe = nullptr;
  return t;
}

Tensor Tensor::flat(int64_t offset, int64_t count) const {
  SHOAL_CHECK(offset >= 0 && count >= 0 && offset + count <= numel(), "Tensor::flat: ", shape_,
              " has no elements [", offset, ", ", offset + count, ")");
  Tensor t = *this;
  t.shape_ = Shape{count};
  t.offset_bytes_ += offset * dtype_size(dtype_);
  t.grad_ref = {};
  t.recipe = nullptr;
  return t;
}

Tensor Tensor::clone() const {
  Tensor t = empty(shape_, dtype_, device());
  t.copy_from(*this);
  return t;
}

Tensor Tensor::to(Device target) const {
  if (target == device()) return *this;
  Tensor t = empty(shape_, dtype_, target);
  t.copy_from(*this);
  return t;
}

void Tensor::copy_from(const Tensor& other) const {
  SHOAL_CHECK(numel() == other.numel() && dtype_ == other.dtype_, "Tensor::copy_from: expected ", dtype_, ' ',
              shape_, ", got ", other.dtype_, ' ', other.shape_);
  const Device to = device(), from = other.device();
  DeviceRuntime& runtime = device_runtime(to.type == DeviceType::cpu ? from.type : to.type);
  runtime.copy(bytes(), to, other.bytes(), from, num_bytes());
}

void Tensor::set_zero() const {
  device_runtime(device().type).set_zero(bytes(), num_bytes());
}

void Tensor::used_on(const Stream& stream) const {
  if (has_memory()) device_runtime(device().type).used_on(storage_->data(), stream);
}

void Tensor::to_host(void* out) const {
  device_runtime(device().type).copy(out, Device{}, bytes(), device(), num_bytes());
}

double Tensor::item() const {
  SHOAL_CHECK(numel() == 1, "Tensor::item: expected one element, got shape ", shape_);
  switch (dtype_) {
    case DType::f32:
      return to_vector<float>()[0];
    case DType::bf16:
      return static_cast<double>(static_cast<float>(to_vector<BFloat16>()[0]));
    case DType::f64:
      return to_vector<double>()[0];
    case DType::i32:
      return to_vector<int32_t>()[0];
    case DType::i64:
      return static_cast<double>(to_vector<int64_t>()[0]);
    case DType::u8:
      return to_vector<uint8_t>()[0];
  }
  return 0;
}

Tensor Tensor::detach() const {
  Tensor t = *this;
  t.grad_ref = {};
  return t;
}

}  // namespace shoal
