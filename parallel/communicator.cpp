#include "parallel/communicator.h"

#include <algorithm>
#include <cstring>

#include "parallel/checked_communicator.h"

namespace shoal {

namespace {

/// The ranks of the group that this rank gets into, in their new order.
std::vector<int> members_of(const Communicator& all,
                            const std::function<Communicator::Place(int rank)>& place_of) {
  const int color = place_of(all.rank()).color;
  std::vector<std::pair<int, int>> members;  // key, rank
  for (int r = 0; r < all.size(); r++) {
    const Communicator::Place place = place_of(r);
    if (place.color == color) members.emplace_back(place.key, r);
  }
  std::ranges::sort(members);
  std::vector<int> ranks;
  for (const auto& [key, rank] : members) ranks.push_back(rank);
  return ranks;
}

/// Everything happens in CheckedCommunicator, which copies locally.
class SingleCommunicator final : public CheckedCommunicator {
 public:
  explicit SingleCommunicator(const std::string& name) : CheckedCommunicator(0, 1, name) {}
  void barrier() override {}
  std::shared_ptr<Communicator> split(int, int, const std::string& name) override {
    return std::make_shared<SingleCommunicator>(name);
  }

 protected:
  Work start(CollectiveCall) override { return Work{}; }
};

[[noreturn]] void refuse_call(const std::string& name) {
  throw Error(str("communicator [", name, "]: its ranks are imagined; calls need ranks that run"));
}

class ImaginedCommunicator final : public CheckedCommunicator {
 public:
  using CheckedCommunicator::CheckedCommunicator;
  bool carries(Device) const override { return true; }
  void barrier() override { refuse_call(name()); }
  std::shared_ptr<Communicator> split(int, int, const std::string&) override { refuse_call(name()); }
  std::shared_ptr<Communicator> split_by(const std::function<Place(int rank)>& place_of,
                                         const std::string& name) override {
    const std::vector<int> members = members_of(*this, place_of);
    const auto me = std::ranges::find(members, rank()) - members.begin();
    auto group = make_imagined_communicator(static_cast<int>(me), static_cast<int>(members.size()), name);
    group->traffic().join(traffic(), members);
    return group;
  }

 protected:
  Work start(CollectiveCall) override { refuse_call(name()); }
};

template <class T>
T reduce_value(Communicator& group, T value, ReduceOp op) {
  const Tensor t = Tensor::from(std::vector<T>{value}, {1});
  group.all_reduce(t, op).wait();
  return t.data<T>()[0];
}

}  // namespace

int64_t Communicator::sum(int64_t value) {
  return reduce_value(*this, value, ReduceOp::sum);
}
double Communicator::sum(double value) {
  return reduce_value(*this, value, ReduceOp::sum);
}
int64_t Communicator::max(int64_t value) {
  return reduce_value(*this, value, ReduceOp::max);
}
int64_t Communicator::min(int64_t value) {
  return reduce_value(*this, value, ReduceOp::min);
}

std::vector<std::string> Communicator::gather_strings(const std::string& mine) {
  const Tensor length = Tensor::from(std::vector<int64_t>{static_cast<int64_t>(mine.size())}, {1});
  const Tensor lengths = Tensor::empty({size()}, DType::i64);
  all_gather(length, lengths).wait();
  const int64_t* n = lengths.data<int64_t>();
  const int64_t longest = *std::max_element(n, n + size());
  const Tensor padded = Tensor::zeros({longest}, DType::u8);
  std::memcpy(padded.bytes(), mine.data(), mine.size());
  const Tensor all = Tensor::empty({size(), longest}, DType::u8);
  all_gather(padded, all).wait();
  std::vector<std::string> strings;
  for (int r = 0; r < size(); r++) {
    strings.emplace_back(reinterpret_cast<const char*>(all.bytes()) + r * longest, static_cast<size_t>(n[r]));
  }
  return strings;
}

std::string Communicator::broadcast_string(const std::string& value, int root) {
  const Tensor length = Tensor::from(std::vector<int64_t>{static_cast<int64_t>(value.size())}, {1});
  broadcast(length, root).wait();
  const int64_t n = length.data<int64_t>()[0];
  const Tensor text = Tensor::empty({n}, DType::u8);
  if (rank() == root) std::memcpy(text.bytes(), value.data(), value.size());
  broadcast(text, root).wait();
  return {reinterpret_cast<const char*>(text.bytes()), static_cast<size_t>(n)};
}

std::shared_ptr<Communicator> Communicator::split_by(const std::function<Place(int rank)>& place_of,
                                                     const std::string& name) {
  const Place mine = place_of(rank());
  std::shared_ptr<Communicator> group = split(mine.color, mine.key, name);
  group->traffic().join(traffic(), members_of(*this, place_of));
  return group;
}

std::shared_ptr<Communicator> make_imagined_communicator(int rank, int size, const std::string& name) {
  return std::make_shared<ImaginedCommunicator>(rank, size, name);
}

std::shared_ptr<Communicator> make_single_communicator() {
  return std::make_shared<SingleCommunicator>("world");
}

}  // namespace shoal
