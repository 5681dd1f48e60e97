// README.md and docs/*.md as the documentation tests see them: fenced blocks with the comment in front of
// them, and code spans. An HTML comment, which no reader sees, says how a block is meant:
//   <!-- not run: REASON -->            a shell block that cannot run in a test
//   <!-- not run (COMMAND): REASON -->  only its lines that start with COMMAND
//   <!-- from: FILE -->                 a C++ block: an excerpt of that file
//   <!-- file: NAME -->                 a YAML block: a whole experiment with that name; without: a part of
//   one
//   <!-- output -->                     a text block: lines that the commands before it print
//   <!-- checkpoint folder -->          a text block: what lies in one
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace shoal::docs {

struct Block {
  std::string document;           // "docs/moe.md"
  size_t line = 0;                // of the opening fence, 1-based
  std::string language, comment;  // comment: the text between <!-- and -->, or ""
  std::vector<std::string> lines;
  std::string where() const;  // "docs/moe.md:12"
  std::string text() const;
  /// "exp.yaml" for <!-- file: exp.yaml --> and key "file"; "" for another key.
  std::string remark(const std::string& key) const;
};

struct CodeSpan {
  std::string document;
  size_t line = 0;
  std::string text;
  std::string where() const;
};

struct Document {
  std::string path;  // relative to the top of the source tree
  std::vector<Block> blocks;
  std::vector<CodeSpan> spans;  // outside blocks; a span over a line break is joined with a space
};

Document read_document(const std::filesystem::path& root, const std::string& path);
/// README.md, then docs/*.md by name. Read once.
const std::vector<Document>& all_documents();

/// Lines of a shell block as commands: without comments and empty lines, continued lines joined.
std::vector<std::string> commands_of(const Block& block);
/// Words of a command line as the shell splits it; knows '...', "..." and \, but no expansion.
std::vector<std::string> split_words(const std::string& command);

}  // namespace shoal::docs
