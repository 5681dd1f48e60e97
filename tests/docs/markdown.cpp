#include "tests/docs/markdown.h"

#include <algorithm>
#include <fstream>

#include "core/base/error.h"

namespace shoal::docs {

namespace fs = std::filesystem;

std::string Block::where() const {
  return str(document, ":", line);
}

std::string Block::text() const {
  std::string out;
  for (const std::string& l : lines) out += l + "\n";
  return out;
}

std::string Block::remark(const std::string& key) const {
  return comment.starts_with(key + ": ") ? comment.substr(key.size() + 2) : "";
}

std::string CodeSpan::where() const {
  return str(document, ":", line);
}

namespace {

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t"), last = text.find_last_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

// Spans of one paragraph. Lines of a paragraph are joined, because a span may go over a line end.
void spans_of(const std::string& document, const std::vector<std::pair<size_t, std::string>>& paragraph,
              std::vector<CodeSpan>& out) {
  bool open = false;
  CodeSpan span;
  for (const auto& [number, line] : paragraph) {
    if (open) span.text += ' ';
    for (const char c : line) {
      if (c == '`') {
        if (open) out.push_back(span);
        open = !open;
        span = CodeSpan{document, number, ""};
      } else if (open) {
        span.text += c;
      }
    }
  }
  SHOAL_CHECK(!open, document, ":", span.line, ": a code span that starts here has no end");
}

}  // namespace

Document read_document(const fs::path& root, const std::string& path) {
  std::ifstream file(root / path);
  SHOAL_CHECK(file.good(), path, ": cannot be read");
  Document document{path, {}, {}};
  std::vector<std::pair<size_t, std::string>> paragraph;
  std::string comment;
  size_t number = 0;
  bool inside = false;
  auto end_paragraph = [&] {
    spans_of(path, paragraph, document.spans);
    paragraph.clear();
  };
  for (std::string line; std::getline(file, line);) {
    number++;
    if (line.starts_with("```")) {
      end_paragraph();
      if (!inside) document.blocks.push_back(Block{path, number, trimmed(line.substr(3)), comment, {}});
      inside = !inside;
      comment.clear();
    } else if (inside) {
      document.blocks.back().lines.push_back(line);
    } else if (line.starts_with("<!-- ") && line.ends_with(" -->")) {
      comment = line.substr(5, line.size() - 9);
    } else {
      if (trimmed(line).empty() || line.starts_with("|") || line.starts_with("- ")) end_paragraph();
      if (!trimmed(line).empty()) comment.clear();
      paragraph.emplace_back(number, line);
    }
  }
  SHOAL_CHECK(!inside, path, ": the last block has no end");
  end_paragraph();
  return document;
}

const std::vector<Document>& all_documents() {
  static const std::vector<Document> documents = [] {
    const fs::path root = SHOAL_SOURCE_DIR;
    std::vector<std::string> paths;
    for (const auto& entry : fs::directory_iterator(root / "docs"))
      if (entry.path().extension() == ".md") paths.push_back("docs/" + entry.path().filename().string());
    std::ranges::sort(paths);
    paths.insert(paths.begin(), "README.md");
    std::vector<Document> out;
    for (const std::string& path : paths) out.push_back(read_document(root, path));
    return out;
  }();
  return documents;
}

std::vector<std::string> split_words(const std::string& command) {
  std::vector<std::string> words;
  std::string word;
  bool started = false;
  char quote = 0;
  for (size_t i = 0; i < command.size(); i++) {
    const char c = command[i];
    if (quote != 0 && c == quote) {
      quote = 0;
    } else if (quote == 0 && (c == '"' || c == '\'')) {
      quote = c;
      started = true;
    } else if (quote != '\'' && c == '\\' && i + 1 < command.size()) {
      word += command[++i];
      started = true;
    } else if (quote == 0 && c == ' ') {
      if (started) words.push_back(word);
      word.clear();
      started = false;
    } else if (quote == 0 && c == '#' && !started) {
      break;  // a comment
    } else {
      word += c;
      started = true;
    }
  }
  if (started) words.push_back(word);
  return words;
}

std::vector<std::string> commands_of(const Block& block) {
  std::vector<std::string> commands;
  bool goes_on = false;
  for (const std::string& line : block.lines) {
    std::string text = trimmed(line);
    const bool continued = text.ends_with("\\");
    if (continued) text = trimmed(text.substr(0, text.size() - 1));
    if (goes_on) {
      commands.back() += " " + text;
    } else if (!split_words(text).empty()) {
      commands.push_back(text);
    }
    goes_on = continued;
  }
  return commands;
}

}  // namespace shoal::docs
