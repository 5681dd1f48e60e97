// Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): the momentum of a matrix, with all its
// singular values moved to about 1. Its size is that of AdamW's updates (Moonlight, arXiv:2502.16982), so
// that learning rates and weight decay serve both: embeddings, head, routers, norms and biases are updated by
// AdamW.
#include <algorithm>
#include <cmath>

#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "core/ops/optimizer.h"
#include "optim/optimizer.h"

namespace shoal {

namespace {

struct MuonOptions final : Options {
  double momentum = 0.95;
  bool nesterov = true;
  int64_t iterations = 5;
  std::string scale = "adamw";
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  DecayRule decay;
  void fields(FieldVisitor& v) override {
    v("momentum", momentum, "decay of the momentum of matrices", in_range(0, 0.999999));
    v("nesterov", nesterov, "look one step of momentum ahead");
    v("iterations", iterations, "steps of the Newton-Schulz iteration", in_range(1, 100));
    v("scale", scale,
      "size of a matrix' update: adamw, the root mean square that AdamW's updates have (0.2 sqrt(max(rows, "
      "columns)) "
      "times the orthogonal matrix), or spectral (sqrt(max(1, rows / columns)) times)",
      one_of({"adamw", "spectral"}));
    v("beta1", beta1, "AdamW, for what is no matrix: decay of the first moment", in_range(0, 0.999999));
    v("beta2", beta2, "the same: decay of the second moment", in_range(0, 0.99999999));
    v("eps", eps, "the same: added to the root of the second moment", in_range(kMinFactor, 1));
    decay.fields(v);
  }
};

/// A parameter as a stack of matrices of equal size.
struct Stack {
  int64_t count = 1, rows = 1, columns = 1;
  explicit Stack(const Parameter& p) {
    const Shape& shape = p.value.shape();
    for (int d = 0; d < shape.dims(); d++) {
      int64_t& part = d < p.stacked_dims ? count : d < shape.dims() - p.column_dims ? rows : columns;
      part *= shape[d];
    }
  }
  int64_t numel() const { return rows * columns; }
};

void require_whole(const Parameter& p) {
  bool whole = !p.piece;
  const int first = p.placement.grid == Grid::expert ? 1 : 0;  // experts are matrices of their own
  for (int d = first; d < p.global_shape.dims() && p.held; d++)
    whole = whole && p.box.extent[d] == p.global_shape[d];
  if (whole) return;
  throw Error(str("muon: expected whole matrices, but this rank ", p.piece ? "updates a piece" : "has a part",
                  " of ", p.name, "; resolve_layout must refuse such layouts"));
}

/// x_SRC, matrices with a Frobenius norm of at most 1, becomes nearly orthogonal: U S V^T -> U S' V^T with S'
/// near 1, by the quintic Newton-Schulz iteration with the coefficients of Jordan et al. Products run over
/// the smaller of rows and columns. `y` has the size of x; the result is in x.
void orthogonalize(Tensor& x, Tensor& y, int64_t count, int64_t rows, int64_t columns, int64_t iterations) {
  constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
  const Device device = x.device();
  const int64_t side = std::min(rows, columns);
  const std::vector<int64_t> rows_each(static_cast<size_t>(count), rows),
      sides(static_cast<size_t>(count), side);
  const Tensor gram = Tensor::empty({count, side, side}, x.dtype(), device),
               squared = Tensor::empty_like(gram);
  const Shape flat{count * rows, columns}, stacked{count, rows, columns}, flat_gram{count * side, side};
  for (int64_t i = 0; i < iterations; i++) {
    if (rows <= columns) {
      grouped_gemm_rows(device, Gemm{.transpose_b = true}, x.view(flat), x.view(stacked),
                        gram.view(flat_gram), rows_each);
    } else {
      grouped_gemm_reduce(device, Gemm{}, x.view(flat), x.view(flat), gram, rows_each);
    }
    grouped_gemm_rows(device, Gemm{}, gram.view(flat_gram), gram, squared.view(flat_gram), sides);
    axpby(device, kB, gram, kC, squared, gram);
    scale_fwd(device, x, kA, y);
    const Gemm add{.accumulate = true};
    if (rows <= columns) {
      grouped_gemm_rows(device, add, gram.view(flat_gram), x.view(stacked), y.view(flat), sides);
    } else {
      grouped_gemm_rows(device, add, x.view(flat), gram, y.view(flat), rows_each);
    }
    std::swap(x, y);
  }
}

class Muon final : public Optimizer {
 public:
  Muon(const MuonOptions& options, const std::vector<Parameter*>& params)
      : Optimizer(params), options_(options) {
    for (const Parameter* p : params) {
      if (is_matrix(p->kind)) require_whole(*p);
      m_.push_back(make_state(*p));
      v_.push_back(is_matrix(p->kind) ? Tensor{} : make_state(*p));
    }
  }
  void visit_state(const StateVisitor& visit) override {
    for (size_t i = 0; i < m_.size(); i++) {
      visit("m", *parameters()[i], m_[i]);
      if (v_[i].defined()) visit("v", *parameters()[i], v_[i]);
    }
  }
  int64_t state_bytes_per_element(ParamKind kind) const override { return is_matrix(kind) ? 4 : 8; }
  bool needs_whole_matrices() const override { return true; }

 protected:
  void update(const Block& block, double learning_rate, double grad_scale) override {
    const auto t = static_cast<double>(num_steps());
    const Parameter& p = *parameters()[block.index];
    adamw_step(p.value.device(),
               AdamwStep{block.of(p.own_value()), block.of(p.own_grad()), block.of(m_[block.index]),
                         block.of(v_[block.index]), learning_rate, options_.beta1, options_.beta2,
                         options_.eps, options_.decay.of(p), 1 - std::pow(options_.beta1, t),
                         1 - std::pow(options_.beta2, t), grad_scale});
  }

  bool updates_whole(size_t index) const override { return is_matrix(parameters()[index]->kind); }

  void update_whole(size_t index, double learning_rate, double grad_scale) override {
    // As many matrices at a time as keep the scratch memory small.
    constexpr int64_t kMostElements = int64_t{1} << 24;
    const Parameter& p = *parameters()[index];
    const Stack stack(p);
    if (p.value.numel() == 0) return;
    const int64_t most = std::max<int64_t>(1, kMostElements / stack.numel());
    for (int64_t first = 0; first < stack.count; first += most) {
      const int64_t count = std::min(most, stack.count - first);
      const auto some = [&](const Tensor& t) { return t.flat(first * stack.numel(), count * stack.numel()); };
      update_matrices(some(p.own_value()), some(p.own_grad()), some(m_[index]), count, stack,
                      {learning_rate, grad_scale, options_.decay.of(p)});
    }
  }

 private:
  struct Rates {
    double learning_rate, grad_scale, weight_decay;
  };
  static bool is_matrix(ParamKind kind) { return kind == ParamKind::matrix; }

  void update_matrices(const Tensor& value, const Tensor& grad, const Tensor& m, int64_t count,
                       const Stack& stack, const Rates& rates) const {
    const Device device = value.device();
    axpby(device, options_.momentum, m, rates.grad_scale, grad, m);
    Tensor x = Tensor::empty({count, stack.numel()}, m.dtype(), device), y = Tensor::empty_like(x);
    if (options_.nesterov) {
      axpby(device, options_.momentum, m, rates.grad_scale, grad, x);
    } else {
      x.copy_from(m);
    }
    const Tensor norms = Tensor::empty({count}, m.dtype(), device);
    inverse_row_norms(device, x, kSmallest, norms);
    scale_rows_fwd(device, x, norms, x);
    orthogonalize(x, y, count, stack.rows, stack.columns, options_.iterations);
    axpby(device, 1 - rates.learning_rate * rates.weight_decay, value, -rates.learning_rate * scale_of(stack),
          x, value);
  }

  double scale_of(const Stack& stack) const {
    const auto rows = static_cast<double>(stack.rows), columns = static_cast<double>(stack.columns);
    if (options_.scale == "adamw") return 0.2 * std::sqrt(std::max(rows, columns));
    return std::sqrt(std::max(1.0, rows / columns));
  }

  static constexpr double kSmallest = 1e-7;  // a gradient of zeros stays one
  MuonOptions options_;
  std::vector<Tensor> m_, v_;  // v_: undefined for matrices
};

const bool registered = OptimizerRegistry::add<MuonOptions>(
    "muon", "orthogonal updates of matrices (Jordan et al. 2024, arXiv:2502.16982), AdamW for the rest",
    [](const MuonOptions& o, const std::vector<Parameter*>& params) {
      return std::make_unique<Muon>(o, params);
    });

}  // namespace

}  // namespace shoal
