#include "parallel/context_split.h"

#include "core/autograd/tape.h"
#include "core/ops/rows.h"
#include "parallel/collective_ops.h"

namespace shoal {

namespace {

Shape with_rows(const Tensor& x, int64_t rows) {
  Shape shape = x.shape();
  shape.set(0, rows);
  return shape;
}

/// Copies between the rows of runs, of all sequences, and whole sequences.
void copy_runs(const Tensor& part, const Tensor& whole, const PositionRuns& runs, int64_t batch, int64_t seq,
               bool to_whole) {
  if (part.numel() == 0) return;
  const int64_t rows = runs.rows(), width = part.numel() / (batch * rows);
  const Tensor some = part.detach().view({batch, rows * width}),
               all = whole.detach().view({batch, seq * width});
  int64_t row = 0;
  for (size_t i = 0; i < runs.begin.size(); row += runs.count[i++]) {
    const int64_t in_some = row * width, in_all = runs.begin[i] * width, count = runs.count[i] * width;
    if (count == 0) continue;
    copy_columns(part.device(), to_whole ? CopyColumns{some, all, in_some, in_all, count}
                                         : CopyColumns{all, some, in_all, in_some, count});
  }
}

struct GatherSequences final : Function {
  ContextSplit split;
  int64_t batch, seq;
  GatherSequences(const ContextSplit& split, int64_t batch, int64_t seq)
      : split(split), batch(batch), seq(seq) {}
  const char* name() const override { return "gather_sequences"; }

  Tensor forward(const Tensor& x) {
    const Tensor all = gather_all_rows(x, split.group(), split.offsets(batch, seq));
    return split.in_sequence_order(all, batch, seq);
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    return {take_runs(dy[0], split.own(seq), batch, seq)};
  }
};

struct OwnRows final : Function {
  PositionRuns runs;
  int64_t batch, seq;
  Shape shape;
  OwnRows(const PositionRuns& runs, int64_t batch, int64_t seq) : runs(runs), batch(batch), seq(seq) {}
  const char* name() const override { return "own_rows"; }

  Tensor forward(const Tensor& x) {
    shape = x.shape();
    return take_runs(x, runs, batch, seq);
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    const Tensor dx = Tensor::zeros(shape, dy[0].dtype(), dy[0].device());
    copy_runs(dy[0], dx, runs, batch, seq, /*to_whole=*/true);
    return {dx};
  }
};

}  // namespace

PositionRuns context_runs(int64_t seq, AxisCoord cp) {
  if (cp.size == 1) return PositionRuns::all(seq);
  PositionRuns runs;
  const int chunks[] = {cp.index, 2 * cp.size - 1 - cp.index};
  for (size_t i = 0; i < 2; i++) {
    const ShardRange chunk = shard_range(seq, {chunks[i], 2 * cp.size});
    runs.begin[i] = chunk.begin;
    runs.count[i] = chunk.end - chunk.begin;
  }
  return runs;
}

Tensor take_runs(const Tensor& all_rows, const PositionRuns& runs, int64_t batch, int64_t seq) {
  const Tensor part =
      Tensor::empty(with_rows(all_rows, batch * runs.rows()), all_rows.dtype(), all_rows.device());
  copy_runs(part, all_rows, runs, batch, seq, /*to_whole=*/false);
  return part;
}

std::vector<int64_t> ContextSplit::offsets(int64_t batch, int64_t seq) const {
  std::vector<int64_t> all = {0};
  for (int r = 0; r < group_->size(); r++) all.push_back(all.back() + batch * runs(seq, r).rows());
  return all;
}

Tensor ContextSplit::gather_replicated(const Tensor& own_rows, int64_t batch, int64_t seq) const {
  return is_split() ? apply(GatherSequences(*this, batch, seq), own_rows) : own_rows;
}

void ContextSplit::count_gather_replicated(int64_t batch, int64_t seq, int64_t row_bytes) const {
  if (is_split()) count_gather(*group_, offsets(batch, seq), row_bytes);
}

Tensor ContextSplit::own_rows(const Tensor& all_rows, int64_t batch, int64_t seq) const {
  return is_split() ? apply(OwnRows(own(seq), batch, seq), all_rows) : all_rows;
}

Tensor ContextSplit::in_sequence_order(const Tensor& by_rank, int64_t batch, int64_t seq) const {
  const Tensor all = Tensor::empty(by_rank.shape(), by_rank.dtype(), by_rank.device());
  const std::vector<int64_t> at = offsets(batch, seq);
  for (int r = 0; r < group_->size(); r++) {
    const auto i = static_cast<size_t>(r);
    copy_runs(by_rank.rows(at[i], at[i + 1]), all, runs(seq, r), batch, seq, /*to_whole=*/true);
  }
  return all;
}

Tensor ContextSplit::in_rank_order(const Tensor& all_rows, int64_t batch, int64_t seq) const {
  const Tensor by_rank = Tensor::empty(all_rows.shape(), all_rows.dtype(), all_rows.device());
  const std::vector<int64_t> at = offsets(batch, seq);
  for (int r = 0; r < group_->size(); r++) {
    const auto i = static_cast<size_t>(r);
    copy_runs(by_rank.rows(at[i], at[i + 1]), all_rows, runs(seq, r), batch, seq, /*to_whole=*/false);
  }
  return by_rank;
}

}  // namespace shoal
