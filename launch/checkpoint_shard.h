// Writes the bytes of one checkpoint file: plain POSIX calls, no MPI, no HDF5, nothing collective, so that a
// background thread may run it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/checkpoint_format.h"
#include "launch/durable_file.h"

namespace shoal {

/// Called at named points of the save path; throws or kills the process in tests.
using Failpoint = std::function<void(const std::string& point)>;

/// Bytes in host memory and where they go in the file.
struct FileSegment {
  int64_t offset = 0, bytes = 0;
  const void* data = nullptr;
};

/// Creates the file, reserves its space, writes the segments, which must be ascending and without gaps, syncs
/// and closes. The checksums are made from the source bytes. segment_crcs gets one entry per segment.
/// Throws Error; the file is left to the caller to remove.
FileRecord write_checkpoint_file(const std::filesystem::path& path, const std::vector<FileSegment>& segments,
                                 std::vector<uint32_t>& segment_crcs, const Failpoint& failpoint);
/// The same for a short text, without failpoints.
FileRecord write_text_file(const std::filesystem::path& path, std::string_view text);

/// Throws Error when block `block` of the file differs from its record, or the size does. A file of 0 bytes
/// has one block here.
void check_block(const std::filesystem::path& folder, const FileRecord& file, int64_t block);

}  // namespace shoal
