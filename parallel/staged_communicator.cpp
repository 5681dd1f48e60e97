#include "parallel/staged_communicator.h"

#include <utility>

#include "core/tensor/stream.h"
#include "parallel/checked_communicator.h"

namespace shoal {

namespace {

/// A copy on the host that other ranks may read at once.
Tensor to_host(const Tensor& x) {
  const Tensor host = Tensor::empty(x.shape(), x.dtype());
  host.copy_from(x);
  Event copied;
  copied.record(current_stream(x.device()));
  copied.host_wait();
  return host;
}

struct StagedWork final : Work::Impl {
  StagedWork(Work work, Tensor staged, Tensor out)
      : work(std::move(work)), staged(std::move(staged)), out(std::move(out)) {}
  void wait() override {
    work.wait();
    out.copy_from(staged);
  }
  bool test() override { return work.test(); }
  Work work;
  Tensor staged, out;
};

class StagedCommunicator final : public CheckedCommunicator {
 public:
  StagedCommunicator(std::shared_ptr<Communicator> host, WrapGroup wrap)
      : CheckedCommunicator(host->rank(), host->size(), host->name()),
        host_(std::move(host)),
        wrap_(std::move(wrap)) {}

  bool carries(Device) const override { return true; }
  void barrier() override { host_->barrier(); }
  Tensor shared_zeros(const Shape& shape, DType dtype, Device device) override {
    return host_->shared_zeros(shape, dtype, device);
  }
  std::shared_ptr<Communicator> split(int color, int key, const std::string& name) override {
    std::shared_ptr<Communicator> part = host_->split(color, key, name);
    return wrap_ ? wrap_(std::move(part)) : stage_device_tensors(std::move(part));
  }

 protected:
  Work start(CollectiveCall call) override {
    if (call.on_cpu()) return forward_call(*host_, call);
    const Tensor out = call.out;
    const CollectiveKind kind = call.signature.kind;
    const bool in_place = kind == CollectiveKind::all_reduce || kind == CollectiveKind::broadcast;
    const bool sends = kind != CollectiveKind::broadcast || call.signature.root == rank();
    call.in = sends ? to_host(call.in) : Tensor::empty(call.in.shape(), call.in.dtype());
    call.out = in_place ? call.in : Tensor::empty(out.shape(), out.dtype());
    Work work = forward_call(*host_, call);
    return Work(std::make_unique<StagedWork>(std::move(work), call.out, out));
  }

 private:
  std::shared_ptr<Communicator> host_;
  WrapGroup wrap_;
};

}  // namespace

std::shared_ptr<Communicator> stage_device_tensors(std::shared_ptr<Communicator> host, WrapGroup wrap) {
  if (host->size() == 1) return host;  // copies locally, on any device
  return std::make_shared<StagedCommunicator>(std::move(host), std::move(wrap));
}

}  // namespace shoal
