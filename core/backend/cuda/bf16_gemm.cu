// CUDA kernels that make bf16 copies of weights for products (core/ops/bf16_linear.h): the elements in their
// order, because cuBLAS and our own kernels read a matrix and its transpose equally well. One copy serves
// both uses. The products are in cublas_linear.cpp.
#include "core/backend/cuda/map.h"
#include "core/ops/bf16_linear.h"

namespace shoal::cuda {
namespace {

bool packs_in_order_impl(const Shape&) {
  return true;
}

int64_t packed_size_impl(int64_t groups, int64_t outputs, int64_t inputs) {
  return groups * outputs * inputs;
}

struct Round {
  static constexpr int kPack = cuda::kPack<BFloat16>;
  const float* from;
  BFloat16* to;
  template <int N>
  SHOAL_DEVICE void at(int64_t i) const {
    store<N>(to + i, load<N>(from + i));
  }
};

void pack_rows_impl(const Tensor& weight, const PackedWeight& to, int64_t first_row, int64_t last_row) {
  const char* where = "pack_rows";
  SHOAL_CHECK(weight.numel() == to.shape.numel(), where, ": copies of a weight ", to.shape,
              " do not fit a weight ", weight.shape());
  const int64_t width = to.shape[-1], num_rows = width == 0 ? 0 : weight.numel() / width;
  SHOAL_CHECK(0 <= first_row && first_row <= last_row && (last_row <= num_rows || width == 0), where,
              ": rows [", first_row, ", ", last_row, ") are not among the ", num_rows, " of ", to.shape);
  const Tensor* done = nullptr;
  for (const Tensor* copy : {&to.forward, &to.backward}) {
    if (!*copy || (done != nullptr && done->bytes() == copy->bytes())) continue;
    SHOAL_CHECK(copy->numel() == weight.numel(), where, ": a copy of a weight ", weight.shape(), " has ",
                weight.numel(), " elements, got ", copy->numel());
    const Round body{weight.data<float>() + first_row * width, copy->data<BFloat16>() + first_row * width};
    map(weight.device(), (last_row - first_row) * width, all_aligned({body.from, body.to}), body);
    done = copy;
  }
}

[[maybe_unused]] const bool added[] = {
    packs_in_order.add(DeviceType::cuda, &packs_in_order_impl),
    packed_size.add(DeviceType::cuda, &packed_size_impl),
    pack_rows.add(DeviceType::cuda, &pack_rows_impl),
};

}  // namespace
}  // namespace shoal::cuda
