#include "launch/checkpoint_box.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace shoal {

namespace {

// Pieces that cut one dimension only (the usual case) are checked in sorted order instead of pairwise.
// Returns that dimension; -1: whole pieces only; -2: the pieces cut several dimensions.
int cut_dim(const Shape& shape, const std::vector<Box>& pieces) {
  int cut = -1;
  for (const Box& piece : pieces)
    for (int d = 0; d < shape.dims(); d++) {
      if (piece.extent[d] == shape[d] || d == cut) continue;
      if (cut >= 0) return -2;
      cut = d;
    }
  return cut;
}

std::string sorted_problem(const Shape& shape, const std::vector<Box>& pieces, int dim) {
  std::vector<const Box*> order;
  for (const Box& piece : pieces) order.push_back(&piece);
  std::sort(order.begin(), order.end(), [dim](const Box* a, const Box* b) {
    return std::pair(a->start[dim], a->extent[dim]) < std::pair(b->start[dim], b->extent[dim]);
  });
  int64_t end = 0;
  for (const Box* piece : order) {
    const int64_t begin = piece->start[dim];
    if (begin > end) return str("rows [", end, ", ", begin, ") of dimension ", dim, " are missing");
    if (begin < end)
      return str("rows [", begin, ", ", std::min(end, begin + piece->extent[dim]), ") of dimension ", dim,
                 " are stored twice");
    end += piece->extent[dim];
  }
  if (end < shape[dim]) return str("rows [", end, ", ", shape[dim], ") of dimension ", dim, " are missing");
  return "";
}

std::string pairwise_problem(const Shape& shape, const std::vector<Box>& pieces) {
  int64_t covered = 0;
  for (size_t i = 0; i < pieces.size(); i++) {
    for (size_t j = 0; j < i; j++)
      if (const auto common = intersect(pieces[i], pieces[j]))
        return str("elements ", box_text(*common), " are stored twice");
    covered += pieces[i].numel();
  }
  if (covered < shape.numel())
    return str(shape.numel() - covered, " of ", shape.numel(), " elements are missing");
  return "";
}

}  // namespace

std::string box_text(const Box& box) {
  return str(box.start, " + ", box.extent);
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  Box common = a;
  for (int d = 0; d < a.extent.dims(); d++) {
    const int64_t begin = std::max(a.start[d], b.start[d]);
    const int64_t end = std::min(a.start[d] + a.extent[d], b.start[d] + b.extent[d]);
    if (begin >= end) return std::nullopt;
    common.start.set(d, begin);
    common.extent.set(d, end - begin);
  }
  return common;
}

std::string coverage_problem(const Shape& shape, const std::vector<Box>& pieces) {
  for (const Box& piece : pieces) {
    bool inside = piece.start.dims() == shape.dims() && piece.extent.dims() == shape.dims();
    for (int d = 0; inside && d < shape.dims(); d++)
      inside = piece.extent[d] <= shape[d] && piece.start[d] <= shape[d] - piece.extent[d];
    if (!inside) return str("piece ", box_text(piece), " is outside of shape ", shape);
  }
  if (shape.numel() == 0) return "";
  std::vector<Box> filled;
  for (const Box& piece : pieces)
    if (piece.numel() > 0) filled.push_back(piece);
  if (filled.empty()) return "all elements are missing";
  const int cut = cut_dim(shape, filled);
  if (cut == -1) return filled.size() == 1 ? "" : str("all elements are stored ", filled.size(), " times");
  return cut >= 0 ? sorted_problem(shape, filled, cut) : pairwise_problem(shape, filled);
}

void for_each_run(const Box& part, const Box& a, const Box& b,
                  const std::function<void(int64_t, int64_t, int64_t)>& run) {
  const int dims = part.extent.dims();
  if (part.numel() == 0) return;
  // Dimensions from `inner` on form one run: all behind `inner` are whole in both buffers.
  int inner = dims;
  int64_t count = 1;
  while (inner > 0) {
    inner--;
    count *= part.extent[inner];
    if (part.extent[inner] != a.extent[inner] || part.extent[inner] != b.extent[inner]) break;
  }
  std::array<int64_t, Shape::kMaxDims> stride_a{}, stride_b{}, index{};
  int64_t offset_a = 0, offset_b = 0;
  for (int64_t d = dims - 1, step_a = 1, step_b = 1; d >= 0; d--) {
    const int dim = static_cast<int>(d);
    stride_a[d] = step_a;
    stride_b[d] = step_b;
    step_a *= a.extent[dim];
    step_b *= b.extent[dim];
    offset_a += (part.start[dim] - a.start[dim]) * stride_a[d];
    offset_b += (part.start[dim] - b.start[dim]) * stride_b[d];
  }
  for (;;) {
    run(offset_a, offset_b, count);
    int d = inner - 1;
    for (; d >= 0; d--) {
      offset_a += stride_a[d];
      offset_b += stride_b[d];
      if (++index[d] < part.extent[d]) break;
      offset_a -= index[d] * stride_a[d];
      offset_b -= index[d] * stride_b[d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

}  // namespace shoal
