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

// What a box covers of the row-major elements of a tensor, when these are neighbours.
std::optional<ShardRange> flat_range(const Shape& shape, const Box& box) {
  int64_t begin = 0;
  bool is_inner = true;  // dimensions from here on are whole
  int64_t stride = 1;
  for (int d = shape.dims() - 1; d >= 0; d--) {
    if (!is_inner && box.extent[d] != 1) return std::nullopt;
    is_inner = is_inner && box.extent[d] == shape[d];
    begin += box.start[d] * stride;
    stride *= shape[d];
  }
  return ShardRange{begin, begin + box.numel()};
}

// The same for pieces of flat memory, which are many where optimizer state is sharded.
std::optional<std::string> flat_problem(const Shape& shape, const std::vector<Box>& pieces) {
  std::vector<ShardRange> order;
  for (const Box& piece : pieces) {
    const std::optional<ShardRange> range = flat_range(shape, piece);
    if (!range) return std::nullopt;
    order.push_back(*range);
  }
  std::ranges::sort(order, {}, &ShardRange::begin);
  int64_t end = 0;
  for (const ShardRange& range : order) {
    if (range.begin != end)
      return str("elements [", std::min(end, range.begin), ", ", std::max(end, range.begin),
                 ") of its row-major order are ", range.begin > end ? "missing" : "stored twice");
    end = range.end;
  }
  if (end < shape.numel())
    return str("elements [", end, ", ", shape.numel(), ") of its row-major order are missing");
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
  if (cut >= 0) return sorted_problem(shape, filled, cut);
  const std::optional<std::string> problem = flat_problem(shape, filled);
  return problem ? *problem : pairwise_problem(shape, filled);
}

namespace {

// Appends the boxes of [begin, end) of the elements of `box` in dimensions >= dim; those before are single.
void add_boxes(const Box& box, int dim, int64_t begin, int64_t end, std::vector<Box>& out) {
  if (begin >= end) return;
  int64_t stride = 1;
  for (int d = dim + 1; d < box.extent.dims(); d++) stride *= box.extent[d];
  const auto slice = [&](int64_t from, int64_t to) {
    Box part = box;
    part.start.set(dim, box.start[dim] + from);
    part.extent.set(dim, to - from);
    return part;
  };
  int64_t first = begin / stride;
  const int64_t last = end / stride, head = begin % stride, tail = end % stride;
  if (head > 0) {
    const bool inside = first == last;  // of one slice
    add_boxes(slice(first, first + 1), dim + 1, head, inside ? tail : stride, out);
    if (inside) return;
    first++;
  }
  if (first < last) out.push_back(slice(first, last));
  if (tail > 0) add_boxes(slice(last, last + 1), dim + 1, 0, tail, out);
}

}  // namespace

std::vector<Box> boxes_of_range(const Box& box, ShardRange range) {
  std::vector<Box> out;
  if (box.extent.dims() > 0) {
    add_boxes(box, 0, range.begin, range.end, out);
  } else if (range.begin < range.end) {
    out.push_back(box);
  }
  return out;
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
