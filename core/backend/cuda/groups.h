// Rows sorted by group, as kernels get them: by value, because counts are known to the host and a copy to the
// device would be one more thing to wait for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "core/base/error.h"

namespace shoal::cuda {

/// Group g has the rows [first[g], first[g + 1]).
struct RowGroups {
  static constexpr int kMost = 128;  // 1 KiB of the 4 KiB that the arguments of a kernel may take
  int count = 0;
  int64_t first[kMost + 1];
};

/// Calls body(groups, number of their first one) for at most RowGroups::kMost groups at a time. Throws Error
/// when a count is negative or they do not sum to `expected`.
template <class Body>
void for_each_row_groups(const char* where, std::span<const int64_t> rows, int64_t expected,
                         const Body& body) {
  int64_t total = 0;
  for (const int64_t count : rows) {
    SHOAL_CHECK(count >= 0, where, ": expected at least 0 rows per group, got ", count);
    total += count;
  }
  SHOAL_CHECK(total == expected, where, ": rows per group sum to ", total, ", but the operand has ",
              expected);
  RowGroups groups;
  groups.first[0] = 0;
  for (size_t g = 0; g < rows.size();) {
    const size_t first = g;
    groups.count = static_cast<int>(std::min<size_t>(RowGroups::kMost, rows.size() - g));
    for (int i = 0; i < groups.count; i++, g++) groups.first[i + 1] = groups.first[i] + rows[g];
    body(static_cast<const RowGroups&>(groups), static_cast<int64_t>(first));
    groups.first[0] = groups.first[groups.count];
  }
}

}  // namespace shoal::cuda
