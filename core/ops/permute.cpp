#include "core/ops/permute.h"

#include "core/autograd/tape.h"

namespace shoal {

namespace {

void check_rows(const char* op, const Tensor& x) {
  SHOAL_CHECK(x.dims() == 2, op, ": expected rows [N, D], got shape ", x.shape());
}

void check_index(const char* op, const char* what, const Tensor& index, int64_t count) {
  SHOAL_CHECK(index.dtype() == DType::i64 && index.numel() == count, op, ": expected ", count,
              " i64 values of ", what, ", got ", index.dtype(), ' ', index.shape());
}

Tensor gather(const Tensor& x, const Tensor& index) {
  Tensor y = Tensor::empty({index.numel(), x.size(1)}, x.dtype(), x.device());
  gather_rows_fwd(x.device(), x, index, y);
  return y;
}

class GatherRowsFunction final : public Function {
 public:
  GatherRowsFunction(Tensor row_N, Tensor slots_TK)
      : row_N_(std::move(row_N)), slots_TK_(std::move(slots_TK)) {}
  const char* name() const override { return "gather_rows"; }

  Tensor forward(const Tensor& x) {
    check_rows(name(), x);
    SHOAL_CHECK(slots_TK_.dims() == 2 && slots_TK_.size(0) == x.size(0), name(),
                ": expected slots [T, K] for the ", x.size(0), " rows of x, got shape ", slots_TK_.shape());
    check_index(name(), "slots_TK", slots_TK_, slots_TK_.numel());
    check_index(name(), "row_N", row_N_, row_N_.numel());
    x_shape_ = x.shape();
    return gather(x, row_N_);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    Tensor dx = Tensor::empty(x_shape_, dy[0].dtype(), dy[0].device());
    combine_rows_fwd(dx.device(), dy[0], Tensor{}, slots_TK_, dx);
    return {dx};
  }

 private:
  Tensor row_N_, slots_TK_;
  Shape x_shape_;
};

class CombineRowsFunction final : public Function {
 public:
  CombineRowsFunction(Tensor slots_TK, Tensor row_N, Tensor choice_N)
      : slots_TK_(std::move(slots_TK)), row_N_(std::move(row_N)), choice_N_(std::move(choice_N)) {}
  const char* name() const override { return "combine_rows"; }

  Tensor forward(const Tensor& x, const Tensor& weights) {
    check_rows(name(), x);
    SHOAL_CHECK(slots_TK_.dims() == 2, name(), ": expected slots [T, K], got shape ", slots_TK_.shape());
    check_index(name(), "slots_TK", slots_TK_, slots_TK_.numel());
    check_index(name(), "row_N", row_N_, x.size(0));
    check_index(name(), "choice_N", choice_N_, x.size(0));
    SHOAL_CHECK(!weights.defined() || weights.numel() == slots_TK_.numel(), name(),
                ": expected weights like slots ", slots_TK_.shape(), ", got ", weights.shape());
    if (needs_grad(1)) x_ = x;
    x_shape_ = x.shape();
    weights_TK_ = weights;
    Tensor y = Tensor::empty({slots_TK_.size(0), x.size(1)}, x.dtype(), x.device());
    combine_rows_fwd(x.device(), x, weights, slots_TK_, y);
    return y;
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grad_outputs) override {
    const Tensor& dy = grad_outputs[0];
    const bool reuse = x_.is_sole_owner();  // asked before args shares it
    CombineBackward args{dy, x_, weights_TK_, slots_TK_, row_N_, choice_N_, {}, {}};
    if (needs_grad(0)) args.dx_ND = reuse ? x_ : Tensor::empty(x_shape_, dy.dtype(), dy.device());
    if (needs_grad(1)) args.dweights_TK = Tensor::empty_like(weights_TK_);
    if (!x_.defined()) args.x_ND = args.dx_ND;  // only its shape is read
    combine_rows_bwd(dy.device(), args);
    return {args.dx_ND, args.dweights_TK};
  }

 private:
  Tensor slots_TK_, row_N_, choice_N_, x_, weights_TK_;
  Shape x_shape_;
};

class PermuteRowsFunction final : public Function {
 public:
  PermuteRowsFunction(Tensor index_N, Tensor inverse_N)
      : index_N_(std::move(index_N)), inverse_N_(std::move(inverse_N)) {}
  const char* name() const override { return "permute_rows"; }

  Tensor forward(const Tensor& x) {
    check_rows(name(), x);
    check_index(name(), "index_N", index_N_, x.size(0));
    check_index(name(), "inverse_N", inverse_N_, x.size(0));
    return gather(x, index_N_);
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override { return {gather(dy[0], inverse_N_)}; }

 private:
  Tensor index_N_, inverse_N_;
};

}  // namespace

Tensor gather_rows(const Tensor& x_TD, const Tensor& row_N, const Tensor& slots_TK) {
  // Copies of rows are not worth keeping beside the rows.
  return with_recipe(apply(GatherRowsFunction(row_N, slots_TK), x_TD), x_TD,
                     [row_N](const Tensor& x) { return gather(x, row_N); });
}

Tensor combine_rows(const Tensor& x_ND, const Tensor& weights_TK, const Tensor& slots_TK, const Tensor& row_N,
                    const Tensor& choice_N) {
  return apply(CombineRowsFunction(slots_TK, row_N, choice_N), x_ND, weights_TK);
}

Tensor permute_rows(const Tensor& x_ND, const Tensor& index_N, const Tensor& inverse_N) {
  return apply(PermuteRowsFunction(index_N, inverse_N), x_ND);
}

}  // namespace shoal
