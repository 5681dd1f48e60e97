// The order of rows between routing and experts, as integers: no gradients. Callers: the dispatchers' plans.
#pragma once

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// The assignments (token, choice) of ids_TK (i32; -1: dropped) sorted by id, or by the place of the id, then
/// token, then choice. Written: counts_E; slots_TK: the row of each assignment, -1 when dropped; row_N and
/// choice_N: token and choice of each row. All i64. An id that is neither -1 nor below E is an Error; on a
/// cuda device it counts as dropped, and the next wait for the device throws.
struct SortAssignments {
  Tensor ids_TK;
  Tensor counts_E, slots_TK, row_N, choice_N;
  Tensor
      place_E;  // i32, a permutation of 0 .. E - 1: the place of each id in the order; undefined: as they are
  /// 0: rows follow each other; row_N and choice_N have T K elements, of which the first sum of counts_E are
  /// written. Otherwise every id has this many rows: row_N and choice_N have E rows_each elements, and -1 in
  /// rows without an assignment. One assignment more of an id is an Error, as above.
  int64_t rows_each = 0;
};
inline constinit Kernel<void(const SortAssignments&)> sort_assignments_fwd(
    "sort_assignments_fwd", [](const SortAssignments& s) {
      return Cost{.bytes = bytes_of(s.ids_TK, s.counts_E, s.slots_TK, s.row_N, s.choice_N)};
    });

/// Blocks of consecutive rows change places: block b, moves_B3 = {from, to, size} (i64), so that y[n] =
/// x[index_R[n]] has them in their new places and x[n] = y[inverse_R[n]]. Both i64, written.
inline constinit Kernel<void(const Tensor& moves_B3, const Tensor& index_R, const Tensor& inverse_R)>
    move_blocks("move_blocks");

}  // namespace shoal
