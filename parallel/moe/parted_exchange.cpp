#include "parallel/moe/parted_exchange.h"

#include <numeric>
#include <utility>

#include "core/autograd/tape.h"

namespace shoal {

namespace {

int64_t total(const std::vector<int64_t>& rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0});
}

Tensor new_handle(const Tensor& like) {
  return Tensor::empty({0}, like.dtype(), like.device());
}

}  // namespace

PartedExchange::PartedExchange(Communicator& group, std::vector<PartRows> parts) : group_(&group) {
  for (PartRows& rows : parts) {
    Part part;
    part.first = num_rows_;
    part.num_sent = total(rows.send_rows);
    part.num_received = total(rows.recv_rows);
    part.rows = std::move(rows);
    num_rows_ += part.num_sent;
    parts_.push_back(std::move(part));
  }
}

void PartedExchange::spread(const Tensor& x_ND, bool last_first) {
  SHOAL_CHECK(x_ND.size(0) == num_rows_, "exchange in parts [", group_->name(), "]: expected ", num_rows_,
              " rows, got ", x_ND.shape());
  for (int64_t i = 0; i < num_parts(); i++) {
    Part& part = parts_[static_cast<size_t>(last_first ? num_parts() - 1 - i : i)];
    part.received = Tensor::empty({part.num_received, x_ND.size(1)}, x_ND.dtype(), x_ND.device());
    part.coming = group_->all_to_all(x_ND.rows(part.first, part.first + part.num_sent), part.received,
                                     part.rows.send_rows, part.rows.recv_rows);
  }
}

Tensor PartedExchange::arrive(int64_t part) {
  Part& p = parts_.at(static_cast<size_t>(part));
  SHOAL_CHECK(p.received.defined(), "exchange in parts [", group_->name(), "]: part ", part,
              " was not started, or has arrived already");
  p.coming.wait();
  return std::exchange(p.received, Tensor{});
}

void PartedExchange::send_back(int64_t part, const Tensor& y_RD) {
  Part& p = parts_.at(static_cast<size_t>(part));
  if (!collected_.defined())
    collected_ = Tensor::empty({num_rows_, y_RD.size(1)}, y_RD.dtype(), y_RD.device());
  p.going = group_->all_to_all(y_RD, collected_.rows(p.first, p.first + p.num_sent), p.rows.recv_rows,
                               p.rows.send_rows);
}

Tensor PartedExchange::collect() {
  SHOAL_CHECK(collected_.defined(), "exchange in parts [", group_->name(), "]: nothing was sent back");
  for (Part& part : parts_) part.going.wait();
  return std::exchange(collected_, Tensor{});
}

namespace {

struct Spread final : Function {
  explicit Spread(SharedExchange exchange) : exchange(std::move(exchange)) {}
  SharedExchange exchange;
  const char* name() const override { return "spread_rows"; }
  std::vector<Tensor> forward(const Tensor& x) {
    exchange->spread(x, /*last_first=*/false);
    std::vector<Tensor> handles;
    for (int64_t part = 0; part < exchange->num_parts(); part++) handles.push_back(new_handle(x));
    return handles;
  }
  std::vector<Tensor> backward(const std::vector<Tensor>&) override { return {exchange->collect()}; }
};

struct Arrive final : Function {
  Arrive(SharedExchange exchange, int64_t part) : exchange(std::move(exchange)), part(part) {}
  SharedExchange exchange;
  int64_t part;
  const char* name() const override { return "arrived_rows"; }
  Tensor forward(const Tensor&) { return exchange->arrive(part); }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    exchange->send_back(part, dy[0]);
    return {new_handle(dy[0])};
  }
};

struct SendBack final : Function {
  SendBack(SharedExchange exchange, int64_t part) : exchange(std::move(exchange)), part(part) {}
  SharedExchange exchange;
  int64_t part;
  const char* name() const override { return "send_rows_back"; }
  Tensor forward(const Tensor& y, const Tensor&) {
    exchange->send_back(part, y);
    return new_handle(y);
  }
  std::vector<Tensor> backward(const std::vector<Tensor>&) override {
    const Tensor dy = exchange->arrive(part);
    return {dy, needs_grad(1) ? new_handle(dy) : Tensor{}};
  }
};

struct Collect final : Function {
  explicit Collect(SharedExchange exchange) : exchange(std::move(exchange)) {}
  SharedExchange exchange;
  const char* name() const override { return "collect_rows"; }
  Tensor forward(const Tensor&) { return exchange->collect(); }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    exchange->spread(dy[0], /*last_first=*/true);
    return {new_handle(dy[0])};
  }
};

}  // namespace

std::vector<Tensor> spread_rows(const SharedExchange& exchange, const Tensor& x_ND) {
  return apply(Spread(exchange), x_ND);
}
Tensor arrived_rows(const SharedExchange& exchange, int64_t part, const Tensor& handle) {
  return apply(Arrive(exchange, part), handle);
}
Tensor send_rows_back(const SharedExchange& exchange, int64_t part, const Tensor& y_RD,
                      const Tensor& before) {
  return apply(SendBack(exchange, part), y_RD, before);
}
Tensor collect_rows(const SharedExchange& exchange, const Tensor& handle) {
  return apply(Collect(exchange), handle);
}

}  // namespace shoal
