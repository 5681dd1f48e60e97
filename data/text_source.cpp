#include "data/text_source.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/text.h"
#include "data/file_io.h"

namespace shoal {

namespace {

namespace fs = std::filesystem;

TextFile text_file(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0)
    throw UsageError(str("text ", path, ": cannot read the file's size: ", std::strerror(errno)));
  if (::access(path.c_str(), R_OK) != 0)
    throw UsageError(str("text ", path, ": cannot be read: ", std::strerror(errno)));
  return {path, status.st_size, int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec};
}

void list_folder(const std::string& folder, const std::vector<std::string>& extensions,
                 std::vector<TextFile>& files) {
  const size_t before = files.size();
  std::error_code error;
  for (auto it = fs::recursive_directory_iterator(folder, error); it != fs::recursive_directory_iterator();
       it.increment(error)) {
    if (error) break;
    const std::string path = it->path().string();
    const auto matches = [&path](const std::string& ending) { return path.ends_with(ending); };
    if (std::any_of(extensions.begin(), extensions.end(), matches) && it->is_regular_file(error)) {
      files.push_back(text_file(path));
    }
    error.clear();  // a link without target is not a regular file
  }
  if (error) throw UsageError(str("text ", folder, ": cannot list the folder: ", error.message()));
  if (files.size() == before) {
    throw UsageError(str("text ", folder, ": the folder has no files that end with ", join(extensions, " | "),
                         "; set extensions"));
  }
}

// Takes one line with its line end off the front of `rest`.
std::string_view take_line(std::string_view& rest) {
  const size_t newline = rest.find('\n');
  const std::string_view line = rest.substr(0, newline == std::string_view::npos ? rest.size() : newline + 1);
  rest.remove_prefix(line.size());
  return line;
}

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

using DocumentFn = std::function<void(std::string_view, int64_t)>;

void blank_line_documents(std::string_view text, const DocumentFn& fn) {
  size_t begin = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const size_t line_begin = text.size() - rest.size();
    if (!is_blank(take_line(rest))) continue;
    if (line_begin > begin) fn(text.substr(begin, line_begin - begin), static_cast<int64_t>(line_begin));
    begin = text.size() - rest.size();
  }
  if (begin < text.size()) fn(text.substr(begin), static_cast<int64_t>(text.size()));
}

void jsonl_documents(const std::string& path, std::string_view text, const std::string& text_key,
                     const DocumentFn& fn) {
  int64_t number = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view line = take_line(rest);
    const auto end = static_cast<int64_t>(text.size() - rest.size());
    number++;
    if (is_blank(line)) {
      fn({}, end);
      continue;
    }
    nlohmann::json value;
    try {
      value = nlohmann::json::parse(line);
    } catch (const nlohmann::json::exception& e) {
      throw UsageError(str(path, ":", number, ": expected one JSON object per line: ", e.what()));
    }
    if (!value.is_object() || !value.contains(text_key) || !value[text_key].is_string()) {
      throw UsageError(str(path, ":", number, ": expected a JSON object with a string under \"", text_key,
                           "\"; set text_key if the text has another key"));
    }
    fn(value[text_key].get_ref<const std::string&>(), end);
  }
}

}  // namespace

std::vector<TextFile> list_text_files(const std::vector<std::string>& paths,
                                      const std::vector<std::string>& extensions) {
  std::vector<TextFile> files;
  for (const auto& path : paths) {
    if (fs::is_directory(path)) {
      list_folder(path, extensions, files);
    } else if (fs::is_regular_file(path)) {
      files.push_back(text_file(path));
    } else {
      throw UsageError(str("text ", path,
                           fs::exists(path) ? ": expected a file or a folder, got something else"
                                            : ": no such file or folder"));
    }
  }
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  const auto same = [](const auto& a, const auto& b) { return a.path == b.path; };
  files.erase(std::unique(files.begin(), files.end(), same), files.end());
  return files;
}

DocumentMode document_mode(const std::string& name, const std::string& path) {
  if (name == "file") return DocumentMode::file;
  if (name == "blank_line") return DocumentMode::blank_line;
  if (name == "jsonl") return DocumentMode::jsonl;
  if (name != "auto")
    throw UsageError(str("documents: expected auto | file | blank_line | jsonl, got '", name, "'"));
  return path.ends_with(".jsonl") ? DocumentMode::jsonl : DocumentMode::file;
}

void for_each_document(const TextFile& file, DocumentMode mode, const std::string& text_key,
                       const DocumentFn& fn) {
  const MappedFile mapped(file.path, MappedFile::Access::sequential);
  switch (mode) {
    case DocumentMode::file:
      fn(mapped.text(), mapped.size());
      break;
    case DocumentMode::blank_line:
      blank_line_documents(mapped.text(), fn);
      break;
    case DocumentMode::jsonl:
      jsonl_documents(file.path, mapped.text(), text_key, fn);
      break;
  }
}

}  // namespace shoal
