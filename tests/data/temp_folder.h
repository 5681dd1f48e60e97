// A folder for one test's files, and small token files.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "data/indexed_dataset.h"

#include "tests/support/error_of.h"

namespace shoal::testing {

/// Made on construction, removed with its content on destruction.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "shoal_data_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }
  std::string write(const std::string& name, const std::string& content) const {
    const std::string path = path_ + "/" + name;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }

 private:
  std::string path_;
};

inline std::string slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream out;
  out << file.rdbuf();
  return out.str();
}

inline void write_documents(const std::string& prefix, const std::vector<std::vector<int32_t>>& documents,
                            int64_t vocab_size) {
  IndexedDatasetWriter writer(prefix, vocab_size);
  for (const auto& document : documents) {
    writer.add_tokens(document);
    writer.end_document();
  }
  writer.finish();
}

/// One document 0, 1, ..., n-1.
inline std::shared_ptr<const IndexedDataset> counting_dataset(const std::string& prefix, int32_t n) {
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; i++) tokens[static_cast<size_t>(i)] = i;
  write_documents(prefix, {tokens}, n < 70000 ? 70000 : n);
  return std::make_shared<const IndexedDataset>(prefix);
}

}  // namespace shoal::testing
