// The MoE layer: router -> dispatch -> experts -> combine, with the shared expert computed while rows are on
// their way.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/nn/weight_unit.h"
#include "core/ops/fp8_linear.h"
#include "core/ops/routing.h"
#include "models/ffn.h"
#include "models/moe/router.h"
#include "parallel/moe/dispatcher.h"
#include "parallel/moe/expert_split.h"

namespace shoal {

/// The `moe:` section of a transformer config.
struct MoeOptions {
  int64_t num_experts = 0, top_k = 2;
  AutoInt hidden;
  int64_t shared_experts = 0;
  AutoInt shared_hidden;
  bool shared_gate = false;
  int64_t first_dense = 0, every = 1;
  std::vector<int64_t> layers;
  double capacity_factor = 0;
  std::string drop_policy = "position";
  std::string capacity_scope = "sequence";
  bool pad_to_capacity = false;
  std::string expert_precision = "same";
  Choice router{"top_k", nullptr};
  void fields(FieldVisitor& v);
  bool is_moe_layer(int64_t layer) const;
  int64_t router_params(int64_t hidden_size) const;  // of one layer
  std::optional<Fp8Scaling> fp8() const;             // of the experts' products, when they are fp8
};

struct MoeShape {
  int64_t hidden_size = 0, expert_hidden = 0, shared_hidden = 0;  // D, F, 0: no shared expert
  bool bias = false;
  double init_std = 0.02, output_init_std = 0.02;
  int64_t layer = 0, num_moe_layers = 1;
  Recompute recompute;
  std::optional<Fp8Scaling> fp8 = {};  // of the routed experts
};

/// The experts of this rank: e of E, weights stacked along the first dimension and cut over ep; the width of
/// each is cut over etp.
class Experts final : public Module {
 public:
  /// `etp`: the group that holds other parts of the same experts; must outlive this.
  Experts(const MoeShape& shape, int64_t num_experts, const Choice& activation, Communicator& etp,
          const BuildContext& context);
  /// The result of the rows that were dispatched to this rank. Collective over etp.
  Tensor forward(const Dispatched& rows) const;
  /// Begun and ended by the layer, around its calls of forward().
  WeightUnit& unit() { return unit_; }

 private:
  /// How rows lie: sorted by local expert, and by their source within each.
  struct Rows {
    std::vector<int64_t> per_expert, per_source;
  };
  /// Rows times the matrices of a weight, in the experts' precision.
  Tensor project(const Tensor& x, const Tensor& weight, const Rows& rows, const Tensor& bias,
                 const std::shared_ptr<Fp8Weight>& fp8) const;

  /// Rows through the part of the experts that this rank holds.
  Tensor forward_part(const Tensor& x_RD, const Rows& rows, const Tensor& bias) const;
  Tensor add_expert_bias(const Tensor& y_RD, const std::vector<int64_t>& rows_per_expert) const;

  MoeShape shape_;
  ExpertSplit split_;
  std::unique_ptr<FfnActivation> activation_;
  Parameter *w1_, *w2_, *b1_ = nullptr, *b2_ = nullptr;
  WeightUnit unit_;
  std::shared_ptr<Fp8Weight> fp8_w1_ = std::make_shared<Fp8Weight>(), fp8_w2_ = std::make_shared<Fp8Weight>();
};

class MoeLayer final : public Module {
 public:
  MoeLayer(const MoeOptions& options, const MoeShape& shape, const Choice& activation,
           const TokenSplit& split, const ModelContext& context, const BuildContext& build);

  struct Output {
    Tensor y_TD;
    Tensor aux_loss, z_loss;  // scalars, undefined when off
  };
  /// x and y: this rank's rows. Collective over ep and the groups of the split, whatever this rank's number
  /// of tokens.
  Output forward(const Tensor& x_TD, const ModelBatch& batch, const ForwardContext& context);

  /// The experts' weights: used apart from the rest of the layer.
  WeightUnit& experts_unit() { return experts_->unit(); }
  /// What one half of a pass sends with balanced routing; numbers between layers have that dtype.
  void count(const PassSizes& sizes, DType compute, Pass pass, PassHalf half) const;

  int64_t num_experts() const { return options_.num_experts; }
  Router& router() { return *router_; }

  /// Sums of this rank since they were zeroed, on the device: assignments of each expert and, at index E,
  /// dropped ones (i64); entropies (f64 scalar).
  struct Statistics {
    Tensor counters_E1, entropy;
    ExactSum exact_entropy;  // instead of `entropy`, where the model is rank invariant
    int64_t tokens = 0;      // valid ones, also since then
  };
  Statistics& statistics() { return statistics_; }
  /// Assignments of each expert in measuring passes, i64; undefined: there were none.
  Tensor& step_counts() { return step_counts_E_; }
  int64_t layer() const { return shape_.layer; }

 private:
  Routing route(const Tensor& x_TD, const ModelBatch& batch, const ForwardContext& context);
  void count(const Routing& routing, const Tensor& dropped, const ModelBatch& batch);
  /// Rows that each expert has at most for the tokens of a rank with these coordinates, or
  /// Dispatcher::kAsNeeded; choices: experts that the router names for each token.
  int64_t rows_each(const AxisCoords& rank, int64_t batch, int64_t seq, int64_t choices, Pass pass) const;
  /// What the ranks of the ep group of `rank` have for each expert.
  RoutedRows balanced_rows(int rank, const PassSizes& sizes, DType compute, Pass pass) const;
  Tensor shared_forward(const Tensor& x_TD, int64_t num_tokens) const;
  /// All experts' results of x and the shared expert's, each undefined when there is none.
  struct Results {
    Tensor routed_TD, shared_TD;
  };
  Results compute(const Tensor& x_TD, const Routing& routing, const ModelBatch& batch, int64_t rows_each);

  MoeOptions options_;
  MoeShape shape_;
  const Mesh& mesh_;
  const TokenSplit& split_;
  std::unique_ptr<Router> router_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::unique_ptr<Experts> experts_;
  std::unique_ptr<Ffn> shared_;
  Parameter* shared_gate_ = nullptr;
  Statistics statistics_;
  Tensor step_counts_E_;
};

}  // namespace shoal
