// docs/faults.md and the tests name each other: the id of a fault stands in the name of the tests that keep
// it out.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <regex>
#include <set>

#include "tests/rules/source_tree.h"

namespace shoal::rules {
namespace {

const SourceFile& file_at(const std::string& path) {
  const auto& all = all_sources();
  const auto found = std::ranges::find(all, path, &SourceFile::path);
  static const SourceFile none;
  return found == all.end() ? none : *found;
}

/// Ids in the test names of a file: EMP-05 for TEST(Suite, EMP_05_Name) and for {"EMP_05_Name", function}.
std::set<std::string> ids_in_names(const SourceFile& file) {
  static const std::regex kName("(?:TEST(?:_F|_P)?\\(\\s*\\w+\\s*,\\s*|\\{\")((?:[A-Z]+[0-9]?_[0-9]{2}_)+)");
  static const std::regex kId("([A-Z]+[0-9]?)_([0-9]{2})_");
  std::set<std::string> ids;
  std::string text;
  for (const std::string& line : file.lines) text += line + "\n";
  for (std::sregex_iterator name(text.begin(), text.end(), kName), end; name != end; ++name) {
    const std::string part = (*name)[1];
    for (std::sregex_iterator id(part.begin(), part.end(), kId); id != end; ++id)
      ids.insert((*id)[1].str() + "-" + (*id)[2].str());
  }
  return ids;
}

struct Row {
  size_t line;
  std::string id, fault, here;
};
std::vector<Row> rows() {
  static const std::regex kRow("^\\| ([A-Z]+[0-9]?-[0-9]{2}) \\| (.*) \\| (.*) \\|$");
  std::vector<Row> found;
  const SourceFile& page = file_at("docs/faults.md");
  for (size_t i = 0; i < page.lines.size(); i++) {
    std::smatch m;
    if (std::regex_match(page.lines[i], m, kRow)) found.push_back({i + 1, m[1], m[2], m[3]});
  }
  return found;
}

}  // namespace

TEST(FaultRules, NamesOfTestsAreUnderstood) {
  const SourceFile file = make_source(
      "tests/x_test.cpp",
      "TEST(A, RS_03_RS_13_Both) {\nTEST_F(B,\n       H5_01_Wrapped) {\n{\"MP_05_Zero\", f},\n// GS_01_x");
  EXPECT_EQ(ids_in_names(file), (std::set<std::string>{"H5-01", "MP-05", "RS-03", "RS-13"}));
}

TEST(FaultRules, EveryFaultHasATestWithItsIdOrSaysWhatItWaitsFor) {
  static const std::regex kFile("`([\\w/]+(?:_test\\.cpp|\\.inc))`");
  std::vector<std::string> found;
  const SourceFile& page = file_at("docs/faults.md");
  const auto all = rows();
  EXPECT_GT(all.size(), 100U);
  std::set<std::string> known;
  for (const Row& row : all) {
    if (!known.insert(row.id).second) found.push_back(violation(page, row.line, row.id + " twice"));
    const bool waits = row.here.starts_with("waits for: ");
    int files = 0;
    for (std::sregex_iterator f(row.here.begin(), row.here.end(), kFile), end; f != end; ++f, ++files) {
      const std::string path = "tests/" + (*f)[1].str();
      if (!ids_in_names(file_at(path)).contains(row.id))
        found.push_back(violation(page, row.line, "no test of " + path + " has " + row.id + " in its name"));
    }
    if (waits == (files > 0))
      found.push_back(violation(page, row.line, row.id + ": expected tests, or what it waits for"));
  }
  EXPECT_TRUE(found.empty()) << listing(found);
}

TEST(FaultRules, EveryIdInATestNameIsOnThePageWithThatFile) {
  std::map<std::string, std::string> here;
  for (const Row& row : rows()) here[row.id] = row.here;
  std::vector<std::string> found;
  for (const SourceFile& file : all_sources()) {
    if (!file.path.starts_with("tests/") || file.path.starts_with("tests/rules/")) continue;
    for (const std::string& id : ids_in_names(file)) {
      if (here[id].find("`" + file.path.substr(6) + "`") == std::string::npos)
        found.push_back(violation(file, 1, "docs/faults.md does not name this file for " + id));
    }
  }
  EXPECT_TRUE(found.empty()) << listing(found);
}

}  // namespace shoal::rules
