#include "parallel/collective_ops.h"

#include <numeric>
#include <utility>

#include "core/autograd/tape.h"

namespace shoal {

namespace {

/// The gradient itself when nobody else holds it, else a copy: the collectives below work in place.
Tensor own_gradient(const std::vector<Tensor>& dy) {
  return dy[0].is_sole_owner() ? dy[0] : dy[0].clone();
}

Shape with_rows(const Tensor& x, int64_t rows) {
  Shape shape = x.shape();
  SHOAL_CHECK(shape.dims() >= 1, "collective: expected a tensor with rows, got a scalar");
  shape.set(0, rows);
  return shape;
}

bool equal_parts(const std::vector<int64_t>& offsets) {
  for (size_t r = 1; r < offsets.size(); r++) {
    if (offsets[r] - offsets[r - 1] != offsets[1]) return false;
  }
  return true;
}

}  // namespace

void count_gather(Communicator& group, const std::vector<int64_t>& offsets, int64_t row_bytes) {
  if (equal_parts(offsets)) return group.traffic().all_gather(offsets[1] * row_bytes);
  for (int r = 0; r < group.size(); r++) {
    const auto i = static_cast<size_t>(r);
    group.traffic().broadcast((offsets[i + 1] - offsets[i]) * row_bytes, r);
  }
}

void count_sum(Communicator& group, const std::vector<int64_t>& offsets, int64_t row_bytes) {
  if (equal_parts(offsets)) return group.traffic().reduce_scatter(offsets[1] * row_bytes);
  group.traffic().all_reduce(offsets.back() * row_bytes);
}

std::vector<int64_t> gather_row_offsets(int64_t rows, Communicator& group) {
  const Tensor mine = Tensor::from(std::vector<int64_t>{rows}, {1});
  const Tensor all = Tensor::empty({group.size()}, DType::i64);
  group.all_gather(mine, all).wait();
  std::vector<int64_t> offsets(static_cast<size_t>(group.size()) + 1, 0);
  const int64_t* counts = all.data<int64_t>();
  std::partial_sum(counts, counts + group.size(), offsets.begin() + 1);
  return offsets;
}

Tensor gather_all_rows(const Tensor& x, Communicator& group, const std::vector<int64_t>& offsets) {
  const Tensor y = Tensor::empty(with_rows(x, offsets.back()), x.dtype(), x.device());
  if (equal_parts(offsets)) {
    group.all_gather(x, y).wait();
    return y;
  }
  std::vector<Work> works;
  for (int r = 0; r < group.size(); r++) {
    const auto i = static_cast<size_t>(r);
    const Tensor part = y.rows(offsets[i], offsets[i + 1]);
    if (r == group.rank()) part.copy_from(x);
    works.push_back(group.broadcast(part, r));
  }
  for (Work& work : works) work.wait();
  return y;
}

namespace {

struct CopyTo final : Function {
  explicit CopyTo(Communicator& group) : group(&group) {}
  Communicator* group;
  const char* name() const override { return "copy_to"; }
  Tensor forward(const Tensor& x) { return x; }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    const Tensor dx = own_gradient(dy);
    group->all_reduce(dx, ReduceOp::sum).wait();
    return {dx};
  }
};

struct ReduceFrom final : Function {
  explicit ReduceFrom(Communicator& group) : group(&group) {}
  Communicator* group;
  const char* name() const override { return "reduce_from"; }
  Tensor forward(const Tensor& x) {
    const Tensor y = x.clone();
    group->all_reduce(y, ReduceOp::sum).wait();
    return y;
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override { return {dy[0]}; }
};

}  // namespace

Tensor sum_rows_of_rank(const Tensor& x, Communicator& group, const std::vector<int64_t>& offsets) {
  const auto me = static_cast<size_t>(group.rank());
  const int64_t begin = offsets[me], end = offsets[me + 1];
  if (equal_parts(offsets)) {
    const Tensor y = Tensor::empty(with_rows(x, end - begin), x.dtype(), x.device());
    group.reduce_scatter(x, y, ReduceOp::sum).wait();
    return y;
  }
  group.all_reduce(x, ReduceOp::sum).wait();
  return x.rows(begin, end).clone();
}

namespace {

/// The same, of something that others may read.
Tensor sum_own_rows(const Tensor& x, bool own, Communicator& group, const std::vector<int64_t>& offsets) {
  return sum_rows_of_rank(own || equal_parts(offsets) ? x : x.clone(), group, offsets);
}

struct Gather final : Function {
  Gather(Communicator& group, bool sharded, std::vector<int64_t> offsets)
      : group(&group), sharded(sharded), offsets(std::move(offsets)) {}
  Communicator* group;
  bool sharded;  // the consumers do different work, so their gradients are summed
  std::vector<int64_t> offsets;
  const char* name() const override { return sharded ? "gather_sharded" : "gather_replicated"; }

  Tensor forward(const Tensor& x) { return gather_all_rows(x, *group, offsets); }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    if (sharded) return {sum_own_rows(dy[0], dy[0].is_sole_owner(), *group, offsets)};
    const auto me = static_cast<size_t>(group->rank());
    return {dy[0].rows(offsets[me], offsets[me + 1]).clone()};
  }
};

struct ReduceScatter final : Function {
  ReduceScatter(Communicator& group, std::vector<int64_t> offsets)
      : group(&group), offsets(std::move(offsets)) {}
  Communicator* group;
  std::vector<int64_t> offsets;
  const char* name() const override { return "reduce_scatter"; }
  Tensor forward(const Tensor& x) { return sum_own_rows(x, false, *group, offsets); }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    return {gather_all_rows(dy[0], *group, offsets)};
  }
};

std::vector<int64_t> equal_offsets(const Tensor& x, Communicator& group) {
  const int64_t n = group.size();
  SHOAL_CHECK(x.dims() >= 1 && x.size(0) % n == 0, "reduce_scatter [", group.name(), "]: the rows of ",
              x.shape(), " must divide by the group size ", n);
  std::vector<int64_t> offsets;
  for (int64_t r = 0; r <= n; r++) offsets.push_back(x.size(0) / n * r);
  return offsets;
}

}  // namespace

Tensor copy_to(const Tensor& x, Communicator& group) {
  return apply(CopyTo(group), x);
}
Tensor reduce_from(const Tensor& x, Communicator& group) {
  return apply(ReduceFrom(group), x);
}
Tensor gather_replicated(const Tensor& x, Communicator& group) {
  return gather_replicated(x, group, gather_row_offsets(x.size(0), group));
}
Tensor gather_sharded(const Tensor& x, Communicator& group) {
  return gather_sharded(x, group, gather_row_offsets(x.size(0), group));
}
Tensor reduce_scatter(const Tensor& x, Communicator& group) {
  return reduce_scatter(x, group, equal_offsets(x, group));
}
Tensor gather_replicated(const Tensor& x, Communicator& group, std::vector<int64_t> offsets) {
  return apply(Gather(group, /*sharded=*/false, std::move(offsets)), x);
}
Tensor gather_sharded(const Tensor& x, Communicator& group, std::vector<int64_t> offsets) {
  return apply(Gather(group, /*sharded=*/true, std::move(offsets)), x);
}
Tensor reduce_scatter(const Tensor& x, Communicator& group, std::vector<int64_t> offsets) {
  return apply(ReduceScatter(group, std::move(offsets)), x);
}

/// Shared by the two records of one exchange: the pair of tensors and the work, forward and then backward.
class Exchange {
 public:
  Exchange(Communicator& group, std::vector<int64_t> send_rows, std::vector<int64_t> recv_rows)
      : group_(&group), send_rows_(std::move(send_rows)), recv_rows_(std::move(recv_rows)) {}

  void start(const Tensor& x) {
    result_ = Tensor::empty(with_rows(x, total(recv_rows_)), x.dtype(), x.device());
    work_ = group_->all_to_all(x, result_, send_rows_, recv_rows_);
  }
  void start_reverse(const Tensor& dy) {
    result_ = Tensor::empty(with_rows(dy, total(send_rows_)), dy.dtype(), dy.device());
    work_ = group_->all_to_all(dy, result_, recv_rows_, send_rows_);
  }
  Tensor finish() {
    SHOAL_CHECK(result_.defined(), "all_to_all_wait [", group_->name(), "]: nothing was started");
    work_.wait();
    return std::exchange(result_, Tensor{});
  }

 private:
  static int64_t total(const std::vector<int64_t>& rows) {
    return std::accumulate(rows.begin(), rows.end(), int64_t{0});
  }
  Communicator* group_;
  std::vector<int64_t> send_rows_, recv_rows_;
  Tensor result_;
  Work work_;
};

namespace {

struct AllToAllStart final : Function {
  explicit AllToAllStart(std::shared_ptr<Exchange> exchange) : exchange(std::move(exchange)) {}
  std::shared_ptr<Exchange> exchange;
  const char* name() const override { return "all_to_all_start"; }
  Tensor forward(const Tensor& x) {
    exchange->start(x);
    return Tensor::empty({0}, x.dtype(), x.device());
  }
  std::vector<Tensor> backward(const std::vector<Tensor>&) override { return {exchange->finish()}; }
};

struct AllToAllWait final : Function {
  explicit AllToAllWait(std::shared_ptr<Exchange> exchange) : exchange(std::move(exchange)) {}
  std::shared_ptr<Exchange> exchange;
  const char* name() const override { return "all_to_all_wait"; }
  Tensor forward(const Tensor&) { return exchange->finish(); }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    exchange->start_reverse(dy[0]);
    return {Tensor::empty({0}, dy[0].dtype(), dy[0].device())};
  }
};

}  // namespace

StartedExchange all_to_all_start(const Tensor& x, Communicator& group, std::vector<int64_t> send_rows,
                                 std::vector<int64_t> recv_rows) {
  auto exchange = std::make_shared<Exchange>(group, std::move(send_rows), std::move(recv_rows));
  const Tensor handle = apply(AllToAllStart(exchange), x);
  return {handle, exchange};
}

Tensor all_to_all_wait(const StartedExchange& started) {
  return apply(AllToAllWait(started.exchange), started.handle);
}

}  // namespace shoal
