// Table lookup: token and learned position embeddings.
#pragma once

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// y_TD[t] = weight_VD[ids_T[t]]. ids: i32 in [0, V); an id outside throws Error with its position.
Tensor embedding(const Tensor& weight_VD, const Tensor& ids_T);

inline constinit Kernel<void(const Tensor& weight, const Tensor& ids, const Tensor& y)> embedding_fwd(
    "embedding_fwd",
    [](const Tensor&, const Tensor& ids, const Tensor& y) { return Cost{.bytes = bytes_of(ids, y, y)}; });
/// dweight[ids[t]] += dy[t], in ascending t for each row (deterministic for any thread count).
inline constinit Kernel<void(const Tensor& dy, const Tensor& ids, const Tensor& dweight)> embedding_bwd(
    "embedding_bwd", [](const Tensor& dy, const Tensor& ids, const Tensor&) {
      return Cost{.bytes = bytes_of(ids) + 3 * bytes_of(dy)};
    });

}  // namespace shoal
