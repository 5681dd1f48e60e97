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

std::vector<ModelBatch> single_sequences(std::span<const ModelBatch> micro_batches) {
  std::vector<ModelBatch> all;
  for (const ModelBatch& batch : micro_batches) {
    const int64_t S = batch.seq;
    SHOAL_CHECK(batch.num_tokens() == batch.batch * S, "single_sequences: expected ", batch.batch,
                " whole sequences of ", S, " tokens, got ", batch.num_tokens(), " tokens");
    const auto own = [S](const Tensor& rows, int64_t b) {
      return rows.defined() ? rows.flat(b * S, S) : rows;
    };
    for (int64_t b = 0; b < batch.batch; b++) {
      ModelBatch one;
      one.batch = 1;
      one.seq = S;
      one.tokens_T = own(batch.tokens_T, b);
      one.labels_T = own(batch.labels_T, b);
      one.positions_T = own(batch.positions_T, b);
      if (batch.document_BS.defined()) one.document_BS = batch.document_BS.rows(b, b + 1);
      one.valid_BS = own(batch.valid_BS, b);
      all.push_back(std::move(one));
    }
  }
  return all;
}

ModelBatch empty_batch(int64_t seq, Device device) {
  ModelBatch none;
  none.seq = seq;
  none.tokens_T = none.labels_T = none.positions_T = Tensor::empty({0}, DType::i32, device);
  none.num_labels = 0;
  return none;
}

}  // namespace shoal
