// What a reader may expect of a header: it says what its functions do, and includes come in one order.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>

#include "core/base/error.h"
#include "tests/rules/source_tree.h"

namespace shoal::rules {

namespace {

// Whether a line at namespace scope declares a function. Kernel tables are variables; classes and types speak
// through the opening comment and their members.
bool declares_function(const std::string& code) {
  static constexpr std::array kOther = {"class ",  "struct ",          "enum ",      "namespace",
                                        "using ",  "template",         "#",          "}",
                                        "extern ", "inline constinit", "constexpr ", "inline constexpr"};
  if (code.empty() || code[0] == ' ' || code.find('(') == std::string::npos) return false;
  return std::none_of(kOther.begin(), kOther.end(),
                      [&](const char* other) { return code.starts_with(other); });
}

// Free functions of a header in a paragraph (lines without a blank one between them) that holds no comment.
std::vector<std::string> undocumented_functions(const SourceFile& file) {
  std::vector<std::string> found;
  size_t first = 0;  // 1-based line of the first function of the paragraph; 0: none yet
  bool documented = false;
  for (size_t i = 0; i <= file.lines.size(); i++) {
    if (i == file.lines.size() || file.lines[i].empty()) {
      if (first != 0 && !documented) found.push_back(violation(file, first, "function without a comment"));
      first = 0;
      documented = false;
      continue;
    }
    documented = documented || (file.lines[i].find("//") != std::string::npos &&
                                file.code[i].find("//") == std::string::npos);
    if (first == 0 && declares_function(file.code[i])) first = i + 1;
  }
  return found;
}

// A .cpp starts with its own header, which so is seen to compile alone; then <...>, then "...".
std::vector<std::string> include_order_violations(const SourceFile& file,
                                                  const std::set<std::string>& paths) {
  std::vector<std::string> found;
  auto includes = includes_of(file);
  std::erase_if(includes, [](const Include& include) { return include.target.ends_with(".inc"); });
  const std::string stem = file.path.substr(0, file.path.rfind('.'));
  if (const std::string own = stem + ".h"; file.path.ends_with(".cpp") && paths.contains(own))
    if (includes.empty() || includes[0].target != own)
      found.push_back(violation(file, includes.empty() ? 1 : includes[0].line, "its own header comes first"));
  bool quoted = false;
  for (size_t i = 0; i < includes.size(); i++) {
    const Include& include = includes[i];
    if (include.angled && quoted)
      found.push_back(violation(file, include.line, str("<", include.target, "> comes before our headers")));
    quoted = quoted || (i > 0 && !include.angled);
  }
  return found;
}

}  // namespace

TEST(HeaderRules, EveryPublicFunctionIsDocumented) {
  std::vector<std::string> found;
  for (const auto& file : all_sources()) {
    if (!file.is_header() || file.path.starts_with("tests/")) continue;
    const auto more = undocumented_functions(file);
    found.insert(found.end(), more.begin(), more.end());
  }
  EXPECT_TRUE(found.empty()) << listing(found);
}

TEST(HeaderRules, IncludesComeInOneOrder) {
  std::set<std::string> paths;
  for (const auto& file : all_sources()) paths.insert(file.path);
  std::vector<std::string> found;
  for (const auto& file : all_sources()) {
    if (!file.is_cpp()) continue;
    const auto more = include_order_violations(file, paths);
    found.insert(found.end(), more.begin(), more.end());
  }
  EXPECT_TRUE(found.empty()) << listing(found);
}

TEST(HeaderRules, AViolationIsFoundAndNamed) {
  EXPECT_EQ(undocumented_functions(
                make_source("core/x.h", "/// Sums.\nint f(int a);\nint g();\n\nint h(\n    int a);\n")),
            std::vector<std::string>{"core/x.h:5: function without a comment"});
  EXPECT_EQ(
      undocumented_functions(make_source("core/x.h", "template <class T>\nT f(T a) {\n  return a;\n}\n"))
          .size(),
      1U);
  EXPECT_TRUE(
      undocumented_functions(make_source("core/x.h", "struct S {\n  int f();\n};\n\nint a;\n")).empty());
  EXPECT_TRUE(undocumented_functions(make_source("core/x.h", "int f();  // seconds\n")).empty());

  const std::set<std::string> paths = {"core/x.h", "core/x.cpp"};
  auto order = [&](const std::string& text) {
    return include_order_violations(make_source("core/x.cpp", text), paths);
  };
  EXPECT_EQ(order("#include <map>\n#include \"core/x.h\"\n"),
            std::vector<std::string>{"core/x.cpp:1: its own header comes first"});
  EXPECT_EQ(order("#include \"core/x.h\"\n#include \"core/y.h\"\n#include <map>\n"),
            std::vector<std::string>{"core/x.cpp:3: <map> comes before our headers"});
  EXPECT_TRUE(order("#include \"core/x.h\"\n\n#include <map>\n\n#include \"core/y.h\"\n").empty());
}

}  // namespace shoal::rules
