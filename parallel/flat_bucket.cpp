#include "parallel/flat_bucket.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/autograd/accumulate.h"

namespace shoal {

namespace {

constexpr int64_t kExactBytes = 16;     // of an exact sum
constexpr int64_t kAlignElements = 16;  // gradients and pieces start on a 64-byte boundary

int64_t aligned(int64_t elements) {
  return (elements + kAlignElements - 1) / kAlignElements * kAlignElements;
}

DType grad_dtype(const Parameter& p) {
  return p.value.dtype() == DType::f64 ? DType::f64 : DType::f32;
}

}  // namespace

FlatBucket::Place FlatBucket::place_of(const Parameter& p, const std::vector<WeightUnit*>& units,
                                       ZeroStage stage) {
  if (stage == ZeroStage::none) return {};
  const auto has_it = [&](const WeightUnit* unit) {
    return unit->held && std::ranges::find(unit->parameters, &p) != unit->parameters.end();
  };
  const auto unit = std::ranges::find_if(units, has_it);
  SHOAL_CHECK(unit != units.end(), "parallel.zero: parameter ", p.name,
              " is in no unit of the model that says when it is used");
  if (stage == ZeroStage::optimizer_state) return {};
  Place place;
  place.pipeline_stage = (*unit)->stage;
  place.is_small = p.kind == ParamKind::norm || p.kind == ParamKind::bias;
  if (stage == ZeroStage::parameters && !place.is_small) place.unit = static_cast<int>(unit - units.begin());
  return place;
}

std::vector<std::unique_ptr<FlatBucket>> FlatBucket::make_all(const std::vector<Parameter*>& parameters,
                                                              const std::vector<WeightUnit*>& units,
                                                              const Mesh& mesh, int64_t bucket_bytes,
                                                              ZeroStage stage) {
  SHOAL_CHECK(bucket_bytes > 0, "GradReducer: expected bucket_bytes > 0, got ", bucket_bytes);
  // One bucket is open per kind; a bucket is reduced when its last parameter is ready.
  struct Kind {
    Communicator *group, *ends;
    DType dtype;
    Place place;
    bool operator==(const Kind&) const = default;
  };
  struct Open {
    Kind kind;
    std::unique_ptr<FlatBucket> bucket;
    int64_t last = 0;  // when its last parameter was added
  };
  std::vector<Open> open, closed;
  auto open_bucket = [&](const Kind& kind) -> Open& {  // in the same order on every rank
    for (Open& each : open) {
      if (each.kind == kind) return each;
    }
    return open.emplace_back(Open{kind, nullptr});
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
    const Place place = place_of(*p, units, stage);
    Open& entry = open_bucket({&group, ends, dtype, place});
    std::unique_ptr<FlatBucket>& bucket = entry.bucket;
    // By the sizes of the ranks with the largest parts: buckets hold the same parameters on all ranks, which
    // then reduce them at the same places of their tapes, whatever their own parts.
    const int64_t bytes = aligned(box_of(p->global_shape, p->placement, first).numel()) * dtype_size(dtype);
    if (bucket && bucket->largest_bytes_ + bytes > bucket_bytes)
      closed.push_back({entry.kind, std::move(bucket), entry.last});
    if (!bucket) {
      bucket = std::make_unique<FlatBucket>(group, ends, dtype, p->value.device());
      bucket->pipeline_stage_ = place.pipeline_stage;
      bucket->divides_values_ = place.unit >= 0 && group.size() > 1;
    }
    bucket->add(p, bytes);
    entry.last = it - parameters.rbegin();
  }
  std::ranges::move(open, std::back_inserter(closed));
  std::ranges::sort(closed, {}, &Open::last);
  std::vector<std::unique_ptr<FlatBucket>> all;
  for (Open& each : closed) all.push_back(std::move(each.bucket));
  return all;
}

void FlatBucket::add(Parameter* p, int64_t largest_bytes) {
  parameters_.push_back(p);
  offsets_.push_back(num_elements_);
  num_elements_ += aligned(p->box.numel());
  largest_bytes_ += largest_bytes;
}

void FlatBucket::set_stage(ZeroStage stage, bool exact) {
  is_exact_ = exact;
  is_cut_ = stage != ZeroStage::none && group_.size() > 1;
  if (is_cut_) {
    piece_elements_ = aligned((num_elements_ + group_.size() - 1) / group_.size());
    num_elements_ = piece_elements_ * group_.size();
  }
  is_transient_ = is_cut_ && stage >= ZeroStage::gradients;
}

int64_t FlatBucket::gradient_bytes() const {
  return (is_transient_ ? piece_elements_ : num_elements_) *
         (dtype_size(dtype_) + (is_exact_ ? kExactBytes : 0));
}

int64_t FlatBucket::num_held() const {
  int64_t held = 0;
  for (const Parameter* p : parameters_) held += p->box.numel();
  return divides_values_ ? num_updated() : held;
}

int64_t FlatBucket::num_updated() const {
  int64_t updated = 0;
  for (size_t i = 0; i < parameters_.size(); i++) updated += num_updated(i);
  return updated;
}

int64_t FlatBucket::num_updated(size_t i) const {
  const ShardRange own = is_cut_ ? own_part(i) : ShardRange{0, parameters_[i]->box.numel()};
  return own.end - own.begin;
}

/// Which elements of a parameter lie in this rank's piece.
ShardRange FlatBucket::own_part(size_t i) const {
  const int64_t begin = group_.rank() * piece_elements_, size = parameters_[i]->box.numel(),
                from = std::clamp(begin - offsets_[i], int64_t{0}, size);
  return {from, std::clamp(begin + piece_elements_ - offsets_[i], from, size)};
}

/// Bytes of each tensor that is summed over ranks for so many elements of gradients.
std::vector<int64_t> FlatBucket::summed_bytes(int64_t elements) const {
  if (is_exact_) return {elements * kExactBytes / 2, elements * kExactBytes / 2};
  return {elements * dtype_size(dtype_)};
}

void FlatBucket::count_reduction() const {
  for (const int64_t bytes : summed_bytes(piece_elements_ == 0 ? num_elements_ : piece_elements_)) {
    if (piece_elements_ == 0) {
      group_.traffic().all_reduce(bytes);
    } else {
      group_.traffic().reduce_scatter(bytes);
    }
  }
}

void FlatBucket::count_end() const {
  if (ends_ != nullptr) {
    for (const int64_t bytes : summed_bytes(piece_elements_ == 0 ? num_elements_ : piece_elements_))
      ends_->traffic().all_reduce(bytes);
  }
  if (!divides_values_) count_gather();
}

void FlatBucket::count_gather() const {
  if (is_cut()) group_.traffic().all_gather(piece_elements_ * dtype_size(dtype_));
}

void FlatBucket::allocate(ZeroStage stage, bool exact) {
  const int num_parts = group_.size() * (ends_ == nullptr ? 1 : ends_->size());
  SHOAL_CHECK(!exact || (stage <= ZeroStage::optimizer_state && num_parts <= ExactSum::kMaxParts),
              "FlatBucket: expected exact sums of gradients that are not divided, on at most ",
              ExactSum::kMaxParts, " replicas, got ", num_parts,
              "; set parallel.zero to 0 or 1, or run.deterministic: same_layout");
  for (Parameter* p : parameters_) p->leaf.grad_dtype = dtype_;
  set_stage(stage, exact);
  if (!is_transient_) {
    gradients_ = group_.size() > 1 && !exact ? group_.shared_zeros({num_elements_}, dtype_, device_)
                                             : Tensor::zeros({num_elements_}, dtype_, device_);
    set_gradients();
  }
  if (is_cut_) {
    cut_into_pieces();
  } else {
    for (Parameter* p : parameters_)
      if (p->fill) std::exchange(p->fill, nullptr)();
  }
  if (exact) make_exact_sums();
}

void FlatBucket::make_exact_sums() {
  sums_.high = group_.shared_zeros({num_elements_}, DType::f64, device_);
  sums_.low = group_.shared_zeros({num_elements_}, DType::i64, device_);
  own_sums_ = is_cut_ ? sums_.part(group_.rank() * piece_elements_, piece_elements_) : sums_;
  for (size_t i = 0; i < parameters_.size(); i++)
    parameters_[i]->leaf.exact_sum = sums_.part(offsets_[i], parameters_[i]->box.numel());
}

void FlatBucket::set_gradients() const {
  for (size_t i = 0; i < parameters_.size(); i++) {
    const Parameter& p = *parameters_[i];
    parameters_[i]->leaf.grad = gradients_.flat(offsets_[i], p.value.numel()).view(p.value.shape());
  }
}

/// Values move into a buffer of the layout of the gradients, so that pieces are gathered in place. No more
/// than a bucket and a parameter exist in full meanwhile.
void FlatBucket::cut_into_pieces() {
  const int64_t begin = group_.rank() * piece_elements_;
  const DType dtype = parameters_[0]->value.dtype();
  values_ = divides_values_ ? Tensor::zeros({num_elements_}, dtype, device_)
                            : group_.shared_zeros({num_elements_}, dtype, device_);
  value_piece_ = divides_values_ ? Tensor::empty({piece_elements_}, dtype, device_)
                                 : values_.flat(begin, piece_elements_);
  piece_ = is_transient_ ? Tensor::zeros({piece_elements_}, dtype_, device_)
                         : gradients_.flat(begin, piece_elements_);
  for (size_t i = 0; i < parameters_.size(); i++) {
    Parameter& p = *parameters_[i];
    const int64_t offset = offsets_[i], size = p.value.numel();
    Tensor value = values_.flat(offset, size).view(p.value.shape());
    if (p.fill) std::exchange(p.fill, nullptr)();
    value.copy_from(p.value);
    value.grad_ref = p.value.grad_ref;
    p.value = std::move(value);
    const auto [from, to] = own_part(i);
    p.piece = ShardRange{from, to};
    const int64_t first = to > from ? offset + from - begin : 0;
    p.piece_value = value_piece_.flat(first, to - from);
    p.piece_grad = piece_.flat(first, to - from);
    if (is_transient_) p.leaf.make_grad = [this] { open(); };
    p.value_divided = divides_values_;
    // Copies in bf16 or fp8 would keep in full what is divided.
    if (divides_values_) p.leaf.keep_packed = false;
  }
  if (!divides_values_) return;
  value_piece_.copy_from(values_.flat(begin, piece_elements_));
  values_.release_memory();
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
  const int64_t element = is_exact_ ? kExactBytes : dtype_size(dtype_),
                own = piece_elements_ == 0 ? num_elements_ : piece_elements_;
  return element * ((group_.size() > 1 ? num_elements_ : 0) + (ends_ == nullptr ? 0 : own));
}

void FlatBucket::zero() {
  has_sum_ = false;
  if (is_transient_) close();
  for (Parameter* p : parameters_) p->leaf.grad_is_zero = true;
  if (sums_) sums_.set_zero();
}

void FlatBucket::reduce_exact_sums() {
  if (group_.size() == 1) return;
  if (piece_elements_ == 0) {
    work_ = group_.all_reduce(sums_.high, ReduceOp::sum);
    low_work_ = group_.all_reduce(sums_.low, ReduceOp::sum);
  } else {
    work_ = group_.reduce_scatter(sums_.high, own_sums_.high, ReduceOp::sum);
    low_work_ = group_.reduce_scatter(sums_.low, own_sums_.low, ReduceOp::sum);
  }
}

void FlatBucket::start_reduction() {
  if (sums_) return reduce_exact_sums();
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
  low_work_.wait();
  if (!is_transient_) return;
  if (addend_) accumulate(device_, piece_, addend_);
  addend_ = {};
  has_sum_ = true;
  close();
}

void FlatBucket::finish() {
  // A rank and its like in the other stage have the same piece.
  const Tensor& own = piece_elements_ == 0 ? gradients_ : piece_;
  if (!sums_) {
    if (ends_ != nullptr) ends_->all_reduce(own, ReduceOp::sum).wait();
    return;
  }
  if (ends_ != nullptr) {
    ends_->all_reduce(own_sums_.high, ReduceOp::sum).wait();
    ends_->all_reduce(own_sums_.low, ReduceOp::sum).wait();
  }
  exact_value(device_, own_sums_, own);
  for (Parameter* p : parameters_) p->leaf.grad_is_zero = false;
}

void FlatBucket::start_gather() {
  if (piece_elements_ == 0) return;
  if (divides_values_) values_.allocate_memory();
  gather_ = group_.all_gather(value_piece_, values_);
}

void FlatBucket::drop_values() {
  values_.release_memory();
}

}  // namespace shoal
