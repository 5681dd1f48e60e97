#include "tests/rules/source_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "core/base/error.h"
#include "core/base/text.h"

namespace shoal::rules {

namespace {

// Blanks out comments, string and character literals, keeping the line structure.
class Stripper {
 public:
  explicit Stripper(const std::string& text) : text_(text), out_(text) {}

  std::string run() {
    while (at_ < text_.size()) {
      if (starts("//")) {
        blank_until("\n", false);
      } else if (starts("/*")) {
        blank_until("*/", true);
      } else if (starts("R\"") && !in_word()) {
        const size_t open = text_.find('(', at_);
        if (open == std::string::npos) break;
        blank_until(")" + text_.substr(at_ + 2, open - at_ - 2) + "\"", true);
      } else if (text_[at_] == '"') {
        blank_literal('"');
      } else if (text_[at_] == '\'' && !(in_word() && digit_before())) {
        blank_literal('\'');
      } else {
        at_++;
      }
    }
    return out_;
  }

 private:
  bool starts(const char* prefix) const {
    return text_.compare(at_, std::string(prefix).size(), prefix) == 0;
  }
  bool in_word() const {
    return at_ > 0 && (std::isalnum(static_cast<unsigned char>(text_[at_ - 1])) || text_[at_ - 1] == '_');
  }
  bool digit_before() const { return std::isxdigit(static_cast<unsigned char>(text_[at_ - 1])); }
  void blank(size_t end) {
    for (end = std::min(end, text_.size()); at_ < end; at_++)
      if (text_[at_] != '\n') out_[at_] = ' ';
  }
  void blank_until(const std::string& mark, bool inclusive) {
    const size_t end = text_.find(mark, at_ + 2);
    blank(end == std::string::npos ? text_.size() : end + (inclusive ? mark.size() : 0));
  }
  void blank_literal(char quote) {
    size_t end = at_ + 1;
    while (end < text_.size() && text_[end] != quote && text_[end] != '\n') end += text_[end] == '\\' ? 2 : 1;
    blank(end + 1);
  }

  const std::string& text_;
  std::string out_;
  size_t at_ = 0;
};

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::vector<SourceFile> read_tree() {
  namespace fs = std::filesystem;
  static const std::set<std::string> kExtensions = {".h",  ".cpp", ".cu",    ".cuh",  ".inc",
                                                    ".sh", ".md",  ".cmake", ".yaml", ".txt"};
  std::vector<SourceFile> files;
  for (const char* top : {"core", "parallel", "models", "optim", "data", "launch", "configs", "tests", "docs",
                          "README.md", "CMakeLists.txt"}) {
    std::vector<fs::path> paths;
    if (fs::is_regular_file(source_root() / top)) paths.push_back(source_root() / top);
    if (fs::is_directory(source_root() / top))
      for (const auto& entry : fs::recursive_directory_iterator(source_root() / top))
        if (entry.is_regular_file()) paths.push_back(entry.path());
    for (const auto& path : paths) {
      if (!kExtensions.contains(path.extension().string())) continue;
      std::ostringstream text;
      text << std::ifstream(path, std::ios::binary).rdbuf();
      files.push_back(make_source(fs::relative(path, source_root()).string(), text.str()));
    }
  }
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  return files;
}

// Whether the text before a '{' at namespace or class scope opens a scope rather than a body.
bool opens_scope(std::string head) {
  static const std::regex kTemplate(R"(template\s*<[^{}]*?>\s*(?=class|struct|union|[a-z]))");
  static const std::regex kScope(R"(^\s*(?:(?:inline|export|typedef|static|constexpr|const)\s+)*)"
                                 R"((?:namespace|class|struct|union|enum|extern)\b)");
  head = std::regex_replace(head, kTemplate, "");
  // "struct Foo make() {" is a function; "struct alignas(64) Foo {" is not.
  if (!std::regex_search(head, kScope)) return false;
  const size_t last = head.find_last_not_of(" \n\t");
  return last == std::string::npos || head[last] != ')';
}

}  // namespace

bool SourceFile::has_extension(std::initializer_list<const char*> extensions) const {
  const std::string extension = std::filesystem::path(path).extension().string();
  return std::any_of(extensions.begin(), extensions.end(), [&](const char* e) { return extension == e; });
}

bool SourceFile::is_cpp() const {
  return has_extension({".h", ".cpp", ".cu", ".cuh", ".inc"});
}

SourceFile make_source(const std::string& path, const std::string& text) {
  SourceFile file{path, split_lines(text), {}};
  if (file.is_cpp()) file.code = split_lines(Stripper(text).run());
  return file;
}

std::filesystem::path source_root() {
  return SHOAL_SOURCE_DIR;
}

const std::vector<SourceFile>& all_sources() {
  static const std::vector<SourceFile> files = read_tree();
  return files;
}

std::string violation(const SourceFile& file, size_t line, const std::string& reason) {
  return str(file.path, ":", line, ": ", reason);
}

std::string listing(const std::vector<std::string>& violations) {
  return join(violations, "\n");
}

std::vector<Include> includes_of(const SourceFile& file) {
  static const std::regex kInclude(R"re(^\s*#\s*include\s*(["<])([^">]+)[">])re");
  std::vector<Include> includes;
  std::smatch match;
  for (size_t i = 0; i < file.lines.size(); i++)
    if (std::regex_search(file.lines[i], match, kInclude))
      includes.push_back({i + 1, match[2], match[1] == "<"});
  return includes;
}

std::vector<FunctionSpan> functions_of(const SourceFile& file) {
  std::vector<FunctionSpan> spans;
  int scopes = 0, depth = 0;  // depth: braces inside a body
  std::string head;
  std::vector<bool> is_scope;
  FunctionSpan open;
  for (size_t i = 0; i < file.code.size(); i++) {
    const std::string& line = file.code[i];
    const size_t first = line.find_first_not_of(" \t");
    const bool directive = (first != std::string::npos && line[first] == '#') ||
                           (i > 0 && !file.code[i - 1].empty() && file.code[i - 1].back() == '\\');
    if (directive) continue;
    for (const char c : line) {
      if (depth > 0) {
        depth += c == '{' ? 1 : c == '}' ? -1 : 0;
        if (depth == 0) {
          open.num_lines = i + 1 - open.first_line + 1;
          spans.push_back(open);
          head.clear();
        }
      } else if (c == '{' && opens_scope(head)) {
        scopes++;
        head.clear();
      } else if (c == '{') {
        depth = 1;
        open.first_line = i + 1;
      } else if (c == '}' || c == ';') {
        if (c == '}') scopes--;
        head.clear();
      } else {
        head += c;
      }
    }
    head += '\n';
  }
  return spans;
}

std::vector<Registration> registrations_of(const SourceFile& file) {
  // Groups: the registry, empty in a call of the file's own helper; "add"; the first argument.
  static const std::regex kAdd(R"re((?:\b(\w+Registry)::|[^:\w])(add)<[^>()]*>\(\s*("[^"]*"|\w+))re");
  const std::string text = join(file.lines, "\n"), code = join(file.code, "\n");
  std::vector<Registration> found;
  std::string helper_registry;  // where `template <...> bool add(name, ...)` of this file registers
  for (std::sregex_iterator it(text.begin(), text.end(), kAdd), end; it != end; ++it) {
    const std::smatch& match = *it;
    if (code.compare(static_cast<size_t>(match.position(2)), 4, "add<") != 0) continue;  // in a comment
    const std::string registry = match[1], argument = match[3];
    if (argument[0] != '"') {
      helper_registry = registry;
    } else if (const std::string& owner = registry.empty() ? helper_registry : registry; !owner.empty()) {
      const auto line = static_cast<size_t>(std::count(text.begin(), text.begin() + match.position(2), '\n'));
      found.push_back({line + 1, owner, argument.substr(1, argument.size() - 2)});
    }
  }
  return found;
}

TEST(SourceTree, FindsTheSources) {
  EXPECT_GT(all_sources().size(), 50U);
  const auto has = [](const std::string& path) {
    return std::any_of(all_sources().begin(), all_sources().end(),
                       [&](const auto& f) { return f.path == path; });
  };
  EXPECT_TRUE(has("core/base/error.h"));
  EXPECT_TRUE(has("CMakeLists.txt"));
  EXPECT_TRUE(has("launch/setup.sh"));
}

TEST(SourceTree, BlanksCommentsAndLiterals) {
  const auto file = make_source("a.cpp",
                                "int a = 1'000; // {\n"
                                "auto s = \"{\\\"\"; char c = '{'; /* {\n{ */ int b;\n"
                                "auto r = R\"x({)\" {)x\";\n");
  for (const auto& line : file.code) EXPECT_EQ(line.find('{'), std::string::npos) << line;
  EXPECT_NE(file.code[0].find("1'000;"), std::string::npos);
  EXPECT_NE(file.code[2].find("int b;"), std::string::npos);
  EXPECT_NE(file.code[3].find(';'), std::string::npos);
}

TEST(SourceTree, MeasuresFunctionsByBraceDepth) {
  const auto file = make_source("a.cpp",
                                "namespace x {\n"
                                "template <class T>\n"
                                "struct S final : B {\n"
                                "  S() : a(1), b{2} {}\n"
                                "  void f() const {\n"
                                "    if (a) {\n"
                                "    }\n"
                                "  }\n"
                                "};\n"
                                "#define M(x) do { \\\n"
                                "  x } while (0)\n"
                                "const bool r = add([](int y) {\n"
                                "  return y;\n"
                                "});\n"
                                "}  // namespace x\n");
  const auto spans = functions_of(file);
  std::vector<size_t> lengths;
  for (const auto& span : spans) lengths.push_back(span.num_lines);
  EXPECT_EQ(lengths, (std::vector<size_t>{1, 1, 4, 3}));  // b{2} counts as a body of one line
}

TEST(SourceTree, FindsIncludesAndRegistrations) {
  const auto file = make_source("a.cpp",
                                "#include <mpi.h>\n#include \"core/base/error.h\"\n"
                                "const bool r = RouterRegistry::add<TopK>(\n    \"top_k\", \"doc\", f);\n"
                                "// OtherRegistry::add<TopK>(\"in_a_comment\", f);\n");
  const auto includes = includes_of(file);
  ASSERT_EQ(includes.size(), 2U);
  EXPECT_EQ(includes[0].target, "mpi.h");
  EXPECT_TRUE(includes[0].angled);
  EXPECT_EQ(includes[1].line, 2U);
  const auto registrations = registrations_of(file);
  ASSERT_EQ(registrations.size(), 1U);
  EXPECT_EQ(registrations[0].registry, "RouterRegistry");
  EXPECT_EQ(registrations[0].name, "top_k");
}

TEST(SourceTree, FindsRegistrationsThroughAHelper) {
  const auto file = make_source("a.cpp",
                                "template <class S, class O = A>\nbool add(const char* name) {\n"
                                "  return ScheduleRegistry::add<O>(\n      name, f);\n}\n"
                                "const bool r[] = {\n    add<Linear>(\"linear\"), add<Wsd, B>(\"wsd\"),\n};\n"
                                "// add<Other>(\"in_a_comment\")\n");
  const auto registrations = registrations_of(file);
  ASSERT_EQ(registrations.size(), 2U);
  EXPECT_EQ(registrations[0].name, "linear");
  EXPECT_EQ(registrations[0].line, 7U);
  EXPECT_EQ(registrations[1].registry, "ScheduleRegistry");
  EXPECT_EQ(registrations[1].name, "wsd");
  EXPECT_TRUE(registrations_of(make_source("a.cpp", "set.add<int>(\"x\");\n")).empty());
}

}  // namespace shoal::rules
