// The manifest of a checkpoint (docs/checkpoints.md): which files there are with their checksums, and where
// each piece of each tensor lies. Only text and plain data; no I/O, no HDF5.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/checkpoint_box.h"

namespace shoal {

inline constexpr int64_t kCheckpointVersion = 1;
inline constexpr int64_t kBlockBytes = int64_t{64} << 20;  // files are checksummed in blocks of this size
inline constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;
inline constexpr int64_t kMaxStateBytes = int64_t{1} << 30;
inline constexpr const char* kManifestName = "MANIFEST.json";
inline constexpr const char* kStateName = "state.json";
inline constexpr const char* kConfigName = "config.yaml";
inline constexpr const char* kRunIdName = "run-id";  // in the run folder, see run_folder.h

struct FileRecord {
  std::string name;  // inside the checkpoint's directory
  int64_t bytes = 0;
  uint32_t crc = 0;                  // CRC-32C of the whole file
  std::vector<uint32_t> block_crcs;  // of each kBlockBytes, the last block may be shorter
  int64_t num_blocks() const { return static_cast<int64_t>(block_crcs.size()); }
};

/// One piece of a tensor: row-major little-endian elements in one contiguous byte range of one file.
struct PieceRecord {
  std::string file;
  int64_t offset = 0, bytes = 0;
  Box box;
  uint32_t crc = 0;
};

struct TensorRecord {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::vector<PieceRecord> pieces;
};

struct Manifest {
  int64_t step = 0;
  std::string run;                    // id of the training run; "": unknown
  int64_t world = 1;                  // ranks that saved it; says nothing about who may load it
  std::vector<FileRecord> files;      // sorted by name
  std::vector<TensorRecord> tensors;  // sorted by name

  const FileRecord* find_file(std::string_view name) const;
  const TensorRecord* find_tensor(std::string_view name) const;
  void sort();
};

/// JSON with sorted keys and a last line "crc32c xxxxxxxx" over everything before it. Equal manifests give
/// equal text.
std::string manifest_text(const Manifest& manifest);

struct ManifestResult {
  Manifest manifest;
  std::string problem;         // "" when everything holds
  int64_t newer_version = -1;  // >= 0: intact, but of a format that this program does not know
};
/// Checks the self-checksum first, then parses and checks everything that can be checked without the other
/// files: names, sizes, offsets, shapes, block checksums against file checksums, and that every tensor is
/// covered exactly once.
ManifestResult parse_manifest(std::string_view text);

/// Manifest text without the checks, for pieces on their way between ranks.
std::string manifest_part_text(const Manifest& part);
Manifest parse_manifest_part(std::string_view text);

/// "" or what is wrong with the content (see parse_manifest).
std::string manifest_problem(const Manifest& manifest);

/// [A-Za-z0-9._-]+, but not "." or "..".
bool is_file_name(std::string_view name);
/// File names separated by single '/'.
bool is_tensor_name(std::string_view name);
std::optional<DType> dtype_from_name(std::string_view name);

std::string shard_name(int rank);     // w0003.h5
std::string step_name(int64_t step);  // step-000001000
/// The step of a directory name that step_name() makes; empty for every other name.
std::optional<int64_t> step_of_name(std::string_view name);

}  // namespace shoal
