#include "core/ops/rows.h"

#include <utility>

#include "core/autograd/tape.h"

namespace shoal {

namespace {

class TakeRows final : public Function {
 public:
  TakeRows(int64_t begin, int64_t end) : begin_(begin), end_(end) {}
  const char* name() const override { return "take_rows"; }

  Tensor forward(const Tensor& x) {
    SHOAL_CHECK(x.dims() >= 1 && begin_ >= 0 && begin_ <= end_ && end_ <= x.size(0), "take_rows: rows [",
                begin_, ", ", end_, ") of ", x.shape());
    shape_ = x.shape();
    return x.detach().rows(begin_, end_).clone();
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    const Tensor dx = Tensor::zeros(shape_, dy[0].dtype(), dy[0].device());
    dx.rows(begin_, end_).copy_from(dy[0]);
    return {dx};
  }

 private:
  int64_t begin_, end_;
  Shape shape_;
};

class TakeColumns final : public Function {
 public:
  explicit TakeColumns(std::vector<ColumnRange> ranges) : ranges_(std::move(ranges)) {}
  const char* name() const override { return "take_columns"; }

  Tensor forward(const Tensor& x) {
    shape_ = x.shape();
    int64_t width = 0;
    for (const ColumnRange& r : ranges_) {
      SHOAL_CHECK(r.begin >= 0 && r.begin <= r.end && r.end <= x.row_size(), "take_columns: columns [",
                  r.begin, ", ", r.end, ") of ", x.shape());
      width += r.end - r.begin;
    }
    const Tensor y = Tensor::empty({x.num_rows(), width}, x.dtype(), x.device());
    copy([&](const ColumnRange& r, int64_t at) {
      copy_columns(x.device(), CopyColumns{x, y, r.begin, at, r.end - r.begin});
    });
    return y;
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    const Tensor dx = Tensor::zeros(shape_, dy[0].dtype(), dy[0].device());
    copy([&](const ColumnRange& r, int64_t at) {
      copy_columns(dx.device(), CopyColumns{dy[0], dx, at, r.begin, r.end - r.begin});
    });
    return {dx};
  }

 private:
  template <class Each>
  void copy(const Each& each) const {
    int64_t at = 0;
    for (const ColumnRange& r : ranges_) {
      each(r, at);
      at += r.end - r.begin;
    }
  }
  std::vector<ColumnRange> ranges_;
  Shape shape_;
};

}  // namespace

Tensor take_columns(const Tensor& x, const std::vector<ColumnRange>& ranges) {
  return apply(TakeColumns(ranges), x);
}

Tensor take_rows(const Tensor& x, int64_t begin, int64_t end) {
  return apply(TakeRows(begin, end), x);
}

}  // namespace shoal
