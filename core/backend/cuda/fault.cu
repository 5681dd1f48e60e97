#include "core/backend/cuda/fault.h"

#include <limits>
#include <map>
#include <mutex>
#include <vector>

namespace shoal::cuda {

namespace {

constexpr int64_t kNoFault = std::numeric_limits<int64_t>::max();

const Tensor& record_of(Device device) {
  static std::mutex mutex;
  static auto* records = new std::map<int, Tensor>;  // leaked: device memory must not outlive its runtime
  const std::lock_guard lock(mutex);
  Tensor& record = (*records)[device.index];
  if (!record.defined()) record = Tensor::from(std::vector<int64_t>{kNoFault}, {1}, device);
  return record;
}

const char* text_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::embedding_id:
      return "embedding: an id outside of the table; does the tokenizer's vocabulary fit the table?";
    case FaultKind::rope_position:
      return "rope: a position outside of the table; make a longer table";
    case FaultKind::label:
      return "cross_entropy: a label that is no row of the logits; does the tokenizer's vocabulary fit the "
             "model's?";
    case FaultKind::gather_row:
      return "gather_rows: the index of a row that x does not have";
    case FaultKind::combine_slot:
      return "combine_rows: a slot that is no row of x";
    case FaultKind::combine_row:
      return "combine_rows: a token or choice that the slots do not have";
  }
  return "?";
}

}  // namespace

long long* fault_record(Device device) {
  return reinterpret_cast<long long*>(record_of(device).data<int64_t>());
}

void check_faults(Device device) {
  const Tensor& record = record_of(device);
  const int64_t worst = record.to_vector<int64_t>()[0];
  if (worst == kNoFault) return;
  record.copy_from(Tensor::from(std::vector<int64_t>{kNoFault}, {1}));
  SHOAL_CHECK(false, device, ": ", text_of(static_cast<FaultKind>(worst % kFaultKinds)), " (position ",
              worst / kFaultKinds, ')');
}

}  // namespace shoal::cuda
