// What a run folder says about itself besides its checkpoints: which run it is, and its config. Used by the
// trainer and by the commands that look at a run.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace shoal {

/// 32 hexadecimal digits, random: a run keeps its id over restarts, and its checkpoints carry it.
std::string new_run_id();
/// The id in <run>/run-id; "" when there is none, or something else than an id.
std::string read_run_id(const std::filesystem::path& run_folder);
void write_run_id(const std::filesystem::path& run_folder, const std::string& id);

/// The config that a checkpoint keeps, for a run folder without config.yaml.
struct StoredConfig {
  std::string yaml;
  std::filesystem::path file;
};
/// From the newest checkpoint whose manifest holds and whose config has the right checksum; empty when there
/// is none. Reads no tensors.
std::optional<StoredConfig> stored_config(const std::filesystem::path& run_folder);

}  // namespace shoal
