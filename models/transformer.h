// The decoder-only transformer: token embedding, blocks of attention and FFN (dense or MoE, per layer), final
// norm, LM head.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/ops/cross_entropy.h"
#include "models/attention.h"
#include "models/ffn.h"
#include "models/model.h"
#include "models/moe/moe_layer.h"
#include "models/norm.h"
#include "models/position.h"
#include "models/stage_layout.h"

namespace shoal {

struct FfnOptions {
  Choice activation{"swiglu", nullptr};
  AutoInt hidden;
  void fields(FieldVisitor& v);
};

struct NormOptions {
  std::string kind = "rms_norm", placement = "pre";
  double eps = 1e-5;
  void fields(FieldVisitor& v);
};

struct InitOptions {
  double std = 0.02;
  bool scale_residual = true;
  void fields(FieldVisitor& v);
};

/// The `model:` section for kind transformer.
struct TransformerOptions final : ModelOptions {
  int64_t layers = 4, hidden_size = 256, heads = 4;
  AutoInt kv_heads, head_size;
  bool bias = false, tie_embeddings = true;
  std::vector<std::string> recompute = {"none"};
  NormOptions norm;
  Choice position{"rope", nullptr};
  FfnOptions ffn;
  MoeOptions moe;
  InitOptions init;

  void fields(FieldVisitor& v) override;
  int64_t num_experts() const override;
  ModelSizes sizes() const override;
  ModelFacts facts(int64_t vocab_size, int64_t seq_len) const override;
  double largest_share(const ParallelLayout& layout, int64_t vocab_size, int64_t seq_len) const override;
  void check(const std::string& path, const ConfigNode& root, ConfigErrors& errors) const override;
  std::vector<LayoutDependence> layout_dependences() const override;

  // What `auto` stands for.
  AttentionShape attention_shape() const;
  NormShape norm_shape() const;
  Recompute recomputed() const;
  int64_t ffn_hidden() const;
  int64_t expert_hidden() const;
  int64_t shared_hidden() const;  // all shared experts together; 0: none
  int64_t num_moe_layers() const;
  /// Multiply-adds per token of one layer's matrix products and attention scores.
  double layer_cost(int64_t layer, int64_t seq_len) const;
  /// Layers of each pipeline stage: those of the layout, or a balanced split.
  std::vector<int64_t> stage_layers(const ParallelLayout& layout, int64_t vocab_size, int64_t seq_len) const;
  /// Standard deviation of projections that write into the residual stream (GPT-2: std / sqrt(2 * layers)).
  double output_init_std() const;
  /// Why experts cannot be multiplied in fp8; empty when they can, or are not.
  std::string fp8_problem(const ConfigNode& root) const;
  double size_bound() const;
  PassMemory pass_memory(const PassShape& shape) const override;
};

/// One layer. The residual stream is carried apart from what was last added to it, so that the addition is
/// fused with the norm that follows.
class Block final : public Module {
 public:
  struct Stream {
    Tensor residual_TD;
    Tensor delta_TD;  // still to be added; undefined at the first block
  };
  struct Output {
    Stream stream;
    Tensor aux_loss, z_loss;
  };
  Block(const TransformerOptions& options, int64_t layer, PositionEncoding& position, const TokenSplit& split,
        const ModelContext& context, const BuildContext& build);
  Output forward(const Stream& in, const ModelBatch& batch, const ForwardContext& context);
  Stream decode(const Stream& in, const ModelBatch& batch, DecodeState& state, size_t layer);
  /// What one half of a pass sends (MoeLayer::count).
  void count(const PassSizes& sizes, DType compute, Pass pass, PassHalf half) const;
  MoeLayer* moe() { return moe_.get(); }
  /// Without the experts of its MoE layer, which are a unit inside of it.
  WeightUnit& unit() { return unit_; }

 private:
  template <class Attend, class Feed>
  Stream run(const Stream& in, const Attend& attend, const Feed& feed);

  bool pre_norm_;
  Norm attention_norm_, ffn_norm_;
  AttentionLayer attention_;
  std::unique_ptr<Ffn> ffn_;
  std::unique_ptr<MoeLayer> moe_;
  WeightUnit unit_;
};

class Transformer final : public Model {
 public:
  Transformer(const TransformerOptions& options, const ModelContext& context);

  StageResult forward_stage(int stage, const Tensor& x_TD, const ModelBatch& batch,
                            const ForwardContext& context) override;
  Tensor make_stage_input(const ModelBatch& batch) const override;
  LossTerms loss(const ModelBatch& batch, const ForwardContext& context) override;
  /// Logits [T, V] of every token (tests and evaluation of small inputs).
  Tensor logits(const ModelBatch& batch, const ForwardContext& context);
  Tensor next_logits(const Tensor& tokens_T, DecodeState& state) override;
  DecodeState make_decode_state(int64_t batch, int64_t capacity) const override;
  bool needs_measure(int64_t num_micro_batches) const override;
  void end_measure() override;
  std::vector<MoeStepStats> end_step(bool update_bias) override;
  std::vector<WeightUnit*> weight_units() override;
  void count_stage(int stage, const PassSizes& sizes, Pass pass, PassHalf half) const override;
  void count_end_measure() const override;
  void count_end_step() const override;
  int64_t stage_input_bytes(const PassSizes& sizes) const override;
  const std::vector<StageLayers>& stages() const override { return stages_; }
  const ModelFacts& facts() const override { return facts_; }
  int64_t vocab_size() const override { return vocab_size_; }
  int64_t max_positions() const override { return position_->max_positions(); }

 private:
  struct Features {
    Tensor x_TD;  // after the final norm
    std::vector<Tensor> aux, z;
  };
  void make_weight_units();
  void make_moe_statistics(bool exact);
  std::vector<MoeStepStats> read_moe_statistics(const std::vector<int64_t>& counters,
                                                const std::vector<double>& entropies,
                                                const std::vector<float>& biases) const;
  Features features(int stage, const Tensor& x_TD, const ModelBatch& batch, const ForwardContext& context);
  bool is_last(int stage) const { return stage + 1 == std::ssize(stages_); }
  Block::Output run_block(size_t layer, const Block::Stream& in, const ModelBatch& batch,
                          const ForwardContext& context);
  LossTerms head_loss(const Features& features, const ModelBatch& batch, const ForwardContext& context);
  Tensor decode_stages(const Tensor& tokens_T, const ModelBatch& batch, DecodeState& state);
  void count_head(int64_t num_tokens, PassHalf half) const;
  VocabPart vocab_part() const;
  Tensor all_logits(const Tensor& x_TD);
  Tensor embed(const Tensor& tokens_T, const Tensor& positions_T);
  Tensor head_weight() const;
  Tensor final_norm(const Block::Stream& stream);

  TransformerOptions options_;
  ModelFacts facts_;
  int64_t vocab_size_, seq_len_;
  Device device_;
  DType compute_;  // of what flows between layers
  const Mesh& mesh_;
  TokenSplit split_;
  Communicator& stage_ranks_;  // the other stages of this rank's tokens
  std::vector<StageLayers> stages_;
  Parameter *embedding_, *head_ = nullptr;
  std::unique_ptr<PositionEncoding> position_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::unique_ptr<Norm> final_norm_;  // pre-norm only
  WeightUnit embedding_unit_, final_norm_unit_, head_unit_;
  std::vector<MoeLayer*> moe_layers_;
  // Their statistics: E + 1 counters of each layer, then the tokens of each; entropies of each.
  Tensor moe_counters_, moe_entropies_;
  ExactSum exact_entropies_;  // instead, where the model is rank invariant
};

}  // namespace shoal
