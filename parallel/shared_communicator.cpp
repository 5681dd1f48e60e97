#include "parallel/shared_communicator.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <sstream>
#include <string_view>
#include <thread>

#include "core/base/log.h"
#include "parallel/checked_communicator.h"
#include "parallel/collective_check.h"
#include "parallel/shared_group.h"

namespace shoal {

namespace {

/// A group and one of its calls, which needs it.
struct HeldCall {
  std::shared_ptr<SharedGroup> group;
  std::shared_ptr<AwaitedCall> call;
};

class SharedCommunicator final : public CheckedCommunicator {
 public:
  /// group: null when the calls go through `base`.
  SharedCommunicator(std::shared_ptr<Communicator> base, std::shared_ptr<SharedGroup> group,
                     std::vector<int> world_ranks)
      : CheckedCommunicator(base->rank(), base->size(), base->name()),
        base_(std::move(base)),
        group_(std::move(group)),
        world_ranks_(std::move(world_ranks)) {}

  bool shares() const { return group_ != nullptr; }
  void barrier() override {
    if (size() > 1) start(CollectiveCall{}).wait();
  }
  std::shared_ptr<Communicator> split(int color, int key, const std::string& name) override;
  bool carries(Device device) const override { return base_->carries(device); }
  Tensor shared_zeros(const Shape& shape, DType dtype, Device device) override;

 protected:
  Work start(CollectiveCall call) override {
    // Device memory is not shared: what base_ carries of it, it carries itself.
    if (group_ == nullptr || !call.on_cpu()) return forward_call(*base_, call);
    if (collective_checks_enabled()) {
      compare_calls({size(), name(), group_->num_calls() / 2,
                     [this](CollectiveCall gather) { return begin(std::move(gather)); }},
                    call);
    }
    return begin(std::move(call));
  }

 private:
  Work begin(CollectiveCall call) {
    SHOAL_CHECK(std::this_thread::get_id() == thread_, group_->where(call.signature.text()),
                ": expected the thread that started MPI, got another one; collect in that thread what others "
                "have to send");
    auto held = std::make_shared<HeldCall>(HeldCall{group_, group_->start(std::move(call))});
    add_open_calls(group_);
    return work_for(std::shared_ptr<AwaitedCall>(held, held->call.get()));
  }

  std::shared_ptr<Communicator> base_;
  std::shared_ptr<SharedGroup> group_;
  std::vector<int> world_ranks_;
  std::thread::id thread_ = std::this_thread::get_id();
};

Tensor SharedCommunicator::shared_zeros(const Shape& shape, DType dtype, Device device) {
  const int64_t bytes = shape.numel() * dtype_size(dtype);
  if (group_ == nullptr || bytes == 0 || device.type != DeviceType::cpu)
    return Tensor::zeros(shape, dtype, device);
  barrier();  // before the waits of base_, which move none of this group's calls
  std::string why;
  const std::shared_ptr<SharedSegment> memory = SharedSegment::create(*base_, bytes, &why);
  if (!memory) {
    static std::atomic<bool> warned = false;
    if (rank() == 0 && !warned.exchange(true)) log::warn("sums of gradients go through copies: ", why);
    return Tensor::zeros(shape, dtype);
  }
  group_->add_region(memory);
  return Tensor::over(memory, memory->part(rank()), shape, dtype);
}

/// Whether each rank can read the memory of all others, tried on a value that only its owner has.
bool can_read_peers(Communicator& base, const std::vector<PeerMemory>& peers) {
  permit_memory_reads();
  const int64_t value = 0x5ca1ab1e + base.rank();
  const std::vector<std::string> addresses = base.gather_strings(str(reinterpret_cast<uintptr_t>(&value)));
  bool all = true;
  for (int r = 0; r < base.size(); r++) {
    const auto* address = reinterpret_cast<const std::byte*>(
        std::strtoull(addresses[static_cast<size_t>(r)].c_str(), nullptr, 10));
    int64_t got = 0;
    all &= peers[static_cast<size_t>(r)].read(reinterpret_cast<std::byte*>(&got), address, sizeof got) &&
           got == 0x5ca1ab1e + r;
  }
  return base.all_true(all);
}

/// The processes of all ranks; empty when they are not on one host.
std::vector<PeerMemory> find_peers(Communicator& base) {
  std::vector<PeerMemory> peers;
  std::string first;
  for (const std::string& text : base.gather_strings(str(getpid(), ' ', memory_domain()))) {
    std::istringstream in(text);
    pid_t process = 0;
    std::string domain;
    in >> process >> std::ws;
    std::getline(in, domain);
    if (peers.empty()) first = domain;
    if (domain.empty() || domain != first) return {};
    peers.emplace_back(process);
  }
  return peers;
}

/// Null when the ranks are on several hosts, or when memory cannot be shared; *why says why not.
std::shared_ptr<SharedGroup> make_group(Communicator& base, const std::vector<int>& world_ranks,
                                        std::string* why) {
  SharedGroupFacts facts{base.rank(), base.size(),      base.name(),
                         world_ranks, find_peers(base), shared_limits()};
  if (facts.peers.empty()) return nullptr;
  const int64_t part_bytes = SharedGroup::plan_part(facts.size, facts.limits);
  std::shared_ptr<SharedSegment> segment = SharedSegment::create(base, part_bytes, why);
  if (!segment) return nullptr;
  facts.limits.single_copy = facts.limits.single_copy && can_read_peers(base, facts.peers);
  return std::make_shared<SharedGroup>(std::move(facts), std::move(segment));
}

std::shared_ptr<Communicator> share_with(std::shared_ptr<Communicator> base, int world_rank) {
  if (base->size() == 1) return base;
  const Tensor ranks = Tensor::empty({base->size()}, DType::i32);
  base->all_gather(Tensor::from(std::vector<int32_t>{world_rank}, {1}), ranks).wait();
  const std::vector<int32_t> world_ranks = ranks.to_vector<int32_t>();
  std::string why;
  std::shared_ptr<SharedGroup> group = make_group(*base, world_ranks, &why);
  static std::atomic<bool> warned = false;
  if (!why.empty() && base->rank() == 0 && !warned.exchange(true))
    log::warn("collectives over shared memory are off: ", why, "; MPI is used, which is slower");
  return std::make_shared<SharedCommunicator>(std::move(base), std::move(group), world_ranks);
}

std::shared_ptr<Communicator> SharedCommunicator::split(int color, int key, const std::string& name) {
  // Everything that others still need of this rank's earlier calls is done when this is.
  if (group_ != nullptr) {
    CollectiveCall call;
    call.signature.kind = CollectiveKind::split;
    start(std::move(call)).wait();
  }
  return share_with(base_->split(color, key, name), world_ranks_[static_cast<size_t>(rank())]);
}

}  // namespace

bool shared_collectives_wanted() {
  const char* text = std::getenv("SHOAL_COLLECTIVES");
  const std::string_view value = text == nullptr ? "" : text;
  if (value.empty() || value == "auto") return true;
  if (value == "mpi") return false;
  throw UsageError(
      str("SHOAL_COLLECTIVES: expected auto (shared memory between ranks of one host) or mpi, got '", value,
          "'"));
}

std::shared_ptr<Communicator> share_memory(std::shared_ptr<Communicator> world) {
  const int rank = world->rank();
  return share_with(std::move(world), rank);
}

bool uses_shared_memory(const Communicator& group) {
  const auto* shared = dynamic_cast<const SharedCommunicator*>(&group);
  return shared != nullptr && shared->shares();
}

}  // namespace shoal
