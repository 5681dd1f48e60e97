// Error and SHOAL_CHECK: the only way the library reports a failure. Every layer uses them.
// A message says where, what, expected and got, and how to fix; the rank is added where ranks are known.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace shoal {

/// Concatenates anything that has operator<<.
template <class... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

/// What the process should exit with when an Error reaches main.
enum class ExitCode : int { done = 0, failure = 1, usage = 2 };

/// A failure at run time (exit code 1).
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, ExitCode code = ExitCode::failure)
      : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

/// The user's command, config or input is wrong (exit code 2).
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message) : Error(message, ExitCode::usage) {}
};

/// What to print for an exception that reached the top: file system errors name the path and what to check.
std::string exception_text(const std::exception& exception);

namespace detail {
[[noreturn]] void check_failed(const char* file, int line, const std::string& message);
}  // namespace detail

/// Throws Error("<parts> [file:line]") unless the condition holds. Write the parts as
/// "where: expected ..., got ...; how to fix".
#define SHOAL_CHECK(condition, ...)                                                 \
  do {                                                                              \
    if (!(condition)) [[unlikely]]                                                  \
      ::shoal::detail::check_failed(__FILE__, __LINE__, ::shoal::str(__VA_ARGS__)); \
  } while (false)

}  // namespace shoal
