#include "core/backend/cuda/fault.h"

#include <map>
#include <vector>

namespace shoal::cuda {

namespace {

const Tensor& record_of(Device device) {
  static thread_local std::map<int, Tensor> records;
  Tensor& record = records[device.index];
  if (!record.defined()) {
    const Tensor made = Tensor::from(std::vector<int64_t>{kNoFault}, {1}, device);
    Event there;  // other streams of this thread use it as well
    there.record(current_stream(device));
    there.host_wait();
    record = made;
  }
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
    case FaultKind::loss_gradient:
      return "linear_cross_entropy: the weight's gradient was added in forward for a loss that is backward's "
             "seed; "
             "got an upstream gradient other than 1; pass the factor as `scale`";
    case FaultKind::expert_id:
      return "dispatch: an expert id that is neither -1 (dropped) nor one of the experts";
    case FaultKind::expert_rows:
      return "dispatch: an expert has more assignments than rows of its own";
  }
  return "?";
}

}  // namespace

long long* fault_record(Device device) {
  return reinterpret_cast<long long*>(record_of(device).data<int64_t>());
}

void throw_fault(Device device, int64_t recorded) {
  if (recorded == kNoFault) return;
  record_of(device).copy_from(Tensor::from(std::vector<int64_t>{kNoFault}, {1}));
  SHOAL_CHECK(false, device, ": ", text_of(static_cast<FaultKind>(recorded % kFaultKinds)), " (position ",
              recorded / kFaultKinds, ')');
}

}  // namespace shoal::cuda
