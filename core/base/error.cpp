#include "core/base/error.h"

#include <string_view>

namespace shoal::detail {

void check_failed(const char* file, int line, const std::string& message) {
  // Only the part below the source root is worth printing; this file tells where the root is.
  constexpr std::string_view kThisFile = __FILE__, kBelowRoot = "core/base/error.cpp";
  constexpr std::string_view kRoot = kThisFile.substr(0, kThisFile.size() - kBelowRoot.size());
  std::string_view path = file;
  if (path.starts_with(kRoot)) path.remove_prefix(kRoot.size());
  while (path.starts_with("../"))
    path.remove_prefix(3);  // compiler caches pass some paths relative, some not
  throw Error(str(message, " [", path, ":", line, "]"));
}

}  // namespace shoal::detail
