// What a pass through a transformer sends, from sizes alone: each function mirrors the collectives of the one
// that does the work, and counts them in the traffic of the same groups. Routing is taken to be balanced.
#include <algorithm>
#include <numeric>

#include "models/transformer.h"
#include "parallel/collective_ops.h"
#include "parallel/context_attention.h"

namespace shoal {

namespace {

/// Rows of a micro-batch that a rank with these coordinates shares with its tp group.
int64_t tokens_of(const AxisCoords& rank, const PassSizes& sizes) {
  return sizes.batch * context_runs(sizes.seq, rank[Axis::cp]).rows();
}

int64_t length(const ShardRange& range) {
  return range.end - range.begin;
}

}  // namespace

void AttentionLayer::count(const PassSizes& sizes, DType compute, PassHalf half) const {
  const int64_t row_bytes = shape_.hidden_size * dtype_size(compute);
  split_.count_gather(num_tokens(sizes), row_bytes, half);
  AttentionSpec heads;
  heads.batch = sizes.batch;
  heads.seq = sizes.seq;
  heads.kv_heads = length(share_.groups);
  heads.head_size = shape_.head_size;
  count_context_attention(heads, compute, split_.context(), half);
  split_.count_scatter(num_tokens(sizes), row_bytes, half);
}

void Ffn::count(int64_t num_tokens, DType compute, PassHalf half) const {
  const int64_t row_bytes = shape_.hidden_size * dtype_size(compute);
  split_.count_gather(num_tokens, row_bytes, half);
  split_.count_scatter(num_tokens, row_bytes, half);
}

RoutedRows MoeLayer::balanced_rows(int rank, const PassSizes& sizes, DType compute, Pass pass) const {
  const ParallelLayout& layout = mesh_.layout();
  RoutedRows rows;
  rows.routing = {options_.num_experts, options_.top_k};
  const RouterGathers gathers = router_->gathers();
  rows.ids = gathers.ids;
  rows.weights_have_gradients = gathers.has_gradients;
  rows.row_bytes = shape_.hidden_size * dtype_size(compute);
  rows.weight_bytes = dtype_size(stats_dtype(compute));
  for (int i = 0; i < layout.ep; i++) {
    const AxisCoords coords = coords_of(layout, rank_along(layout, rank, Axis::ep, i));
    const int64_t tokens = length(shard_range(tokens_of(coords, sizes), coords[Axis::tp])),
                  padded = rows_each(coords, sizes.batch, sizes.seq, rows.ids, pass);
    if (padded != Dispatcher::kAsNeeded) {
      rows.counts_RE.emplace_back(static_cast<size_t>(options_.num_experts), padded);
    } else if (!rows.tokens_R.empty() && rows.tokens_R.back() == tokens) {
      rows.counts_RE.push_back(rows.counts_RE.back());
    } else {
      rows.counts_RE.push_back(rows.routing.counts(tokens));
    }
    rows.tokens_R.push_back(tokens);
  }
  return rows;
}

void MoeLayer::count(const PassSizes& sizes, DType compute, Pass pass, PassHalf half) const {
  const int64_t E = options_.num_experts, T = tokens_of(mesh_.coords(), sizes),
                stats = dtype_size(stats_dtype(compute));
  const RouterGathers gathers = router_->gathers();
  if (gathers.logits) {
    split_.count_gather_replicated(T, E * stats, half);
    if (half == PassHalf::forward)
      split_.context().count_gather_replicated(sizes.batch, sizes.seq, E * stats);
  }
  if (gathers.token_ids && half == PassHalf::forward)
    split_.context().count_gather_replicated(sizes.batch, sizes.seq, dtype_size(DType::i32));
  if (router_->needs_step_counts() && pass == Pass::train && sizes.num_micro_batches == 1 &&
      half == PassHalf::forward)
    mesh_.sequences().traffic().all_reduce(E * dtype_size(DType::i64));

  const ParallelLayout& layout = mesh_.layout();
  const int rank = mesh_.world().rank(), experts_at = mesh_.coords()[Axis::ep].index;
  const RoutedRows rows = balanced_rows(rank, sizes, compute, pass);
  dispatcher_->count(rows, half);
  if (layout.etp > 1) {
    const ShardRange local = shard_range(E, {experts_at, layout.ep});
    for (int64_t part = 0; part < dispatcher_->num_parts(); part++) {
      const ShardRange own =
          shard_range(length(local), {static_cast<int>(part), static_cast<int>(dispatcher_->num_parts())});
      std::vector<int64_t> received;  // by each rank of the etp group, whose ep group is its own
      for (int i = 0; i < layout.etp; i++) {
        const RoutedRows theirs = balanced_rows(rank_along(layout, rank, Axis::etp, i), sizes, compute, pass);
        received.push_back(0);
        for (const std::vector<int64_t>& counts_E : theirs.counts_RE) {
          const auto first = counts_E.begin() + local.begin;
          received.back() += std::accumulate(first + own.begin, first + own.end, int64_t{0});
        }
      }
      ExpertSplit(mesh_.comm(Axis::etp)).count(received, length(local), rows.row_bytes, half);
    }
  }
  if (shared_) shared_->count(T, compute, half);
}

void Block::count(const PassSizes& sizes, DType compute, Pass pass, PassHalf half) const {
  attention_.count(sizes, compute, half);
  if (moe_) return moe_->count(sizes, compute, pass, half);
  ffn_->count(attention_.num_tokens(sizes), compute, half);
}

void Transformer::count_head(int64_t num_tokens, PassHalf half) const {
  split_.count_gather(num_tokens, options_.hidden_size * dtype_size(compute_), half);
  if (!split_.is_split() || half == PassHalf::backward) return;
  const int64_t block = logits_block(num_tokens, vocab_part().block_vocab, stats_dtype(compute_));
  constexpr int64_t kStatistics = 3;  // of each token, f64
  for (int64_t t = 0; t < num_tokens; t += block) {
    split_.group().traffic().all_gather(kStatistics * std::min(block, num_tokens - t) *
                                        dtype_size(DType::f64));
  }
}

void Transformer::count_stage(int stage, const PassSizes& sizes, Pass pass, PassHalf half) const {
  const int64_t num_tokens = tokens_of(mesh_.coords(), sizes);
  using Direction = WeightUnit::Direction;
  const bool forward = half == PassHalf::forward;
  const auto use = [&](const WeightUnit& unit) {  // once in either half
    if (unit.on_begin && (forward || !unit.forward_only))
      unit.on_begin(forward ? Direction::forward : Direction::backward);
  };
  if (stage == 0) use(embedding_unit_);
  if (stage == 0)
    split_.count_scatter(num_tokens, options_.hidden_size * dtype_size(stats_dtype(compute_)), half);
  const StageLayers layers = stages_[static_cast<size_t>(stage)];
  const bool again = !forward && options_.recomputed().block;
  for (int64_t l = layers.begin; l < layers.end; l++) {
    Block& block = *blocks_[static_cast<size_t>(l)];
    use(block.unit());
    if (block.moe() != nullptr) use(block.moe()->experts_unit());
    if (again) block.count(sizes, compute_, pass, PassHalf::forward);
    block.count(sizes, compute_, pass, half);
  }
  if (!is_last(stage)) return;
  use(final_norm_unit_);
  if (pass == Pass::measure) return;
  use(head_unit_);
  count_head(num_tokens, half);
}

int64_t Transformer::stage_input_bytes(const PassSizes& sizes) const {
  const DType dtype = final_norm_ ? stats_dtype(compute_) : compute_;
  return length(split_.own(tokens_of(mesh_.coords(), sizes))) * options_.hidden_size * dtype_size(dtype);
}

void Transformer::count_end_measure() const {
  for (MoeLayer* moe : moe_layers_)
    mesh_.sequences().traffic().all_reduce(moe->num_experts() * dtype_size(DType::i64));
}

void Transformer::count_end_step() const {
  if (moe_layers_.empty()) return;
  for (Communicator* group : {&mesh_.sequences(), &stage_ranks_}) {
    group->traffic().all_reduce(moe_counters_.num_bytes());
    // Exact sums are two tensors.
    for (int i = 0; i < (exact_entropies_ ? 2 : 1); i++)
      group->traffic().all_reduce(moe_entropies_.num_bytes());
  }
}

}  // namespace shoal
