// Tensor: a value handle on row-major contiguous device memory. Copying a Tensor shares storage; clone()
// copies bytes. There are no strides: a transpose is an argument of matmul, a copy is an explicit call.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/tensor/storage.h"
#include "core/tensor/types.h"

namespace shoal {

struct Leaf;
class Recipe;

/// Where the gradient of a tensor goes: a leaf (parameter), a slot of a tape, or nowhere (see
/// autograd/tape.h).
struct GradRef {
  Leaf* leaf = nullptr;
  uint64_t tape = 0;
  int32_t slot = -1;
  explicit operator bool() const { return leaf != nullptr || slot >= 0; }
};

class Tensor {
 public:
  Tensor() = default;  // undefined
  static Tensor empty(const Shape& shape, DType dtype, Device device = {});
  static Tensor zeros(const Shape& shape, DType dtype, Device device = {});
  static Tensor empty_like(const Tensor& other) {
    return empty(other.shape(), other.dtype(), other.device());
  }
  static Tensor zeros_like(const Tensor& other) {
    return zeros(other.shape(), other.dtype(), other.device());
  }
  /// The elements that lie at `data`, in memory that `owner` keeps.
  static Tensor over(std::shared_ptr<void> owner, void* data, const Shape& shape, DType dtype);
  /// Copies host values (T matches the dtype) into a new tensor.
  template <class T>
  static Tensor from(const std::vector<T>& values, const Shape& shape, Device device = {}) {
    return from_host(values.data(), static_cast<int64_t>(values.size()), dtype_of<T>, shape, device);
  }

  bool defined() const { return storage_ != nullptr; }
  explicit operator bool() const { return defined(); }
  const Shape& shape() const { return shape_; }
  int dims() const { return shape_.dims(); }
  int64_t size(int dim) const { return shape_[dim]; }  // negative dim counts from the end
  int64_t numel() const { return shape_.numel(); }
  int64_t num_bytes() const { return numel() * dtype_size(dtype_); }
  /// All dimensions but the last, multiplied; 1 for a scalar.
  int64_t num_rows() const;
  /// Size of the last dimension; 1 for a scalar.
  int64_t row_size() const { return dims() == 0 ? 1 : size(-1); }
  DType dtype() const { return dtype_; }
  Device device() const { return storage_ ? storage_->device() : Device{}; }

  /// The elements; T must match dtype(). Constness is of the handle, not of the memory: a kernel writes into
  /// the outputs it is given.
  template <class T>
  T* data() const {
    check_dtype(dtype_of<T>);
    return reinterpret_cast<T*>(bytes());
  }
  std::byte* bytes() const;

  /// Other shape, same elements, shared storage.
  Tensor view(const Shape& shape) const;
  /// Rows [begin, end) of the first dimension, shared storage.
  Tensor rows(int64_t begin, int64_t end) const;
  /// `count` elements from element `offset` as a flat tensor, shared storage.
  Tensor flat(int64_t offset, int64_t count) const;
  Tensor clone() const;
  Tensor to(Device device) const;             // this tensor itself when it is there already
  void copy_from(const Tensor& other) const;  // same numel and dtype; any devices
  void set_zero() const;
  /// Work of `stream`, other than the one that was current when this was made, uses it: its memory is not
  /// used again before that is done. To be called after that work was given to the stream and before the last
  /// tensor of this storage is gone. Cheap when it is the same stream, and on the cpu.
  void used_on(const Stream& stream) const;
  /// The memory of all tensors that share this storage goes back to the device; the values are lost, and to
  /// read or write one of them is an Error until allocate_memory(). Shapes stay. Not of tensors made by
  /// over().
  void release_memory() const { storage_->release(); }
  /// Other, uninitialised memory for all of them.
  void allocate_memory() const { storage_->allocate(); }
  bool has_memory() const { return storage_ != nullptr && storage_->data() != nullptr; }
  /// No other tensor shares this storage, so it may be overwritten in place.
  bool is_sole_owner() const { return storage_.use_count() == 1; }

  /// Host copies of the elements.
  template <class T>
  std::vector<T> to_vector() const {
    check_dtype(dtype_of<T>);
    std::vector<T> out(static_cast<size_t>(numel()));
    to_host(out.data());
    return out;
  }
  /// The single element of a tensor with numel() == 1, converted to double.
  double item() const;

  GradRef grad_ref;                // set by autograd
  std::shared_ptr<Recipe> recipe;  // how it can be made again instead of being kept (autograd/saved.h)
  bool requires_grad() const { return static_cast<bool>(grad_ref); }
  Tensor detach() const;

 private:
  static Tensor from_host(const void* values, int64_t count, DType dtype, const Shape& shape, Device device);
  void check_dtype(DType wanted) const;
  void to_host(void* out) const;

  std::shared_ptr<Storage> storage_;
  Shape shape_;
  int64_t offset_bytes_ = 0;
  DType dtype_ = DType::f32;
};

}  // namespace shoal
