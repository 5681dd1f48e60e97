// The rows of the generated parity table (covering_set.h), for ranks that are threads and for processes.
#pragma once

#include <map>
#include <vector>

#include "tests/parity/covering_set.h"

namespace shoal::testing {

inline const std::vector<TableRow>& layouts_of(int world) {
  static const std::map<int, std::vector<TableRow>> all = {
      {2, legal_layouts(2)}, {4, legal_layouts(4)}, {8, legal_layouts(8)}};
  return all.at(world);
}

inline const CoveringSet& generated_table() {
  constexpr size_t kRows = 160;
  static const CoveringSet set = [] {
    std::vector<TableRow> layouts;
    for (const int world : {2, 4, 8})
      layouts.insert(layouts.end(), layouts_of(world).begin(), layouts_of(world).end());
    return CoveringSet(std::move(layouts), kRows);
  }();
  return set;
}

}  // namespace shoal::testing
