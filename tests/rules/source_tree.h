// The source tree as the rule tests see it: files, their lines, and the same lines without comments and
// literals. A rule collects violations as "file:line: reason" and expects none.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace shoal::rules {

struct SourceFile {
  std::string path;                // relative to the top, "core/base/error.h"
  std::vector<std::string> lines;  // as they are, without line ends
  std::vector<std::string> code;   // comments, strings and characters replaced by spaces; C++ files only
  bool has_extension(std::initializer_list<const char*> extensions) const;
  bool is_cpp() const;  // .h .cpp .cu .cuh .inc
  bool is_header() const { return has_extension({".h", ".cuh"}); }
};

/// A file of given content, for tests of the rules themselves.
SourceFile make_source(const std::string& path, const std::string& text);

/// All files of the source tree that people write: C++, CUDA, CMake, shell, YAML, Markdown. Sorted by path.
/// Read once.
const std::vector<SourceFile>& all_sources();

/// The top of the source tree.
std::filesystem::path source_root();

/// "path:line: reason" (line is 1-based).
std::string violation(const SourceFile& file, size_t line, const std::string& reason);

/// The violations as one text for a failure message; "" when there are none.
std::string listing(const std::vector<std::string>& violations);

struct Include {
  size_t line = 0;  // 1-based
  std::string target;
  bool angled = false;
};
std::vector<Include> includes_of(const SourceFile& file);

struct FunctionSpan {
  size_t first_line = 0, num_lines = 0;  // from the line of the opening brace to that of the closing one
};
/// Bodies at namespace or class scope, lambdas in initialisers included. Found by brace depth, so macros with
/// unbalanced braces are not understood.
std::vector<FunctionSpan> functions_of(const SourceFile& file);

/// Names passed to XRegistry::add<...>("name", ...) in this file, with the registry's name; also through a
/// helper of the file, `template <...> bool add(name, ...)`, that stands before its calls.
struct Registration {
  size_t line = 0;
  std::string registry, name;
};
std::vector<Registration> registrations_of(const SourceFile& file);

}  // namespace shoal::rules
