// How large files and functions may be.
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "tests/rules/source_tree.h"

namespace shoal::rules {

namespace {

constexpr size_t kMaxFileLines = 500, kMaxHeaderLines = 250, kMaxFunctionLines = 80, kMaxLineBytes = 140;

std::vector<std::string> size_violations(const SourceFile& file) {
  std::vector<std::string> found;
  const size_t limit = file.is_header() && !file.path.starts_with("tests/") ? kMaxHeaderLines : kMaxFileLines;
  if (file.lines.size() > limit)
    found.push_back(violation(file, file.lines.size(), str(file.lines.size(), " lines, at most ", limit)));
  for (const auto& span : functions_of(file))
    if (span.num_lines > kMaxFunctionLines)
      found.push_back(violation(file, span.first_line,
                                str("function of ", span.num_lines, " lines, at most ", kMaxFunctionLines)));
  for (size_t i = 0; i < file.lines.size(); i++)
    if (file.lines[i].size() > kMaxLineBytes)
      found.push_back(
          violation(file, i + 1, str("line of ", file.lines[i].size(), " bytes, at most ", kMaxLineBytes)));
  return found;
}

}  // namespace

TEST(SizeRules, FilesAndFunctionsStaySmall) {
  std::vector<std::string> found;
  for (const auto& file : all_sources()) {
    if (!file.is_cpp() && !file.has_extension({".sh"})) continue;
    const auto more = size_violations(file);
    found.insert(found.end(), more.begin(), more.end());
  }
  EXPECT_TRUE(found.empty()) << listing(found);
}

TEST(SizeRules, AViolationIsFoundAndNamed) {
  std::string body = "void f() {\n";
  for (int i = 0; i < 79; i++) body += "  g();\n";
  EXPECT_EQ(size_violations(make_source("core/x.cpp", body + "}\n")),
            std::vector<std::string>{"core/x.cpp:1: function of 81 lines, at most 80"});
  EXPECT_EQ(size_violations(make_source("core/x.cpp", std::string(501, '\n'))),
            std::vector<std::string>{"core/x.cpp:501: 501 lines, at most 500"});
  EXPECT_EQ(size_violations(make_source("core/x.h", std::string(251, '\n'))).size(), 1U);
  EXPECT_TRUE(size_violations(make_source("core/x.cpp", std::string(500, '\n'))).empty());
}

}  // namespace shoal::rules
