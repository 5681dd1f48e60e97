// Finds text files and cuts them into documents. Used by dataset preparation.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace shoal {

struct TextFile {
  std::string path;
  int64_t size = 0;      // bytes
  int64_t mtime_ns = 0;  // last modification
  int64_t ctime_ns = 0;  // last change of content or attributes; no program can set it back
  uint64_t inode = 0;
};

/// Files are taken as they are; folders are searched recursively (symbolic links to folders are not followed)
/// for names with one of the endings. Sorted by path bytes, each file once. UsageError for a path that does
/// not exist or a folder without such files.
std::vector<TextFile> list_text_files(const std::vector<std::string>& paths,
                                      const std::vector<std::string>& extensions);

enum class DocumentMode { file, blank_line, jsonl };

/// The mode for one file: `name` is auto | file | blank_line | jsonl.
DocumentMode document_mode(const std::string& name, const std::string& path);

/// Calls fn(document, end_offset) for each document in file order, empty ones included; the view is valid
/// during the call, end_offset is the byte of the file up to which it has been read.
///   file:       the whole file.
///   blank_line: maximal runs of lines that are not blank (blank: only spaces, tabs, CR), with their line
///   ends. jsonl:      the string under `text_key` of each line; a blank line is an empty document.
///   UsageError (file:line)
///               for a line that is not a JSON object with that key.
void for_each_document(const TextFile& file, DocumentMode mode, const std::string& text_key,
                       const std::function<void(std::string_view document, int64_t end_offset)>& fn);

}  // namespace shoal
