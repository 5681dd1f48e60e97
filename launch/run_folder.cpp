#include "launch/run_folder.h"

#include <cstdio>
#include <random>

#include "data/file_io.h"
#include "launch/checkpoint_folder.h"
#include "launch/crc32c.h"

namespace shoal {

namespace fs = std::filesystem;

namespace {

constexpr size_t kIdDigits = 32;

bool is_run_id(const std::string& text) {
  return text.size() == kIdDigits && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

}  // namespace

std::string new_run_id() {
  std::random_device device;
  std::string id;
  while (id.size() < kIdDigits) {
    char digits[9];
    std::snprintf(digits, sizeof digits, "%08x", device());
    id += digits;
  }
  return id;
}

std::string read_run_id(const fs::path& run_folder) {
  try {
    std::string text = read_file(run_folder / kRunIdName, /*max_bytes=*/4096);
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return is_run_id(text) ? text : "";
  } catch (const Error&) {
    return "";  // the next training takes it from a checkpoint
  }
}

void write_run_id(const fs::path& run_folder, const std::string& id) {
  write_file((run_folder / kRunIdName).string(), id + "\n");
}

std::optional<StoredConfig> stored_config(const fs::path& run_folder) {
  const fs::path checkpoints = run_folder / "checkpoints";
  for (const int64_t step : committed_steps(checkpoints)) {
    const fs::path file = checkpoints / step_name(step) / kConfigName;
    try {
      const ManifestResult result = read_manifest(file.parent_path());
      std::string yaml = read_file(file, kMaxStateBytes);
      if (result.problem.empty() && crc32c(yaml) == result.manifest.find_file(kConfigName)->crc)
        return StoredConfig{std::move(yaml), file};
    } catch (const Error&) {
      continue;  // damaged: an older one will do
    }
  }
  return std::nullopt;
}

}  // namespace shoal
