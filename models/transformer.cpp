#include "models/transformer.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/autograd/recompute.h"
#include "core/autograd/tape.h"
#include "core/base/profiler.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "core/ops/embedding.h"
#include "core/ops/linear.h"
#include "core/ops/rows.h"

namespace shoal {

Block::Block(const TransformerOptions& options, int64_t layer, PositionEncoding& position,
             const TokenSplit& split, const ModelContext& context, const BuildContext& build)
    : pre_norm_(options.norm.placement == "pre"),
      attention_norm_(options.norm_shape(), build.child("attention_norm")),
      ffn_norm_(options.norm_shape(), build.child("ffn_norm")),
      attention_(options.attention_shape(), position, split, build.child("attention")) {
  add_module(attention_norm_);
  add_module(attention_);
  add_module(ffn_norm_);
  if (options.moe.is_moe_layer(layer)) {
    const MoeShape shape{options.hidden_size,
                         options.expert_hidden(),
                         options.shared_hidden(),
                         options.bias,
                         options.init.std,
                         options.output_init_std(),
                         layer,
                         options.num_moe_layers(),
                         options.recomputed(),
                         options.moe.fp8()};
    moe_ = std::make_unique<MoeLayer>(options.moe, shape, options.ffn.activation, split, context,
                                      build.child("moe"));
    add_module(*moe_);
  } else {
    const FfnShape shape{options.hidden_size, options.ffn_hidden(),      options.bias,
                         options.init.std,    options.output_init_std(), options.recomputed()};
    ffn_ = std::make_unique<Ffn>(shape, options.ffn.activation, split, build.child("ffn"));
    add_module(*ffn_);
  }
}

template <class Attend, class Feed>
Block::Stream Block::run(const Stream& in, const Attend& attend, const Feed& feed) {
  if (!pre_norm_) {
    // norm(x + f(x)) twice: the sum itself is not carried on.
    Tensor x = in.residual_TD;
    x = attention_norm_.forward(attend(x), x).y_TD;
    return {ffn_norm_.forward(feed(x), x).y_TD, {}};
  }
  NormResult normed = in.delta_TD.defined() ? attention_norm_.forward(in.delta_TD, in.residual_TD)
                                            : attention_norm_.carry(in.residual_TD);
  normed = ffn_norm_.forward(attend(normed.y_TD), normed.sum_TD);
  return {normed.sum_TD, feed(normed.y_TD)};
}

Block::Output Block::forward(const Stream& in, const ModelBatch& batch, const ForwardContext& context) {
  Output out;
  unit_.begin();
  out.stream = run(
      in, [&](const Tensor& x) { return attention_.forward(x, batch); },
      [&](const Tensor& x) {
        if (!moe_) return ffn_->forward(x, batch.num_tokens());
        MoeLayer::Output moe = moe_->forward(x, batch, context);
        out.aux_loss = moe.aux_loss;
        out.z_loss = moe.z_loss;
        return moe.y_TD;
      });
  unit_.end();
  return out;
}

Block::Stream Block::decode(const Stream& in, const ModelBatch& batch, DecodeState& state, size_t layer) {
  const ForwardContext context{Pass::evaluate, {}};
  return unit_.during([&] {
    return run(
        in, [&](const Tensor& x) { return attention_.decode(x, batch.positions_T, state, layer); },
        [&](const Tensor& x) {
          return moe_ ? moe_->forward(x, batch, context).y_TD : ffn_->forward(x, batch.num_tokens());
        });
  });
}

Transformer::Transformer(const TransformerOptions& options, const ModelContext& context)
    : options_(options),
      facts_(options.facts(context.vocab_size, context.seq_len)),
      vocab_size_(context.vocab_size),
      seq_len_(context.seq_len),
      device_(context.build.device),
      compute_(context.build.compute_dtype()),
      mesh_(*context.mesh),
      split_(mesh_.comm(Axis::tp), ContextSplit(mesh_.comm(Axis::cp), mesh_.layout().context)),
      stage_ranks_(mesh_.comm(Axis::pp)),
      stages_(stage_ranges(options.stage_layers(context.mesh->layout(), vocab_size_, seq_len_))) {
  // Every rank knows all parameters; it holds those of its stages.
  const int rank = stage_ranks_.rank(), num_ranks = stage_ranks_.size(),
            last = static_cast<int>(stages_.size()) - 1;
  const auto built = [&](bool held) {
    BuildContext build = context.build;
    build.held = held;
    return build;
  };
  const bool has_first = rank == 0, has_last = last % num_ranks == rank;
  const BuildContext first = built(has_first), end = built(has_last);
  const AttentionShape attention = options.attention_shape();
  const Shape table{vocab_size_, options.hidden_size};
  embedding_ =
      &add_parameter(built(has_first || (options.tie_embeddings && has_last)), "embedding.weight", table,
                     Init::normal(options.init.std), ParamKind::embedding, Placement::tensor(0));
  embedding_->on_both_ends = options.tie_embeddings && num_ranks > 1;
  position_ = PositionRegistry::make(
      options.position, PositionContext{first.child("position"), options.hidden_size, options.heads,
                                        attention.head_size, seq_len_, options.init.std});
  add_module(*position_);
  for (int64_t l = 0, stage = 0; l < options.layers; l++) {
    while (l >= stages_[static_cast<size_t>(stage)].end) stage++;
    const BuildContext build = built(stage % num_ranks == rank).child(str("layers.", l));
    blocks_.push_back(std::make_unique<Block>(options, l, *position_, split_, context, build));
    add_module(*blocks_.back());
    if (MoeLayer* moe = blocks_.back()->moe()) moe_layers_.push_back(moe);
  }
  if (options.norm.placement == "pre") {
    // Its result is read in forward only.
    NormShape shape = options.norm_shape();
    shape.recompute = false;
    final_norm_ = std::make_unique<Norm>(shape, end.child("final_norm"));
    add_module(*final_norm_);
  }
  if (!options.tie_embeddings)
    head_ = &add_parameter(end, "head.weight", table, Init::normal(options.init.std), ParamKind::head,
                           Placement::tensor(0));
  for (Parameter* p : parameters()) p->leaf.keep_packed = !options.recomputed().packed_weights;
  make_weight_units();
  make_moe_statistics(context.rank_invariant);
}

Tensor Transformer::head_weight() const {
  return head_ ? head_->value : embedding_->value;
}

Tensor Transformer::embed(const Tensor& tokens_T, const Tensor& positions_T) {
  const ProfileSection section("embedding");
  const TablePart part{split_.own(vocab_size_).begin, vocab_size_};
  // Each token's row is on one rank: the sum is exact.
  const Tensor x_TD = embedding_unit_.during([&] {
    const Tensor rows_TD = split_.scatter(embedding(embedding_->value, tokens_T, part));
    const ShardRange own = split_.own(positions_T.numel());
    return position_->embed(rows_TD, positions_T.flat(own.begin, own.end - own.begin));
  });
  // Between pre-norms the residual stream keeps the parameters' dtype; after post-norms there is none.
  return final_norm_ || x_TD.dtype() == compute_ ? x_TD : cast(x_TD, compute_);
}

Tensor Transformer::final_norm(const Block::Stream& stream) {
  if (!final_norm_) return stream.residual_TD;
  return final_norm_unit_.during([&] {
    if (!stream.delta_TD.defined()) return final_norm_->forward(stream.residual_TD);
    return final_norm_->forward(stream.delta_TD, stream.residual_TD).y_TD;
  });
}

Block::Output Transformer::run_block(size_t layer, const Block::Stream& in, const ModelBatch& batch,
                                     const ForwardContext& context) {
  Block* block = blocks_[layer].get();
  const ProfileScope scope("layer", static_cast<int64_t>(layer));
  if (!options_.recomputed().block || context.pass != Pass::train) return block->forward(in, batch, context);
  // Undefined tensors keep their places: inputs {residual, delta}, outputs {residual, delta, aux, z}.
  const std::vector<Tensor> outputs = recompute(
      [block, batch, context](const std::vector<Tensor>& inputs) {
        Block::Output o = block->forward({inputs[0], inputs[1]}, batch, context);
        return std::vector<Tensor>{o.stream.residual_TD, o.stream.delta_TD, o.aux_loss, o.z_loss};
      },
      {in.residual_TD, in.delta_TD});
  return {{outputs[0], outputs[1]}, outputs[2], outputs[3]};
}

namespace {
/// The residual stream as one tensor, as it goes to another stage.
Tensor whole_stream(const Block::Stream& stream) {
  const Tensor& residual = stream.residual_TD;
  if (!stream.delta_TD.defined()) return residual;
  const bool same = stream.delta_TD.dtype() == residual.dtype();
  return add(same ? stream.delta_TD : cast(stream.delta_TD, residual.dtype()), residual);
}
}  // namespace

Transformer::Features Transformer::features(int stage, const Tensor& x_TD, const ModelBatch& batch,
                                            const ForwardContext& context) {
  position_->prepare(batch.seq);
  Features out;
  Block::Stream stream{stage == 0 ? embed(batch.tokens_T, batch.positions_T) : x_TD, {}};
  const StageLayers layers = stages_[static_cast<size_t>(stage)];
  for (int64_t l = layers.begin; l < layers.end; l++) {
    const Block::Output result = run_block(static_cast<size_t>(l), stream, batch, context);
    stream = result.stream;
    if (result.aux_loss.defined()) out.aux.push_back(result.aux_loss);
    if (result.z_loss.defined()) out.z.push_back(result.z_loss);
  }
  out.x_TD = is_last(stage) ? final_norm(stream) : whole_stream(stream);
  return out;
}

Tensor Transformer::make_stage_input(const ModelBatch& batch) const {
  const ShardRange own = split_.own(batch.num_tokens());
  const DType dtype = final_norm_ ? embedding_->value.dtype() : compute_;
  return Tensor::empty({own.end - own.begin, options_.hidden_size}, dtype, device_);
}

Tensor Transformer::logits(const ModelBatch& batch, const ForwardContext& context) {
  SHOAL_CHECK(stages_.size() == 1, "Transformer::logits: the model is cut into ", stages_.size(), " stages");
  return all_logits(split_.gather_replicated(features(0, {}, batch, context).x_TD, batch.num_tokens()));
}

/// Which part of the vocabulary this rank's head has.
VocabPart Transformer::vocab_part() const {
  VocabPart part;
  part.rows = {split_.own(vocab_size_).begin, vocab_size_};
  part.block_vocab = shard_range(vocab_size_, {0, split_.group().size()}).end;
  if (!split_.is_split()) return part;
  part.gather = [&group = split_.group()](const Tensor& mine) {
    const Tensor all = Tensor::empty({group.size(), mine.size(0), mine.size(1)}, mine.dtype(), mine.device());
    group.all_gather(mine, all).wait();
    return all;
  };
  return part;
}

/// x_TD: the same rows on all ranks of the split. Without gradients when it is split.
Tensor Transformer::all_logits(const Tensor& x_TD) {
  const Tensor own_TV = head_unit_.during([&] { return linear_f32(x_TD, head_weight()); });
  if (!split_.is_split()) return own_TV;
  const ShardRange own = split_.own(vocab_size_);
  const Tensor all_TV = Tensor::zeros({own_TV.size(0), vocab_size_}, own_TV.dtype(), own_TV.device());
  copy_columns(all_TV.device(), CopyColumns{own_TV, all_TV, 0, own.begin, own.end - own.begin});
  split_.group().all_reduce(all_TV, ReduceOp::sum).wait();
  return all_TV;
}

namespace {
Tensor sum_of(const std::vector<Tensor>& terms) {
  Tensor total;
  for (const Tensor& term : terms) total = total.defined() ? add(total, term) : term;
  return total;
}
}  // namespace

LossTerms Transformer::head_loss(const Features& f, const ModelBatch& batch, const ForwardContext& context) {
  const ProfileSection section("head and loss");
  const double scale = 1.0 / static_cast<double>(std::max<int64_t>(1, context.totals.labels));
  const Tensor x_TD = split_.gather(f.x_TD, batch.num_tokens());
  LossTerms terms;
  terms.lm = head_unit_.during(
      [&] { return linear_cross_entropy(x_TD, head_weight(), batch.labels_T, scale, vocab_part()); });
  return terms;
}

StageResult Transformer::forward_stage(int stage, const Tensor& x_TD, const ModelBatch& batch,
                                       const ForwardContext& context) {
  const Features f = features(stage, x_TD, batch, context);
  StageResult result;
  if (!is_last(stage)) result.x_TD = f.x_TD;
  if (context.pass == Pass::measure) return result;
  LossTerms& terms = result.terms;
  if (is_last(stage)) terms = head_loss(f, batch, context);
  for (const Tensor& term : {terms.lm, sum_of(f.aux), sum_of(f.z)}) {
    if (term.defined()) terms.total = terms.total.defined() ? add(terms.total, term) : term;
  }
  // Ranks that share sequences all have these, and each takes the gradient of its rows: one reports them.
  if (!mesh_.speaks_for_sequences()) return result;
  terms.aux = f.aux;
  terms.z = f.z;
  return result;
}

LossTerms Transformer::loss(const ModelBatch& batch, const ForwardContext& context) {
  SHOAL_CHECK(stages_.size() == 1, "Transformer::loss: the model is cut into ", stages_.size(), " stages");
  return forward_stage(0, {}, batch, context).terms;
}

DecodeState Transformer::make_decode_state(int64_t batch, int64_t capacity) const {
  DecodeState state;
  state.capacity = capacity;
  state.batch = batch;
  const AttentionShape a = options_.attention_shape();
  const ShardRange groups = a.share(split_).groups;
  const Shape shape{batch, capacity, groups.end - groups.begin, a.head_size};
  for (size_t stage = 0; stage < stages_.size(); stage++) {
    const bool mine = static_cast<int>(stage) % stage_ranks_.size() == stage_ranks_.rank();
    for (int64_t l = stages_[stage].begin; l < stages_[stage].end; l++) {
      state.keys.push_back(mine ? Tensor::zeros(shape, compute_, device_) : Tensor{});
      state.values.push_back(mine ? Tensor::zeros(shape, compute_, device_) : Tensor{});
    }
  }
  return state;
}

/// One stage after the other: each gives its result to the ranks of all. This rank's rows of the last one's.
Tensor Transformer::decode_stages(const Tensor& tokens_T, const ModelBatch& batch, DecodeState& state) {
  Tensor x_TD;
  for (size_t stage = 0; stage < stages_.size(); stage++) {
    const int owner = static_cast<int>(stage) % stage_ranks_.size();
    if (stage_ranks_.rank() == owner) {
      Block::Stream stream{stage == 0 ? embed(tokens_T, batch.positions_T) : x_TD, {}};
      for (int64_t l = stages_[stage].begin; l < stages_[stage].end; l++)
        stream = blocks_[static_cast<size_t>(l)]->decode(stream, batch, state, static_cast<size_t>(l));
      if (stage + 1 == stages_.size()) return final_norm(stream);
      x_TD = whole_stream(stream);
    } else if (stage + 1 < stages_.size()) {
      x_TD = make_stage_input(batch);
    } else {
      return x_TD;
    }
    stage_ranks_.broadcast(x_TD, owner).wait();
  }
  return x_TD;
}

Tensor Transformer::next_logits(const Tensor& tokens_T, DecodeState& state) {
  const NoGrad no_grad;
  const int64_t B = state.batch, n = tokens_T.numel() / B, D = options_.hidden_size;
  SHOAL_CHECK(!split_.context().is_split(), "next_logits: a sequence that grows is not shared by ",
              mesh_.layout().cp, " context parallel ranks; make the mesh with cp = 1");
  SHOAL_CHECK(n * B == tokens_T.numel() && state.length + n <= state.capacity,
              "next_logits: ", tokens_T.numel(), " tokens for ", B, " sequences after ", state.length,
              " do not fit a cache of ", state.capacity);
  const int64_t limit = position_->max_positions();
  SHOAL_CHECK(limit == 0 || state.length + n <= limit, "next_logits: position ", state.length + n - 1,
              " is beyond the model's ", limit, " learned positions; generate fewer tokens");
  std::vector<int32_t> positions(static_cast<size_t>(B * n));
  for (int64_t i = 0; i < B * n; i++)
    positions[static_cast<size_t>(i)] = static_cast<int32_t>(state.length + i % n);
  ModelBatch batch;
  batch.batch = B;
  batch.seq = n;
  batch.tokens_T = tokens_T;
  batch.positions_T = Tensor::from(positions, Shape{B * n}, device_);
  position_->prepare(state.length + n);
  const Tensor own_TD = decode_stages(tokens_T, batch, state);
  state.length += n;
  const int owner = static_cast<int>(stages_.size() - 1) % stage_ranks_.size();
  if (stage_ranks_.rank() != owner) {
    const Tensor logits = Tensor::empty({B, vocab_size_}, embedding_->value.dtype(), device_);
    stage_ranks_.broadcast(logits, owner).wait();
    return logits;
  }
  const Tensor x_TD = split_.gather_replicated(own_TD, B * n);
  // Only the last token of each sequence needs logits.
  const Tensor last_BD = Tensor::empty({B, D}, compute_, device_);
  for (int64_t b = 0; b < B; b++) last_BD.rows(b, b + 1).copy_from(x_TD.rows((b + 1) * n - 1, (b + 1) * n));
  const Tensor logits = all_logits(last_BD);
  stage_ranks_.broadcast(logits, owner).wait();
  return logits;
}

bool Transformer::needs_measure(int64_t num_micro_batches) const {
  return num_micro_batches > 1 &&
         std::ranges::any_of(moe_layers_, [](MoeLayer* moe) { return moe->router().needs_step_counts(); });
}

void Transformer::end_measure() {
  for (MoeLayer* moe : moe_layers_) {
    Tensor& counts = moe->step_counts();
    if (!counts.defined()) counts = Tensor::zeros({moe->num_experts()}, DType::i64, device_);
    mesh_.sequences().all_reduce(counts, ReduceOp::sum).wait();
  }
}

void Transformer::make_moe_statistics(bool exact) {
  const auto num_layers = std::ssize(moe_layers_);
  int64_t num_counters = 0, at = 0;
  for (const MoeLayer* moe : moe_layers_) num_counters += moe->num_experts() + 1;
  moe_counters_ = Tensor::zeros({num_counters + num_layers}, DType::i64, device_);
  moe_entropies_ = Tensor::zeros({num_layers}, DType::f64, device_);
  if (exact) exact_entropies_ = ExactSum::zeros(num_layers, device_);
  for (int64_t i = 0; i < num_layers; i++) {
    MoeLayer& moe = *moe_layers_[static_cast<size_t>(i)];
    moe.statistics() = {moe_counters_.flat(at, moe.num_experts() + 1), moe_entropies_.flat(i, 1),
                        exact ? exact_entropies_.part(i, 1) : ExactSum{}, 0};
    at += moe.num_experts() + 1;
  }
}

std::vector<MoeStepStats> Transformer::end_step(bool update_bias) {
  const ProfileSection section("sums and counts", ProfileSection::kWhole);
  if (moe_layers_.empty()) return {};
  // One integer and one floating-point reduction for all layers; layers may differ in their number of
  // experts. The host waits for the device only after everything has been enqueued.
  const auto num_layers = std::ssize(moe_layers_);
  std::vector<int64_t> tokens;
  for (MoeLayer* moe : moe_layers_) tokens.push_back(std::exchange(moe->statistics().tokens, 0));
  moe_counters_.flat(moe_counters_.numel() - num_layers, num_layers)
      .copy_from(Tensor::from(tokens, Shape{num_layers}));
  std::vector<Tensor> sums = {moe_counters_};
  if (exact_entropies_) {
    sums.insert(sums.end(), {exact_entropies_.high, exact_entropies_.low});
  } else {
    sums.push_back(moe_entropies_);
  }
  for (const Tensor& sum : sums) {
    mesh_.sequences().all_reduce(sum, ReduceOp::sum).wait();
    // A layer counts in one stage; all ranks move all biases.
    if (stage_ranks_.size() > 1) stage_ranks_.all_reduce(sum, ReduceOp::sum).wait();
  }
  if (exact_entropies_) {
    exact_value(device_, exact_entropies_, moe_entropies_);
    exact_entropies_.set_zero();
  }
  int64_t num_biases = 0;
  for (MoeLayer* moe : moe_layers_) {
    if (update_bias) moe->router().end_step(moe->statistics().counters_E1.flat(0, moe->num_experts()));
    num_biases += moe->router().bias().defined() ? moe->num_experts() : 0;
  }
  const Tensor biases = Tensor::empty({num_biases}, DType::f32, device_);
  int64_t bias_at = 0;
  for (MoeLayer* moe : moe_layers_) {
    const Tensor bias = moe->router().bias();
    if (!bias.defined()) continue;
    biases.flat(bias_at, bias.numel()).copy_from(bias);
    bias_at += bias.numel();
  }
  std::vector<MoeStepStats> all = read_moe_statistics(
      moe_counters_.to_vector<int64_t>(), moe_entropies_.to_vector<double>(), biases.to_vector<float>());
  moe_counters_.set_zero();
  moe_entropies_.set_zero();
  for (MoeLayer* moe : moe_layers_) moe->step_counts() = {};
  return all;
}

/// From the sums over all ranks; biases of the layers that have some, one after the other.
std::vector<MoeStepStats> Transformer::read_moe_statistics(const std::vector<int64_t>& counters,
                                                           const std::vector<double>& entropies,
                                                           const std::vector<float>& biases) const {
  std::vector<MoeStepStats> all;
  auto at = counters.begin();
  auto tokens = counters.end() - std::ssize(moe_layers_);
  auto bias = biases.begin();
  for (size_t i = 0; i < moe_layers_.size(); i++) {
    MoeLayer& moe = *moe_layers_[i];
    MoeStepStats stats;
    stats.layer = moe.layer();
    stats.counts_E.assign(at, at + moe.num_experts());
    at += moe.num_experts();
    stats.dropped = *at++;
    stats.tokens = *tokens++;
    stats.entropy = stats.tokens > 0 ? entropies[i] / static_cast<double>(stats.tokens) : 0;
    if (moe.router().bias().defined()) {
      const auto [low, high] = std::minmax_element(bias, bias + moe.num_experts());
      stats.bias_min = *low;
      stats.bias_max = *high;
      bias += moe.num_experts();
    }
    all.push_back(std::move(stats));
  }
  return all;
}

namespace {
const bool registered = ModelRegistry::add<TransformerOptions>(
    "transformer", "decoder-only transformer with dense and MoE layers",
    [](const TransformerOptions& o, const ModelContext& c) { return std::make_unique<Transformer>(o, c); });
}

}  // namespace shoal
