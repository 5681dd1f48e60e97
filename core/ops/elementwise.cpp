#include "core/ops/elementwise.h"

#include "core/autograd/tape.h"

namespace shoal {

namespace {

void check_alike(const char* op, const Tensor& x, const Tensor& y) {
  SHOAL_CHECK(x.shape() == y.shape() && x.dtype() == y.dtype(), op,
              ": expected equal shapes and dtypes, got ", x.dtype(), ' ', x.shape(), " and ", y.dtype(), ' ',
              y.shape());
}

/// Where a result of dy's size may be written: dy itself when nobody else holds it.
Tensor reuse_or_empty(const Tensor& dy) {
  return dy.is_sole_owner() ? dy : Tensor::empty_like(dy);
}

struct AddFunction final : Function {
  const char* name() const override { return "add"; }
  Tensor forward(const Tensor& x, const Tensor& y) {
    check_alike("add", x, y);
    Tensor out = Tensor::empty_like(x);
    add_fwd(x.device(), x, y, out);
    return out;
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override { return {dy[0], dy[0]}; }
};

struct MulFunction final : Function {
  Tensor x_kept, y_kept;
  const char* name() const override { return "mul"; }
  Tensor forward(const Tensor& x, const Tensor& y) {
    check_alike("mul", x, y);
    if (needs_grad(1)) x_kept = x;
    if (needs_grad(0)) y_kept = y;
    Tensor out = Tensor::empty_like(x);
    mul_fwd(x.device(), x, y, out);
    return out;
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    std::vector<Tensor> grads(2);
    for (const int i : {0, 1}) {
      if (!needs_grad(i)) continue;
      grads[static_cast<size_t>(i)] = Tensor::empty_like(dy[0]);
      mul_fwd(dy[0].device(), dy[0], i == 0 ? y_kept : x_kept, grads[static_cast<size_t>(i)]);
    }
    return grads;
  }
};

struct ScaleFunction final : Function {
  double factor = 1;
  explicit ScaleFunction(double f) : factor(f) {}
  const char* name() const override { return "scale"; }
  Tensor forward(const Tensor& x) {
    Tensor out = Tensor::empty_like(x);
    scale_fwd(x.device(), x, factor, out);
    return out;
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    Tensor dx = reuse_or_empty(dy[0]);
    scale_fwd(dx.device(), dy[0], factor, dx);
    return {dx};
  }
};

struct SigmoidFunction final : Function {
  Tensor y_kept;
  const char* name() const override { return "sigmoid"; }
  Tensor forward(const Tensor& x) {
    Tensor y = Tensor::empty_like(x);
    sigmoid_fwd(x.device(), x, y);
    if (needs_grad(0)) y_kept = y;
    return y;
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    Tensor dx = reuse_or_empty(dy[0]);
    sigmoid_bwd(dx.device(), dy[0], y_kept, dx);
    return {dx};
  }
};

struct ScaleRowsFunction final : Function {
  Saved x_kept;
  Tensor scale_kept;
  const char* name() const override { return "scale_rows"; }
  Tensor forward(const Tensor& x, const Tensor& scale) {
    SHOAL_CHECK(scale.numel() == x.num_rows() && scale.dtype() == stats_dtype(x.dtype()),
                "scale_rows: expected ", stats_dtype(x.dtype()), " scales, one for each of the ",
                x.num_rows(), " rows of x ", x.shape(), ", got ", scale.dtype(), ' ', scale.shape());
    x_kept = x;
    scale_kept = scale;
    Tensor out = Tensor::empty_like(x);
    scale_rows_fwd(x.device(), x, scale, out);
    return out;
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    Tensor dx, dscale;
    const Tensor x = x_kept.get();
    if (needs_grad(0)) dx = Tensor::empty_like(x);
    if (needs_grad(1)) dscale = Tensor::empty_like(scale_kept);
    scale_rows_bwd(x.device(), dy[0], x, scale_kept, dx, dscale);
    return {dx, dscale};
  }
};

struct SumFunction final : Function {
  Shape x_shape;
  const char* name() const override { return "sum"; }
  Tensor forward(const Tensor& x) {
    x_shape = x.shape();
    Tensor out = Tensor::empty({}, x.dtype(), x.device());
    sum_fwd(x.device(), x, out);
    return out;
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    Tensor dx = Tensor::empty(x_shape, dy[0].dtype(), dy[0].device());
    fill(dx.device(), dx, 1);
    scale_by(dx.device(), dx, dy[0]);
    return {dx};
  }
};

struct CastFunction final : Function {
  DType from = DType::f32, to = DType::f32;
  CastFunction(DType from_dtype, DType to_dtype) : from(from_dtype), to(to_dtype) {}
  const char* name() const override { return "cast"; }
  static Tensor convert(const Tensor& x, DType dtype) {
    Tensor out = Tensor::empty(x.shape(), dtype, x.device());
    cast_fwd(x.device(), x, out);
    return out;
  }
  Tensor forward(const Tensor& x) { return convert(x, to); }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override { return {convert(dy[0], from)}; }
};

}  // namespace

Tensor add(const Tensor& x, const Tensor& y) {
  return apply(AddFunction{}, x, y);
}
Tensor mul(const Tensor& x, const Tensor& y) {
  return apply(MulFunction{}, x, y);
}
Tensor scale(const Tensor& x, double factor) {
  return apply(ScaleFunction(factor), x);
}
Tensor sigmoid(const Tensor& x) {
  return apply(SigmoidFunction{}, x);
}
Tensor scale_rows(const Tensor& x_TD, const Tensor& scale_T) {
  return apply(ScaleRowsFunction{}, x_TD, scale_T);
}
Tensor sum(const Tensor& x) {
  return apply(SumFunction{}, x);
}
double sum_squares(const Tensor& x) {
  const Tensor sum = Tensor::zeros({}, DType::f64, x.device());
  add_squares(x.device(), x, sum);
  return sum.item();
}
bool all_finite(const Tensor& x) {
  const Tensor count = Tensor::zeros({}, DType::i64, x.device());
  count_not_finite(x.device(), x, count);
  return count.item() == 0;
}
Tensor cast(const Tensor& x, DType dtype) {
  Tensor y = apply(CastFunction(x.dtype(), dtype), x);
  // A wider copy says nothing new: it is not worth keeping beside x.
  if (dtype_size(dtype) <= dtype_size(x.dtype())) return y;
  return with_recipe(std::move(y), x,
                     [dtype](const Tensor& from) { return CastFunction::convert(from, dtype); });
}

}  // namespace shoal
