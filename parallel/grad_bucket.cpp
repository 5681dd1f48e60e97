#include "parallel/grad_bucket.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/base/profiler.h"
#include "core/ops/elementwise.h"

namespace shoal {

namespace {

constexpr const char* kSection = "gradient reduction";

constexpr int64_t kAlignElements = 16;  // gradients start on a 64-byte boundary

int64_t aligned(int64_t elements) {
  return (elements + kAlignElements - 1) / kAlignElements * kAlignElements;
}

DType grad_dtype(const Parameter& p) {
  return p.value.dtype() == DType::f64 ? DType::f64 : DType::f32;
}

}  // namespace

struct GradReducer::Bucket {
  Communicator* group = nullptr;
  Communicator* ends = nullptr;  // a second sum, over pipeline stages that both hold the parameters
  DType dtype = DType::f32;
  Device device;
  int64_t num_elements = 0;
  int64_t largest_bytes = 0;  // of any rank's
  std::vector<Parameter*> parameters;
  std::vector<int64_t> offsets;
  std::vector<bool> ready;
  size_t num_waiting = 0;  // parameters not ready yet
  Tensor flat;
  Work work;

  int64_t bytes() const { return num_elements * dtype_size(dtype); }
  void add(Parameter* p) {
    parameters.push_back(p);
    offsets.push_back(num_elements);
    num_elements += aligned(p->value.numel());
  }
  void allocate() {
    flat = group->size() > 1 ? group->shared_zeros({num_elements}, dtype, device)
                             : Tensor::zeros({num_elements}, dtype, device);
    for (size_t i = 0; i < parameters.size(); i++) {
      Parameter& p = *parameters[i];
      p.leaf.grad_dtype = dtype;
      p.leaf.grad = flat.flat(offsets[i], p.value.numel()).view(p.value.shape());
    }
    ready.assign(parameters.size(), false);
    num_waiting = parameters.size();
  }
};

GradReducer::GradReducer(const std::vector<Parameter*>& parameters, const Mesh& mesh, int64_t bucket_bytes)
    : parameters_(parameters) {
  SHOAL_CHECK(bucket_bytes > 0, "GradReducer: expected bucket_bytes > 0, got ", bucket_bytes);
  // One bucket is open per kind; a bucket is reduced when its last parameter is ready, so buckets are
  // numbered in the order in which they were closed.
  using Kind = std::tuple<Communicator*, Communicator*, DType>;
  std::vector<std::pair<Kind, std::unique_ptr<Bucket>>> open;
  auto open_bucket = [&](const Kind& kind) -> std::unique_ptr<Bucket>& {  // in the same order on every rank
    for (auto& [its_kind, bucket] : open) {
      if (its_kind == kind) return bucket;
    }
    return open.emplace_back(kind, nullptr).second;
  };
  auto close = [&](std::unique_ptr<Bucket>& bucket) { buckets_.push_back(std::move(bucket)); };
  AxisCoords first = mesh.coords();
  for (AxisCoord& coord : first.coords) coord.index = 0;
  for (auto it = parameters.rbegin(); it != parameters.rend(); ++it) {
    Parameter* p = *it;
    if (!p->held) {
      p->leaf.grad = Tensor::empty(p->value.shape(), grad_dtype(*p), p->value.device());
      continue;
    }
    Communicator* ends = p->on_both_ends ? &mesh.ends() : nullptr;
    Communicator& group = mesh.replicas(p->placement);
    const DType dtype = grad_dtype(*p);
    std::unique_ptr<Bucket>& bucket = open_bucket({&group, ends, dtype});
    // By the sizes of the ranks with the largest parts: buckets hold the same parameters on all ranks, which
    // then reduce them at the same places of their tapes, whatever their own parts.
    const int64_t bytes = aligned(box_of(p->global_shape, p->placement, first).numel()) * dtype_size(dtype);
    if (bucket && bucket->largest_bytes + bytes > bucket_bytes) close(bucket);
    if (!bucket) {
      bucket = std::make_unique<Bucket>();
      bucket->group = &group;
      bucket->ends = ends;
      bucket->dtype = dtype;
      bucket->device = p->value.device();
    }
    bucket->largest_bytes += bytes;
    bucket->add(p);
  }
  for (auto& [kind, bucket] : open) close(bucket);
  for (size_t b = 0; b < buckets_.size(); b++) {
    buckets_[b]->allocate();
    for (size_t i = 0; i < buckets_[b]->parameters.size(); i++) {
      Parameter* p = buckets_[b]->parameters[i];
      p->leaf.on_grad_ready = [this, b, i, p] {
        if (!reducing_) return;
        SHOAL_CHECK(!buckets_[b]->ready[i], "GradReducer: the gradient of ", p->name,
                    " was already reduced; begin_last_backward() must come before the last backward only");
        buckets_[b]->ready[i] = true;
        on_ready(b);
      };
    }
  }
}

GradReducer::~GradReducer() {
  for (Parameter* p : parameters_) p->leaf.on_grad_ready = nullptr;
}

void GradReducer::zero() {
  for (Parameter* p : parameters_) p->leaf.grad_is_zero = true;
}

void GradReducer::begin_last_backward() {
  for (const auto& bucket : buckets_) {
    bucket->ready.assign(bucket->parameters.size(), false);
    bucket->num_waiting = bucket->parameters.size();
  }
  next_bucket_ = 0;
  reducing_ = true;
}

void GradReducer::on_ready(size_t bucket) {
  const ProfileSection section(kSection, ProfileSection::kWhole);
  buckets_[bucket]->num_waiting--;
  start_ready_buckets(/*all=*/false);
}

void GradReducer::start_ready_buckets(bool all) {
  // Those in flight move on between the layers of backward.
  for (size_t b = 0; b < next_bucket_; b++) buckets_[b]->work.test();
  for (; next_bucket_ < buckets_.size(); next_bucket_++) {
    Bucket& bucket = *buckets_[next_bucket_];
    if (!all && bucket.num_waiting > 0) return;
    // What no backward has written is zero now.
    for (Parameter* p : bucket.parameters) p->leaf.grad_buffer(p->value.shape(), bucket.device);
    if (bucket.group->size() > 1) bucket.work = bucket.group->all_reduce(bucket.flat, ReduceOp::sum);
  }
}

void GradReducer::finish() {
  const ProfileSection section(kSection, ProfileSection::kWhole);
  if (!reducing_) next_bucket_ = 0;
  start_ready_buckets(/*all=*/true);
  for (const auto& bucket : buckets_) bucket->work.wait();
  for (const auto& bucket : buckets_) {
    if (bucket->ends != nullptr) bucket->ends->all_reduce(bucket->flat, ReduceOp::sum).wait();
  }
  reducing_ = false;
}

int64_t GradReducer::num_buckets() const {
  return std::ssize(buckets_);
}

int64_t GradReducer::reduced_bytes() const {
  int64_t bytes = 0;
  for (const auto& bucket : buckets_) {
    bytes += bucket->group->size() > 1 ? bucket->bytes() : 0;
    bytes += bucket->ends != nullptr ? bucket->bytes() : 0;
  }
  return bytes;
}

void add_grad_squares(const std::vector<Parameter*>& parameters, const Mesh& mesh, const Tensor& sum) {
  const ProfileSection section("gradient norm", ProfileSection::kWhole);
  for (size_t i = 0; i < parameters.size(); i++) {
    const Communicator& replicas = mesh.replicas(parameters[i]->placement);
    const Tensor& grad = parameters[i]->leaf.grad;
    const bool again = parameters[i]->on_both_ends && mesh.ends().rank() > 0;  // the first stage counts it
    const bool mine = !again && static_cast<int>(i) % replicas.size() == replicas.rank();  // shared work
    if (mine && grad.defined()) add_squares(grad.device(), grad, sum);
  }
  // Entered by configuration alone: a rank whose experts got no tokens takes part like any other.
  if (mesh.world().size() > 1) mesh.world().all_reduce(sum, ReduceOp::sum).wait();
}

double global_grad_square_sum(const std::vector<Parameter*>& parameters, const Mesh& mesh) {
  const Device device = parameters.empty() ? Device{} : parameters[0]->value.device();
  const Tensor sum = Tensor::zeros({1}, DType::f64, device);
  add_grad_squares(parameters, mesh, sum);
  return sum.item();
}

}  // namespace shoal
