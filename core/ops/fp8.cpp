#include "core/ops/fp8.h"

namespace shoal {

namespace {

/// Adds a matrix behind those that are there already.
void append(Fp8Operand& to, int64_t outer, int64_t sum) {
  Fp8Matrix next{outer, sum, 0, 0};
  if (!to.matrices.empty()) {
    const Fp8Matrix& last = to.matrices.back();
    next.codes = last.codes + last.outer * last.sum;
    next.scales = last.scales + fp8_num_scales(to.kind, last.outer, last.sum);
  }
  to.matrices.push_back(next);
}

/// spare: codes behind the last matrix, which are zeros.
void allocate(Fp8Operand& operand, int64_t spare, Device device) {
  append(operand, 0, 0);
  const Fp8Matrix end = operand.matrices.back();
  operand.matrices.pop_back();
  operand.codes = Tensor::empty({end.codes + spare}, DType::u8, device);
  if (spare > 0) operand.codes.flat(end.codes, spare).set_zero();
  // Not every place has a block: the others are 0.
  operand.scales = operand.kind == Fp8Scales::block ? Tensor::zeros({end.scales}, DType::f32, device)
                                                    : Tensor::empty({end.scales}, DType::f32, device);
}

}  // namespace

const char* fp8_name(Fp8Format format) {
  return format == Fp8Format::e4m3 ? "e4m3" : "e5m2";
}

Fp8Operand fp8_along_rows(std::span<const int64_t> rows, int64_t columns, Fp8Format format, Fp8Scales kind,
                          Device device) {
  Fp8Operand operand;
  operand.format = format;
  operand.kind = kind;
  for (const int64_t count : rows) append(operand, count, columns);
  allocate(operand, kind == Fp8Scales::vector ? 3 * columns : 0, device);
  return operand;
}

Fp8Operand fp8_along_columns(std::span<const int64_t> rows, int64_t columns, Fp8Format format, Fp8Scales kind,
                             int64_t pad, Device device) {
  Fp8Operand operand;
  operand.format = format;
  operand.kind = kind;
  operand.pad = pad;
  for (const int64_t count : rows) append(operand, columns, fp8_round_up(count, pad));
  allocate(operand, 0, device);
  return operand;
}

}  // namespace shoal
