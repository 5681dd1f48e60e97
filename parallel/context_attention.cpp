#include "parallel/context_attention.h"

#include <utility>
#include <vector>

#include "core/autograd/accumulate.h"
#include "core/autograd/tape.h"
#include "core/ops/attention_part.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "core/ops/rows.h"
#include "parallel/collective_ops.h"

namespace shoal {

namespace {

/// What both ways have in common: the part that is computed here, and what backward needs.
class ContextAttention : public Function {
 public:
  ContextAttention(const AttentionSpec& spec, const ContextSplit& split) : spec_(spec), split_(split) {}

 protected:
  int rank() const { return split_.group().rank(); }
  int num_ranks() const { return split_.group().size(); }
  PositionRuns own() const { return split_.own(spec_.seq); }
  int64_t rows_of(int rank) const { return spec_.batch * split_.runs(spec_.seq, rank).rows(); }

  Tensor empty(int64_t rows, int64_t width, DType dtype) const {
    return Tensor::empty({rows, width}, dtype, qkv_.device());
  }
  int64_t pair_width() const { return spec_.kv_heads * 2 * spec_.head_size; }
  /// The key and value columns of packed rows, to or from rows [rows, G * 2 * C].
  void copy_kv(const Tensor& packed, const Tensor& kv, bool from_packed) const {
    const int64_t groups = spec_.kv_heads, pair = 2 * spec_.head_size,
                  queries = spec_.heads / groups * spec_.head_size, rows = kv.num_rows() * groups;
    const Tensor wide = packed.detach().view({rows, queries + pair}), narrow = kv.detach().view({rows, pair});
    copy_columns(kv.device(), from_packed ? CopyColumns{wide, narrow, queries, 0, pair}
                                          : CopyColumns{narrow, wide, 0, queries, pair});
  }
  Tensor own_kv() const {
    const Tensor kv = empty(rows_of(rank()), pair_width(), qkv_.dtype());
    copy_kv(qkv_, kv, /*from_packed=*/true);
    return kv;
  }

  struct Attended {
    Tensor y, lse;
  };
  Attended attend(const Tensor& kv, const PositionRuns& keys) const {
    const int64_t rows = rows_of(rank());
    const Attended out{empty(rows, spec_.heads * spec_.head_size, qkv_.dtype()),
                       empty(rows, spec_.heads, stats_dtype(qkv_.dtype()))};
    const auto& kernel = qkv_.dtype() == DType::bf16 ? bf16_attention_part_fwd : attention_part_fwd;
    kernel(qkv_.device(), {qkv_, kv, out.y, out.lse}, spec_, {own(), keys});
    return out;
  }
  /// Writes the query columns of dqkv and returns the gradient of kv.
  Tensor attend_backward(const Tensor& dy, const Tensor& kv, const PositionRuns& keys,
                         const Tensor& dqkv) const {
    const Tensor dkv = Tensor::empty_like(kv);
    const auto& kernel = qkv_.dtype() == DType::bf16 ? bf16_attention_part_bwd : attention_part_bwd;
    kernel(qkv_.device(), {dy, qkv_, kv, y_, lse_, dqkv, dkv}, spec_, {own(), keys});
    return dkv;
  }

  AttentionSpec spec_;
  ContextSplit split_;
  Tensor qkv_, y_, lse_;
};

class GatheredAttention final : public ContextAttention {
 public:
  using ContextAttention::ContextAttention;
  const char* name() const override { return "gathered_attention"; }

  Tensor forward(const Tensor& qkv) {
    qkv_ = qkv;
    const Attended out = attend(all_kv(), PositionRuns::all(spec_.seq));
    y_ = out.y;
    lse_ = out.lse;
    return y_;
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    const Tensor dqkv = Tensor::empty_like(qkv_);
    const Tensor dkv = attend_backward(dy[0], all_kv(), PositionRuns::all(spec_.seq), dqkv);
    const Tensor by_rank = split_.in_rank_order(dkv, spec_.batch, spec_.seq);
    const Tensor mine = sum_rows_of_rank(by_rank, split_.group(), split_.offsets(spec_.batch, spec_.seq));
    copy_kv(dqkv, mine, /*from_packed=*/false);
    return {dqkv};
  }

 private:
  Tensor all_kv() const {
    const Tensor by_rank = gather_all_rows(own_kv(), split_.group(), split_.offsets(spec_.batch, spec_.seq));
    return split_.in_sequence_order(by_rank, spec_.batch, spec_.seq);
  }
};

/// In step s a rank has the keys and values of the rank s places before it, and sends them on meanwhile. In
/// backward the sum of their gradients follows them, one step behind, and is home after the last step.
class RingAttention final : public ContextAttention {
 public:
  using ContextAttention::ContextAttention;
  const char* name() const override { return "ring_attention"; }

  Tensor forward(const Tensor& qkv) {
    qkv_ = qkv;
    const bool mixed = qkv.dtype() == DType::bf16;
    Tensor kv = own_kv(), sum;
    for (int step = 0; step < num_ranks(); step++) {
      Transfer next;
      if (step + 1 < num_ranks()) next = send_on(kv, step);
      const Attended part = attend(kv, split_.runs(spec_.seq, source(step)));
      if (step == 0) {
        sum = mixed ? cast(part.y, DType::f32) : part.y;
        lse_ = part.lse;
      } else {
        merge_attention(qkv.device(), {part.y, part.lse, sum, lse_});
      }
      if (step + 1 < num_ranks()) kv = next.arrive();
    }
    y_ = mixed ? cast(sum, DType::bf16) : sum;
    return y_;
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    const DType sums = stats_dtype(qkv_.dtype());
    // Keys' columns of what is summed are not used; zeros, because sums of anything could be slow.
    const Tensor part_dqkv = Tensor::zeros(qkv_.shape(), qkv_.dtype(), qkv_.device());
    const Tensor dq = Tensor::zeros(qkv_.shape(), sums, qkv_.device());
    Tensor kv = own_kv();
    Transfer gradients;
    for (int step = 0; step < num_ranks(); step++) {
      Transfer next;
      if (step + 1 < num_ranks()) next = send_on(kv, step);
      Tensor dkv = attend_backward(dy[0], kv, split_.runs(spec_.seq, source(step)), part_dqkv);
      accumulate(dq.device(), dq, part_dqkv);
      if (step == 0) {
        if (dkv.dtype() != sums) dkv = cast(dkv, sums);
      } else {
        const Tensor so_far = gradients.arrive();
        accumulate(so_far.device(), so_far, dkv);
        dkv = so_far;
      }
      if (step + 1 < num_ranks()) kv = next.arrive();
      gradients = send_on(dkv, step);
    }
    const Tensor dqkv = dq.dtype() == qkv_.dtype() ? dq : cast(dq, qkv_.dtype());
    const Tensor dkv = gradients.arrive();
    copy_kv(dqkv, dkv.dtype() == qkv_.dtype() ? dkv : cast(dkv, qkv_.dtype()), /*from_packed=*/false);
    return {dqkv};
  }

 private:
  /// Rows on their way to the next rank, and others from the one before.
  struct Transfer {
    Tensor sent, received;
    Work work;
    Tensor arrive() {
      work.wait();
      sent = {};
      return std::exchange(received, Tensor{});
    }
  };

  /// Whose keys and values are here in this step.
  int source(int step) const { return (rank() - step % num_ranks() + num_ranks()) % num_ranks(); }

  /// Sends what is here in this step; what will be here in the next one comes.
  Transfer send_on(const Tensor& rows, int step) const {
    const auto n = static_cast<size_t>(num_ranks());
    std::vector<int64_t> send(n, 0), receive(n, 0);
    const auto me = static_cast<size_t>(rank());
    send[(me + 1) % n] = rows.size(0);
    receive[(me + n - 1) % n] = rows_of(source(step + 1));
    Transfer transfer{rows, empty(rows_of(source(step + 1)), pair_width(), rows.dtype()), {}};
    transfer.work = split_.group().all_to_all(rows, transfer.received, send, receive);
    return transfer;
  }
};

}  // namespace

Tensor context_attention(const Tensor& qkv, const AttentionSpec& spec, const ContextSplit& split) {
  const int64_t rows = spec.batch * split.own(spec.seq).rows();
  const int64_t width = (spec.heads + 2 * spec.kv_heads) * spec.head_size;
  SHOAL_CHECK(qkv.size(0) == rows && qkv.numel() == rows * width, "context_attention [", split.group().name(),
              "]: expected this rank's ", rows, " packed rows of ", width, ", got ", qkv.shape());
  SHOAL_CHECK(!spec.document_BS.defined() || spec.document_BS.numel() == spec.batch * spec.seq,
              "context_attention: expected document ids of whole sequences [", spec.batch, ", ", spec.seq,
              "], got ", spec.document_BS.shape());
  if (split.kind() == ContextKind::ring) return apply(RingAttention(spec, split), qkv);
  return apply(GatheredAttention(spec, split), qkv);
}

void count_context_attention(const AttentionSpec& spec, DType dtype, const ContextSplit& split,
                             PassHalf half) {
  if (!split.is_split()) return;
  Communicator& group = split.group();
  const int64_t pair = spec.kv_heads * 2 * spec.head_size, row_bytes = pair * dtype_size(dtype);
  const bool backward = half == PassHalf::backward;
  if (split.kind() == ContextKind::all_gather) {
    const std::vector<int64_t> offsets = split.offsets(spec.batch, spec.seq);
    count_gather(group, offsets, row_bytes);
    if (backward) count_sum(group, offsets, row_bytes);
    return;
  }
  const int n = group.size(), me = group.rank();
  const auto send_on = [&](int step, int64_t bytes) {
    const int source = (me - step % n + n) % n;
    std::vector<int64_t> rows(static_cast<size_t>(n), 0);
    rows[static_cast<size_t>((me + 1) % n)] = spec.batch * split.runs(spec.seq, source).rows();
    group.traffic().all_to_all(rows, bytes);
  };
  for (int step = 0; step < n; step++) {
    if (step + 1 < n) send_on(step, row_bytes);
    if (backward) send_on(step, pair * dtype_size(stats_dtype(dtype)));
  }
}

}  // namespace shoal
