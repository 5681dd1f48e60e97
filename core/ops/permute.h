// Moving rows between token order and expert order. Deterministic: every output row is summed in a fixed
// order.
#pragma once

#include <cstdint>

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// y_ND[n] = x_TD[row_N[n]], zeros where that is -1: copies token rows into expert order. slots_TK is the
/// inverse: slots_TK[t, k] = n where row_N[n] = t for choice k, or -1 (dropped); used by backward: dx[t] =
/// sum over k of dy[slots[t, k]]. Both i64.
Tensor gather_rows(const Tensor& x_TD, const Tensor& row_N, const Tensor& slots_TK);

/// y_TD[t] = sum over k, in order, of weights_TK[t, k] * x_ND[slots_TK[t, k]], skipping slots of -1 (weighted
/// unpermute). row_N, choice_N (i64): the token and choice of each row n, used by backward, -1 in rows
/// that belong to none. A token whose slots are all -1 gets zeros.
Tensor combine_rows(const Tensor& x_ND, const Tensor& weights_TK, const Tensor& slots_TK, const Tensor& row_N,
                    const Tensor& choice_N);

/// y[n] = x[index[n]] for a permutation `inverse` of index: rows change places, both directions are copies.
Tensor permute_rows(const Tensor& x_ND, const Tensor& index_N, const Tensor& inverse_N);

inline constinit Kernel<void(const Tensor& x, const Tensor& index, const Tensor& y)> gather_rows_fwd(
    "gather_rows_fwd",
    [](const Tensor&, const Tensor& index, const Tensor& y) { return Cost{.bytes = bytes_of(index, y, y)}; });
/// weights may be undefined (all ones).
inline constinit Kernel<void(const Tensor& x, const Tensor& weights, const Tensor& slots, const Tensor& y)>
    combine_rows_fwd("combine_rows_fwd");
struct CombineBackward {
  Tensor dy_TD, x_ND, weights_TK, slots_TK, row_N, choice_N;
  Tensor dx_ND, dweights_TK;  // written; either may be undefined. dx of rows without a token: zeros
};
inline constinit Kernel<void(const CombineBackward&)> combine_rows_bwd(
    "combine_rows_bwd", [](const CombineBackward& c) {
      return Cost{.bytes = bytes_of(c.dy_TD, c.dweights_TK ? c.x_ND : Tensor{}, c.weights_TK, c.slots_TK,
                                    c.row_N, c.choice_N, c.dx_ND, c.dweights_TK)};
    });

}  // namespace shoal
