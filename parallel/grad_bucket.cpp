#include "parallel/grad_bucket.h"

#include "core/base/profiler.h"
#include "core/ops/elementwise.h"

namespace shoal {

namespace {

constexpr const char* kSection = "gradient reduction";

/// Of buckets that exist only until they are reduced; more would keep memory.
constexpr size_t kMaxInFlight = 2;

}  // namespace

GradReducer::GradReducer(const std::vector<Parameter*>& parameters, const Mesh& mesh, int64_t bucket_bytes,
                         ZeroStage stage, const std::vector<WeightUnit*>& units, bool exact)
    : parameters_(parameters), stage_(stage) {
  for (std::unique_ptr<FlatBucket>& bucket :
       FlatBucket::make_all(parameters, units, mesh, bucket_bytes, stage))
    buckets_.push_back({std::move(bucket), {}, 0});
  for (size_t b = 0; b < buckets_.size(); b++) {
    buckets_[b].bucket->allocate(stage, exact);
    const std::vector<Parameter*>& members = buckets_[b].bucket->parameters();
    for (size_t i = 0; i < members.size(); i++) {
      Parameter* p = members[i];
      p->leaf.on_grad_ready = [this, b, i, p] {
        if (!reducing_) return;
        SHOAL_CHECK(!buckets_[b].ready[i], "GradReducer: the gradient of ", p->name,
                    " was already reduced; begin_last_backward() must come before the last backward only, "
                    "and begin_backward() before each");
        buckets_[b].ready[i] = true;
        on_ready(b);
      };
    }
  }
}

GradReducer::~GradReducer() {
  for (Parameter* p : parameters_) {
    p->leaf.on_grad_ready = nullptr;
    p->leaf.make_grad = nullptr;
    p->leaf.exact_sum = {};
  }
}

void GradReducer::await(const std::function<bool(const FlatBucket&)>& is_in) {
  awaited_.clear();
  for (size_t b = 0; b < buckets_.size(); b++) {
    Entry& entry = buckets_[b];
    if (!is_in(*entry.bucket)) continue;
    awaited_.push_back(b);
    entry.ready.assign(entry.bucket->parameters().size(), false);
    entry.num_waiting = entry.ready.size();
  }
  next_bucket_ = first_in_flight_ = 0;
}

void GradReducer::zero() {
  for (const Entry& entry : buckets_) entry.bucket->zero();
}

void GradReducer::begin_last_backward() {
  await([](const FlatBucket&) { return true; });
  reducing_ = true;
}

void GradReducer::begin_backward(int pipeline_stage) {
  await([&](const FlatBucket& bucket) { return bucket.pipeline_stage() == pipeline_stage; });
  reducing_ = true;
}

void GradReducer::end_backward() {
  const ProfileSection section(kSection, ProfileSection::kWhole);
  complete_all();
}

void GradReducer::on_ready(size_t bucket) {
  const ProfileSection section(kSection, ProfileSection::kWhole);
  buckets_[bucket].num_waiting--;
  start_ready_buckets(/*all=*/false);
}

void GradReducer::complete_first() {
  buckets_[awaited_[first_in_flight_++]].bucket->complete();
}

void GradReducer::complete_all() {
  start_ready_buckets(/*all=*/true);
  while (first_in_flight_ < next_bucket_) complete_first();
  reducing_ = false;
}

void GradReducer::start_ready_buckets(bool all) {
  // Those in flight move on between the layers of backward.
  for (size_t i = first_in_flight_; i < next_bucket_; i++) buckets_[awaited_[i]].bucket->test();
  while (first_in_flight_ < next_bucket_ && buckets_[awaited_[first_in_flight_]].bucket->test())
    complete_first();
  for (; next_bucket_ < awaited_.size(); next_bucket_++) {
    const Entry& entry = buckets_[awaited_[next_bucket_]];
    if (!all && entry.num_waiting > 0) return;
    if (entry.bucket->is_transient())
      while (next_bucket_ - first_in_flight_ >= kMaxInFlight) complete_first();
    entry.bucket->start_reduction();
  }
}

void GradReducer::finish() {
  const ProfileSection section(kSection, ProfileSection::kWhole);
  // Of each backward has been reduced already; without any the sums are zeros.
  if (!reducing_)
    await([this](const FlatBucket& bucket) { return !(reduces_each_backward() && bucket.has_sum()); });
  complete_all();
  for (const Entry& entry : buckets_) entry.bucket->finish();
}

std::vector<FlatBucket*> GradReducer::buckets() const {
  std::vector<FlatBucket*> all;
  for (const Entry& entry : buckets_) all.push_back(entry.bucket.get());
  return all;
}

int64_t GradReducer::num_buckets() const {
  return std::ssize(buckets_);
}

int64_t GradReducer::reduced_bytes() const {
  int64_t bytes = 0;
  for (const Entry& entry : buckets_) bytes += entry.bucket->reduced_bytes();
  return bytes;
}

namespace {

/// Calls body(gradient) for what this rank counts of the whole model's gradient, which all ranks together
/// count once.
template <class Body>
void for_own_share(const std::vector<Parameter*>& parameters, const Mesh& mesh, const Body& body) {
  for (size_t i = 0; i < parameters.size(); i++) {
    const Parameter& p = *parameters[i];
    const Communicator& replicas = mesh.replicas(p.placement);
    const Tensor grad = p.own_grad();
    const bool again = p.on_both_ends && mesh.ends().rank() > 0;  // the first stage counts it
    // Replicas with the whole gradient share the work.
    const bool mine = !again && (p.piece || static_cast<int>(i) % replicas.size() == replicas.rank());
    if (mine && grad.defined() && grad.numel() > 0) body(grad);
  }
}

}  // namespace

void add_grad_squares(const std::vector<Parameter*>& parameters, const Mesh& mesh, const Tensor& sum) {
  const ProfileSection section("gradient norm", ProfileSection::kWhole);
  for_own_share(parameters, mesh, [&](const Tensor& grad) { add_squares(grad.device(), grad, sum); });
  // Entered by configuration alone: a rank whose experts got no tokens takes part like any other.
  if (mesh.world().size() > 1) mesh.world().all_reduce(sum, ReduceOp::sum).wait();
}

void add_exact_grad_squares(const std::vector<Parameter*>& parameters, const Mesh& mesh, const Tensor& sum) {
  const ProfileSection section("gradient norm", ProfileSection::kWhole);
  const Device device = sum.device();
  const Tensor squares = Tensor::zeros({ExactSquares::kSize}, DType::i64, device);
  for_own_share(parameters, mesh, [&](const Tensor& grad) { exact_add_squares(device, grad, squares); });
  if (mesh.world().size() > 1) mesh.world().all_reduce(squares, ReduceOp::sum).wait();
  exact_squares_value(device, squares, sum);
}

double global_grad_square_sum(const std::vector<Parameter*>& parameters, const Mesh& mesh) {
  const Device device = parameters.empty() ? Device{} : parameters[0]->value.device();
  const Tensor sum = Tensor::zeros({1}, DType::f64, device);
  add_grad_squares(parameters, mesh, sum);
  return sum.item();
}

}  // namespace shoal
