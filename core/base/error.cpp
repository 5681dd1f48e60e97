#include "core/base/error.h"

#include <string_view>

namespace shoal::detail {

void check_failed(const char* file, int line, const std::string& message) {
  std::string_view path = file;
  // Only the part below the source root is worth printing.
  for (std::string_view folder :
       {"/core/", "/parallel/", "/models/", "/optim/", "/data/", "/launch/", "/tests/"}) {
    if (auto at = path.rfind(folder); at != std::string_view::npos) {
      path.remove_prefix(at + 1);
      break;
    }
  }
  throw Error(str(message, " [", path, ":", line, "]"));
}

}  // namespace shoal::detail
