// Table lookup: token and learned position embeddings.
#pragma once

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// Which rows of a whole table a tensor holds.
struct TablePart {
  int64_t first = 0;  // its first row in the table
  int64_t vocab = 0;  // rows of the whole table
  static TablePart whole(const Tensor& weight) { return {0, weight.size(0)}; }
};

/// y_TD[t] = weight_VD[ids_T[t]]. ids: i32 in [0, V); an id outside throws Error with its position.
Tensor embedding(const Tensor& weight_VD, const Tensor& ids_T);
/// The same where weight_VD holds a part of the table: ids of other parts give zeros.
Tensor embedding(const Tensor& weight_VD, const Tensor& ids_T, const TablePart& part);

inline constinit Kernel<void(const Tensor& weight, const Tensor& ids, const Tensor& y, const TablePart& part)>
    embedding_fwd("embedding_fwd", [](const Tensor&, const Tensor& ids, const Tensor& y, const TablePart&) {
      return Cost{.bytes = bytes_of(ids, y, y)};
    });
/// dweight[ids[t]] += dy[t], in ascending t for each row (deterministic for any thread count).
inline constinit Kernel<void(const Tensor& dy, const Tensor& ids, const Tensor& dweight,
                             const TablePart& part)>
    embedding_bwd("embedding_bwd", [](const Tensor& dy, const Tensor& ids, const Tensor&, const TablePart&) {
      return Cost{.bytes = bytes_of(ids) + 3 * bytes_of(dy)};
    });

}  // namespace shoal
