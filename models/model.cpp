#include "models/model.h"

namespace shoal {

int64_t ModelBatch::count_labels() const {
  if (num_labels >= 0) return num_labels;
  int64_t count = 0;
  for (const int32_t label : labels_T.to_vector<int32_t>()) count += label >= 0;
  return count;
}

int64_t ModelBatch::num_valid() const {
  if (!valid_T.defined()) return tokens_T.numel();
  int64_t count = 0;
  for (const uint8_t valid : valid_T.to_vector<uint8_t>()) count += valid != 0;
  return count;
}

}  // namespace shoal
