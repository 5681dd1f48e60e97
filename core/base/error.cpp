#include "core/base/error.h"

#include <filesystem>
#include <string_view>

namespace shoal {

std::string exception_text(const std::exception& exception) {
  const auto* failure = dynamic_cast<const std::filesystem::filesystem_error*>(&exception);
  if (failure == nullptr) return exception.what();
  return str(failure->path1().string(), ": ", failure->code().message(),
             "; check the path and its permissions (and those of the folders above it)");
}

namespace detail {

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

}  // namespace detail

}  // namespace shoal
