// What the text of sources may hold, and what may lie at the top level.
#include <gtest/gtest.h>

#include <algorithm>
#include <regex>
#include <set>

#include "core/base/error.h"
#include "tests/rules/source_tree.h"

namespace shoal::rules {

namespace {

std::vector<std::string> text_violations(const SourceFile& file) {
  // Spelled in pieces, so that this file does not break its own rules.
  static const std::regex kUnfinished(
      "\\b(TO"
      "DO|FIX"
      "ME|X"
      "XX|HA"
      "CK)\\b");
  static const std::regex kMachinePath(
      "(^|[\"' (=])/(wo"
      "rk|ro"
      "ot|ho"
      "me)/");
  std::vector<std::string> found;
  for (size_t i = 0; i < file.lines.size(); i++) {
    const std::string& line = file.lines[i];
    auto report = [&](const char* reason) { found.push_back(violation(file, i + 1, reason)); };
    if (std::regex_search(line, kUnfinished)) report("mark of unfinished work; write an issue instead");
    if (std::regex_search(line, kMachinePath)) report("path of one machine");
    if (line.find('\t') != std::string::npos) report("tab");
    if (line.find('\r') != std::string::npos) report("carriage return");
    if (!line.empty() && line.back() == ' ' && !file.has_extension({".md"}))
      report("space at the end of the line");
    const bool ascii =
        std::all_of(line.begin(), line.end(), [](char c) { return static_cast<unsigned char>(c) < 128; });
    if (!ascii && !file.has_extension({".md"})) report("not ASCII");
  }
  return found;
}

}  // namespace

TEST(TextRules, SourcesArePlainAndFinished) {
  std::vector<std::string> found;
  for (const auto& file : all_sources()) {
    const auto more = text_violations(file);
    found.insert(found.end(), more.begin(), more.end());
  }
  EXPECT_TRUE(found.empty()) << listing(found);
}

TEST(TextRules, HeadersOpenWithACommentAndPragmaOnce) {
  std::vector<std::string> found;
  for (const auto& file : all_sources()) {
    if (!file.is_header()) continue;
    if (file.lines.empty() || !file.lines[0].starts_with("// "))
      found.push_back(violation(file, 1, "no comment on what this is"));
    if (std::find(file.lines.begin(), file.lines.end(), "#pragma once") == file.lines.end())
      found.push_back(violation(file, 1, "no #pragma once"));
  }
  EXPECT_TRUE(found.empty()) << listing(found);
}

TEST(TextRules, LibrariesNeverEndTheProcess) {
  static const std::regex kExit(R"((^|[^\w.>])(std::)?(exit|quick_exit|terminate)\s*\()");
  std::vector<std::string> found;
  for (const auto& file : all_sources()) {
    if (!file.is_cpp() || file.path.starts_with("tests/") || file.path == "launch/main.cpp") continue;
    for (size_t i = 0; i < file.code.size(); i++)
      if (std::regex_search(file.code[i], kExit)) found.push_back(violation(file, i + 1, "ends the process"));
  }
  EXPECT_TRUE(found.empty()) << listing(found);
}

TEST(TextRules, TopLevelHoldsOnlyKnownEntries) {
  static const std::set<std::string> kKnown = {"CMakeLists.txt", "core", "parallel", "models",
                                               "optim",          "data", "launch",   "configs",
                                               "tests",          "docs", "README.md"};
  for (const auto& entry : std::filesystem::directory_iterator(source_root())) {
    const std::string name = entry.path().filename().string();
    const bool generated = name.starts_with("build") || name == "runs" || name == "compile_commands.json";
    EXPECT_TRUE(name.starts_with(".") || generated || kKnown.contains(name))
        << name << ": not one of the folders of docs/design.md";
  }
}

TEST(TextRules, AViolationIsFoundAndNamed) {
  EXPECT_EQ(text_violations(make_source("a.cpp",
                                        "ok\n// TO"
                                        "DO: later\n")),
            std::vector<std::string>{"a.cpp:2: mark of unfinished work; write an issue instead"});
  EXPECT_EQ(text_violations(make_source("a.cpp", "\tint a;\n")).size(), 1U);
  EXPECT_EQ(text_violations(make_source("a.cpp", "// caf\xc3\xa9\n")).size(), 1U);
  EXPECT_EQ(text_violations(make_source("a.sh",
                                        "cd /wo"
                                        "rk/x\n"))
                .size(),
            1U);
  EXPECT_TRUE(text_violations(make_source("a.md", "caf\xc3\xa9  \n")).empty());
}

}  // namespace shoal::rules
