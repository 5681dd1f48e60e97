// Every environment variable that is read is in the tables of docs/environment.md, and nothing else is.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <regex>
#include <set>

#include "core/base/error.h"
#include "tests/rules/source_tree.h"

namespace shoal::rules {

namespace {

constexpr const char* kTable = "docs/environment.md";

/// Names of variables that a file reads, with the line: those given to getenv, and in the program all
/// literals that begin like a variable of ours or of a launcher.
std::map<std::string, size_t> variables_of(const SourceFile& file) {
  static const std::regex kRead("getenv\\(\"(\\w+)\"\\)");
  static const std::regex kNamed("\"((SHOAL|OMPI|PMI|PMIX|SLURM)_\\w+|MPI_LOCAL\\w+)\"");
  static const std::regex kShell("\\$\\{?(RANKS|TEXT|BUILD|SHOAL_[A-Z_]+)\\b");
  std::map<std::string, size_t> found;
  const bool test = file.path.starts_with("tests/");
  for (size_t i = 0; i < file.lines.size(); i++) {
    for (const std::regex* pattern : {&kRead, &kNamed, &kShell}) {
      if (pattern == &kShell ? !file.has_extension({".sh"}) : !file.is_cpp() || (test && pattern == &kNamed))
        continue;
      for (std::sregex_iterator it(file.lines[i].begin(), file.lines[i].end(), *pattern), end; it != end;
           ++it)
        found.emplace((*it)[1], i + 1);
    }
  }
  return found;
}

/// Names in code spans of the document.
std::set<std::string> documented() {
  static const std::regex kName("`([A-Z]\\w*)`");
  std::set<std::string> names;
  for (const SourceFile& file : all_sources()) {
    if (file.path != kTable) continue;
    for (const std::string& line : file.lines) {
      for (std::sregex_iterator it(line.begin(), line.end(), kName), end; it != end; ++it)
        names.insert((*it)[1]);
    }
  }
  return names;
}

}  // namespace

TEST(EnvironmentRules, VariablesAreDocumentedAndDocumentedOnesAreRead) {
  const std::set<std::string> known = documented();
  std::set<std::string> stale = known;
  std::vector<std::string> missing;
  for (const SourceFile& file : all_sources()) {
    for (const auto& [name, line] : variables_of(file)) {
      stale.erase(name);
      if (!known.contains(name))
        missing.push_back(violation(file, line, str("environment variable ", name, " is not in ", kTable)));
    }
  }
  EXPECT_TRUE(missing.empty()) << listing(missing);
  EXPECT_TRUE(stale.empty()) << *stale.begin() << " is in " << kTable << ", but nothing reads it";
}

TEST(EnvironmentRules, ReadsAreFound) {
  const std::string get =
      "get"
      "env(\"NEW_ONE\")";
  EXPECT_TRUE(variables_of(make_source("tests/a.cpp", "auto x = " + get + ";\n")).contains("NEW_ONE"));
  EXPECT_TRUE(variables_of(make_source("launch/a.cpp",
                                       "f(\"SHOAL_"
                                       "NEW\");\n"))
                  .contains("SHOAL_"
                            "NEW"));
  EXPECT_TRUE(variables_of(make_source("launch/a.sh", "x=${TEXT:-core}\n")).contains("TEXT"));
  EXPECT_TRUE(variables_of(make_source("tests/a.cpp",
                                       "f(\"SHOAL_"
                                       "NEW\");\n"))
                  .empty());
}

}  // namespace shoal::rules
