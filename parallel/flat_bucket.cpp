#include "parallel/flat_bucket.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/autograd/accumulate.h"

namespace shoal {

namespace {

constexpr int64_t kAlignElements = 16;  // gradients and pieces start on a 64-byte boundary

int64_t aligned(int64_t elements) {
  return (elements + kAlignElements - 1) / kAlignElements * kAlignElements;
}

DType grad_dtype(const Parameter& p) {
  return p.value.dtype() == DType::f64 ? DType::f64 : DType::f32;
}

}  // namespace

std::vector<std::unique_ptr<FlatBucket>> FlatBucket::make_all(const std::vector<Parameter*>& parameters,
                                                              const Mesh& mesh, int64_t bucket_bytes) {
  SHOAL_CHECK(bucket_bytes > 0, "GradReducer: expected bucket_bytes > 0, got ", bucket_bytes);
  // One bucket is open per kind; a bucket is reduced when its last parameter is ready, so buckets are
  // numbered in the order in which they were closed.
  using Kind = std::tuple<Communicator*, Communicator*, DType>;
  std::vector<std::pair<Kind, std::unique_ptr<FlatBucket>>> open;
  std::vector<std::unique_ptr<FlatBucket>> all;
  auto open_bucket =
      [&](const Kind& kind) -> std::unique_ptr<FlatBucket>& {  // in the same order on every rank
    for (auto& [its_kind, bucket] : open) {
      if (its_kind == kind) return bucket;
    }
    return open.emplace_back(kind, nullptr).second;
  };
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
    std::unique_ptr<FlatBucket>& bucket = open_bucket({&group, ends, dtype});
    // By the sizes of the ranks with the largest parts: buckets hold the same parameters on all ranks, which
    // then reduce them at the same places of their tapes, whatever their own parts.
    const int64_t bytes = aligned(box_of(p->global_shape, p->placement, first).numel()) * dtype_size(dtype);
    if (bucket && bucket->largest_bytes_ + bytes > bucket_bytes) all.push_back(std::move(bucket));
    if (!bucket) bucket = std::make_unique<FlatBucket>(group, ends, dtype, p->value.device());
    bucket->add(p, bytes);
  }
  for (auto& [kind, bucket] : open) all.push_back(std::move(bucket));
  return all;
}

void FlatBucket::add(Parameter* p, int64_t largest_bytes) {
  parameters_.push_back(p);
  offsets_.push_back(num_elements_);
  num_elements_ += aligned(p->value.numel());
  largest_bytes_ += largest_bytes;
}

void FlatBucket::allocate(ZeroStage stage) {
  for (Parameter* p : parameters_) p->leaf.grad_dtype = dtype_;
  const bool is_cut = stage != ZeroStage::none && group_.size() > 1;
  if (is_cut) {
    piece_elements_ = aligned((num_elements_ + group_.size() - 1) / group_.size());
    num_elements_ = piece_elements_ * group_.size();
  }
  is_transient_ = is_cut && stage == ZeroStage::gradients;
  if (!is_transient_) {
    gradients_ = group_.size() > 1 ? group_.shared_zeros({num_elements_}, dtype_, device_)
                                   : Tensor::zeros({num_elements_}, dtype_, device_);
    set_gradients();
  }
  if (is_cut) cut_into_pieces();
}

void FlatBucket::set_gradients() const {
  for (size_t i = 0; i < parameters_.size(); i++) {
    const Parameter& p = *parameters_[i];
    parameters_[i]->leaf.grad = gradients_.flat(offsets_[i], p.value.numel()).view(p.value.shape());
  }
}

/// Values move into a buffer of the layout of the gradients, so that pieces are gathered in place.
void FlatBucket::cut_into_pieces() {
  const int64_t begin = group_.rank() * piece_elements_, end = begin + piece_elements_;
  values_ = group_.shared_zeros({num_elements_}, parameters_[0]->value.dtype(), device_);
  piece_ = is_transient_ ? Tensor::zeros({piece_elements_}, dtype_, device_)
                         : gradients_.flat(begin, piece_elements_);
  for (size_t i = 0; i < parameters_.size(); i++) {
    Parameter& p = *parameters_[i];
    const int64_t offset = offsets_[i], size = p.value.numel();
    Tensor value = values_.flat(offset, size).view(p.value.shape());
    value.copy_from(p.value);
    value.grad_ref = p.value.grad_ref;
    p.value = std::move(value);
    const int64_t from = std::clamp(begin - offset, int64_t{0}, size),
                  to = std::clamp(end - offset, from, size);
    p.piece = ShardRange{from, to};
    p.piece_grad = to > from ? piece_.flat(offset + from - begin, to - from) : piece_.flat(0, 0);
    if (is_transient_) p.leaf.make_grad = [this] { open(); };
  }
}

void FlatBucket::open() {
  gradients_ = Tensor::empty({num_elements_}, dtype_, device_);
  set_gradients();
  for (size_t i = 0; i < parameters_.size(); i++) {
    parameters_[i]->leaf.grad_is_zero = true;
    // What lies between parameters is summed too.
    const int64_t end = offsets_[i] + parameters_[i]->value.numel(),
                  next = i + 1 < offsets_.size() ? offsets_[i + 1] : num_elements_;
    if (next > end) gradients_.flat(end, next - end).set_zero();
  }
}

void FlatBucket::close() {
  for (Parameter* p : parameters_) p->leaf.grad = {};
  gradients_ = {};
}

int64_t FlatBucket::reduced_bytes() const {
  const int64_t bytes = num_elements_ * dtype_size(dtype_);
  return (group_.size() > 1 ? bytes : 0) + (ends_ == nullptr       ? 0
                                            : piece_elements_ == 0 ? bytes
                                                                   : piece_.num_bytes());
}

void FlatBucket::zero() {
  has_sum_ = false;
  if (is_transient_) close();
  for (Parameter* p : parameters_) p->leaf.grad_is_zero = true;
}

void FlatBucket::start_reduction() {
  // What no backward has written is zero now.
  for (Parameter* p : parameters_) p->leaf.grad_buffer(p->value.shape(), device_);
  if (group_.size() == 1) return;
  if (piece_elements_ == 0) {
    work_ = group_.all_reduce(gradients_, ReduceOp::sum);
    return;
  }
  if (has_sum_) addend_ = Tensor::empty({piece_elements_}, dtype_, device_);
  work_ = group_.reduce_scatter(gradients_, has_sum_ ? addend_ : piece_, ReduceOp::sum);
}

void FlatBucket::complete() {
  work_.wait();
  if (!is_transient_) return;
  if (addend_) accumulate(device_, piece_, addend_);
  addend_ = {};
  has_sum_ = true;
  close();
}

void FlatBucket::sum_over_ends() {
  // A rank and its like in the other stage have the same piece.
  if (ends_ != nullptr) ends_->all_reduce(piece_elements_ == 0 ? gradients_ : piece_, ReduceOp::sum).wait();
}

void FlatBucket::start_gather() {
  if (piece_elements_ == 0) return;
  work_ = group_.all_gather(values_.flat(group_.rank() * piece_elements_, piece_elements_), values_);
}

}  // namespace shoal
