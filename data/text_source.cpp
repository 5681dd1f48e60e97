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
#include "data/utf8.h"

namespace shoal {

namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxReasonBytes = 300;

TextFile text_file(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0)
    throw UsageError(str("text ", path, ": cannot read the file's size: ", std::strerror(errno)));
  if (::access(path.c_str(), R_OK) != 0)
    throw UsageError(str("text ", path, ": cannot be read: ", std::strerror(errno)));
  const auto nanoseconds = [](const timespec& time) {
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  };
  return {path, status.st_size, nanoseconds(status.st_mtim), nanoseconds(status.st_ctim), status.st_ino};
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
                         "; set data.extensions"));
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
      // The message quotes the text it stopped at, which may be a very long line.
      std::string why = e.what();
      if (why.size() > kMaxReasonBytes)
        why = why.substr(0, valid_utf8_prefix(why.substr(0, kMaxReasonBytes))) + "...";
      throw UsageError(str(path, ":", number, ": expected one JSON object per line: ", why));
    }
    if (!value.is_object() || !value.contains(text_key) || !value[text_key].is_string()) {
      throw UsageError(str(path, ":", number, ": expected a JSON object with a string under \"", text_key,
                           "\"; set data.text_key if the text has another key"));
    }
    fn(value[text_key].get_ref<const std::string&>(), end);
  }
}

}  // namespace

std::vector<TextFile> list_text_files(const std::vector<std::string>& paths,
                                      const std::vector<std::string>& extensions) {
  std::vector<TextFile> files;
  for (const auto& path : paths) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (status.type() == fs::file_type::directory) {
      list_folder(path, extensions, files);
    } else if (status.type() == fs::file_type::regular) {
      files.push_back(text_file(path));
    } else if (status.type() == fs::file_type::not_found) {
      throw UsageError(str("text ", path, ": no such file or folder",
                           fs::path(path).is_relative() ? str(" in ", fs::current_path().string()) : ""));
    } else {
      throw UsageError(str("text ", path, ": expected a file or a folder, got ",
                           error ? "an error: " + error.message() : "a device, pipe or socket"));
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
