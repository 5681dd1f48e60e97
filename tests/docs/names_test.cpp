// Every path, setting, flag, variable and name that README.md and docs/*.md put into a code span exists.
#include <gtest/gtest.h>

#include <algorithm>
#include <regex>
#include <set>

#include "tests/docs/session.h"
#include "tests/rules/source_tree.h"

namespace shoal::docs {
namespace {

namespace fs = std::filesystem;

/// Words of everything that is written for machines: what a name in a document can refer to. Not the
/// documents themselves, nor these tests.
const std::set<std::string>& known_words() {
  static const std::set<std::string> words = [] {
    std::set<std::string> out;
    const std::regex word("[A-Za-z_][A-Za-z0-9_]*");
    const fs::path root = SHOAL_SOURCE_DIR;
    for (const auto& entry : fs::recursive_directory_iterator(root)) {
      const std::string path = entry.path().lexically_relative(root).string();
      const std::string extension = entry.path().extension().string();
      const bool source =
          path == "CMakeLists.txt" || path.starts_with("core/") || path.starts_with("data/") ||
          path.starts_with("launch/") || path.starts_with("models/") || path.starts_with("optim/") ||
          path.starts_with("parallel/") || path.starts_with("configs/") || path.starts_with("tests/");
      if (!entry.is_regular_file() || !source || path.starts_with("tests/docs/") || extension == ".md")
        continue;
      out.insert(entry.path().stem().string());
      const std::string text = testing::file_bytes(entry.path());
      for (std::sregex_iterator it(text.begin(), text.end(), word), end; it != end; ++it)
        out.insert(it->str());
    }
    return out;
  }();
  return words;
}

/// Dotted paths of all settings, with and without the kinds between them.
struct Settings {
  std::set<std::string> paths, keys, values;
};
void collect(const nlohmann::json& schema, const std::string& path, Settings& out) {
  for (const char* variants : {"oneOf", "anyOf", "allOf"}) {
    if (schema.contains(variants))
      for (const auto& variant : schema[variants]) collect(variant, path, out);
  }
  if (schema.contains("enum"))
    for (const auto& value : schema["enum"]) out.values.insert(value.get<std::string>());
  if (schema.contains("const")) out.values.insert(schema["const"].get<std::string>());
  if (!schema.contains("properties")) return;
  for (const auto& [key, below] : schema["properties"].items()) {
    const std::string dotted = path.empty() ? key : path + "." + key;
    out.paths.insert(dotted);
    out.keys.insert(key);
    collect(below, dotted, out);
  }
}
const Settings& settings() {
  static const Settings found = [] {
    Settings out;
    const auto ended = Session::instance().shoal({"config", "--schema"});
    SHOAL_CHECK(ended.code == 0, "shoal config --schema failed: ", ended.err);
    collect(nlohmann::json::parse(ended.out), "", out);
    return out;
  }();
  return found;
}

/// "a{b,c}d" as "abd", "acd".
std::vector<std::string> expanded(const std::string& pattern) {
  const size_t open = pattern.find('{'), close = pattern.find('}', open);
  if (open == std::string::npos || close == std::string::npos) return {pattern};
  std::vector<std::string> out;
  std::istringstream choices(pattern.substr(open + 1, close - open - 1));
  for (std::string choice; std::getline(choices, choice, ',');)
    for (const std::string& rest : expanded(pattern.substr(close + 1)))
      out.push_back(pattern.substr(0, open) + choice + rest);
  return out;
}

std::regex wildcard(const std::string& pattern) {
  std::string out;
  for (const char c : pattern) {
    if (c == '*')
      out += "[^/]*";
    else if (std::isalnum(static_cast<unsigned char>(c)) || c == '/' || c == '_')
      out += c;
    else
      out += str('\\', c);
  }
  return std::regex(out);
}

/// Paths of the tree, of its tests, and of what a run leaves: "core/base/error.h", "core/base/error",
/// "core/base".
const std::vector<std::string>& known_paths() {
  static const std::vector<std::string> paths = [] {
    std::vector<std::string> out;
    const fs::path root = Session::instance().root();
    for (const char* start :
         {".", "tests", "runs/quickstart", "runs/quickstart/checkpoints/step-000000003", "runs/profiled"}) {
      std::error_code missing;
      for (const auto& entry : fs::recursive_directory_iterator(root / start, missing)) {
        const fs::path path = entry.path().lexically_relative(root / start);
        out.push_back(path.string());
        out.push_back((path.parent_path() / path.stem()).string());
      }
    }
    return out;
  }();
  return paths;
}

/// Whether an HDF5 file of a real checkpoint has this dataset, or one below it for "/a/b/...".
bool is_in_checkpoint(const std::string& dataset) {
  static const std::string names = [] {
    const fs::path folder = Session::instance().root() / "runs/quickstart/checkpoints/step-000000003";
    testing::Job job({"bash", "-c", "for f in w*.h5; do h5ls -r \"$f\"; done"}, folder);
    return "\n" + job.wait().out;
  }();
  const bool all_below = dataset.ends_with("...");
  return names.find("\n" + (all_below ? dataset.substr(0, dataset.size() - 3) : dataset + " ")) !=
         std::string::npos;
}

/// Whether a path with *, {a,b} or <placeholder> names something. Programs of a build count when their source
/// or target exists.
bool path_exists(std::string pattern) {
  pattern = std::regex_replace(pattern, std::regex("^<run>/|/$"), "");
  pattern = std::regex_replace(pattern, std::regex("<[^>]*>|\\bNAME\\b"), "*");
  if (pattern.starts_with("build/tests/bench/")) pattern = "tests/bench/" + pattern.substr(18) + ".cpp";
  if (pattern == "build/shoal") return true;                              // what these tests run
  pattern = std::regex_replace(pattern, std::regex("/x(?=[._])"), "/*");  // "an op `core/ops/x.h`"
  if (pattern.starts_with("/")) return fs::exists(pattern) || is_in_checkpoint(pattern);
  return std::ranges::all_of(expanded(pattern), [](const std::string& one) {
    const std::regex expression = wildcard(one);
    return std::ranges::any_of(known_paths(),
                               [&](const std::string& path) { return std::regex_match(path, expression); });
  });
}

bool is_setting(const std::string& text) {
  static const std::regex kIndex("\\.[0-9]+");
  return settings().paths.contains(std::regex_replace(text, kIndex, ""));
}

std::string flags_of_all_commands() {
  static const std::string text = [] {
    std::string out;
    for (const char* command :
         {"train", "prepare", "eval", "generate", "inspect", "report", "config", "bench"})
      out += Session::instance().shoal({command, "--help"}).out;
    for (const char* script : {"launch/common.sh", "launch/setup.sh", "launch/quickstart.sh", "tests/run.sh"})
      out += testing::file_bytes(fs::path(SHOAL_SOURCE_DIR) / script);
    return out;
  }();
  return text;
}

/// "" when every part of a code span refers to something, else what does not.
std::string unknown_part(const std::string& span) {
  static const std::regex kDotted("[a-z_]+(\\.[a-z_0-9]+)+"), kKeyValue("([a-z_][a-z_.0-9]*)(: |=)(.*)");
  static const std::regex kWord("[A-Za-z_][A-Za-z0-9_]*"), kFormula("[A-Za-z0-9_^ +*/().=-]*[ ][-+*=/][ ].*");
  static const std::regex kPath("[A-Za-z0-9_.<>*{},/+-]+"),
      kFile(".*\\.(cpp|h|sh|yaml|md|json|jsonl|html|h5|txt)");
  static const std::set<std::string> kSections = {"run",      "model", "data",      "optim",
                                                  "parallel", "eval",  "checkpoint"};
  std::smatch match;
  if (span.find(' ') == std::string::npos && span.starts_with("--"))
    return flags_of_all_commands().find(span) != std::string::npos ? "" : str("no flag ", span);
  if (std::regex_match(span, std::regex("\\.[a-z{},/ .]+"))) return "";  // an extension
  const bool one_word = std::regex_match(span, kPath);
  if (one_word && std::regex_match(span, kDotted) && kSections.contains(span.substr(0, span.find('.'))) &&
      !std::regex_match(span, kFile))
    return is_setting(span) ? "" : str("no setting ", span);
  if (one_word && (span.find('/') != std::string::npos || std::regex_match(span, kFile)))
    return path_exists(span) ? "" : str("no path ", span);
  if (std::regex_match(span, match, kKeyValue) && !std::regex_match(span, kFormula)) {
    const std::string key = match[1], value = match[3];
    const bool known = key.find('.') != std::string::npos ? is_setting(key) : settings().keys.contains(key);
    if (!known && key != "kind") return str("no setting ", key);
    const bool word = std::regex_match(value, kWord) && value != "true" && value != "false";
    return !word || settings().values.contains(value) || value == "value"
               ? ""
               : str("no value ", value, " of ", key);
  }
  for (std::sregex_iterator it(span.begin(), span.end(), kWord), end; it != end; ++it) {
    const std::string word = it->str();
    if (word.size() > 2 && !known_words().contains(word) && !settings().keys.contains(word))
      return str("no source mentions ", word);
  }
  return "";
}

}  // namespace

TEST(Documents, EveryNameInACodeSpanExists) {
  for (const Document& document : all_documents()) {
    for (const CodeSpan& span : document.spans) {
      const std::string problem = unknown_part(span.text);
      EXPECT_EQ(problem, "") << span.where() << ": `" << span.text << "`";
    }
  }
}

TEST(Documents, ANameThatDoesNotExistIsFound) {
  for (const char* wrong : {"core/base/nothing.h", "model.moe.topk", "--no-such-flag", "aux_scope: sequences",
                            "SHOAL_NO_SUCH_VARIABLE", "launch/{console,nothing}.cpp", "no_such_function()",
                            "model.moe.router.kind: no_such_router", "run.stepz=4"})
    EXPECT_NE(unknown_part(wrong), "") << wrong;
  for (const char* right : {"core/base/error.h", "model.moe.top_k", "--temperature", "aux_scope: sequence",
                            "SHOAL_CPU_ISA", "launch/{console,metrics}.cpp", "launch/checkpoint*.{h,cpp}",
                            "model.moe.router.kind: top_k", "run.steps=4"})
    EXPECT_EQ(unknown_part(right), "") << right;
}

TEST(Documents, LinksLeadSomewhere) {
  static const std::regex kLink("\\]\\(([^)# ]*)[^) ]*\\)");
  for (const Document& document : all_documents()) {
    const fs::path file = fs::path(SHOAL_SOURCE_DIR) / document.path;
    const std::string text = testing::file_bytes(file);
    for (std::sregex_iterator it(text.begin(), text.end(), kLink), end; it != end; ++it) {
      const std::string target = (*it)[1];
      if (target.starts_with("http")) continue;
      EXPECT_TRUE(fs::exists(file.parent_path() / target)) << document.path << ": no " << target;
    }
  }
}

}  // namespace shoal::docs
