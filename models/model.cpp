#include "models/model.h"

namespace shoal {

int64_t ModelBatch::count_labels() const {
  if (num_labels >= 0) return num_labels;
  int64_t count = 0;
  for (const int32_t label : labels_T.to_vector<int32_t>()) count += label >= 0;
  return count;
}

int64_t ModelBatch::num_valid() const {
  if (!valid_BS.defined()) return batch * seq;
  int64_t count = 0;
  for (const uint8_t valid : valid_BS.to_vector<uint8_t>()) count += valid != 0;
  return count;
}

ModelBatch cut_sequences(const ModelBatch& whole, AxisCoord cp) {
  if (cp.size == 1) return whole;
  const PositionRuns runs = context_runs(whole.seq, cp);
  ModelBatch mine = whole;
  for (Tensor* rows : {&mine.tokens_T, &mine.labels_T, &mine.positions_T})
    *rows = take_runs(*rows, runs, whole.batch, whole.seq);
  mine.num_labels = -1;
  mine.num_labels = mine.count_labels();
  return mine;
}

}  // namespace shoal
