#include "launch/checkpoint_shard.h"

#include <algorithm>

#include "launch/crc32c.h"

namespace shoal {

namespace {

// Small enough that the checksum finds in the cache what the write has just copied.
constexpr int64_t kChunkBytes = int64_t{1} << 20;

// Builds the checksums of a file from those of consecutive pieces that do not cross a block border.
class FileChecksums {
 public:
  void append(uint32_t crc, int64_t bytes) {
    if (record_.bytes % kBlockBytes == 0) record_.block_crcs.push_back(0);
    record_.block_crcs.back() = crc32c_combine(record_.block_crcs.back(), crc, static_cast<uint64_t>(bytes));
    record_.crc = crc32c_combine(record_.crc, crc, static_cast<uint64_t>(bytes));
    record_.bytes += bytes;
  }
  FileRecord finish(std::string name) {
    record_.name = std::move(name);
    return std::move(record_);
  }

 private:
  FileRecord record_;
};

}  // namespace

FileRecord write_checkpoint_file(const std::filesystem::path& path, const std::vector<FileSegment>& segments,
                                 std::vector<uint32_t>& segment_crcs, const Failpoint& failpoint) {
  const int64_t file_bytes = segments.empty() ? 0 : segments.back().offset + segments.back().bytes;
  failpoint("before-create");
  DurableFile file = DurableFile::create(path);
  failpoint("before-reserve");
  file.reserve(file_bytes);
  failpoint("before-write");
  FileChecksums checksums;
  int64_t position = 0;
  bool half_done = false;
  segment_crcs.assign(segments.size(), 0);
  for (size_t i = 0; i < segments.size(); i++) {
    const FileSegment& segment = segments[i];
    SHOAL_CHECK(segment.offset == position, path.string(), ": segment ", i, " starts at ", segment.offset,
                ", expected ", position);
    const auto* data = static_cast<const std::byte*>(segment.data);
    while (position < segment.offset + segment.bytes) {
      const int64_t left = segment.offset + segment.bytes - position;
      const int64_t count = std::min({left, kChunkBytes, kBlockBytes - position % kBlockBytes});
      const std::byte* from = data + (position - segment.offset);
      file.write_at(from, count, position);
      const uint32_t crc = crc32c(from, static_cast<size_t>(count));
      checksums.append(crc, count);
      segment_crcs[i] = crc32c_combine(segment_crcs[i], crc, static_cast<uint64_t>(count));
      position += count;
      if (!half_done && position >= file_bytes / 2) {
        half_done = true;
        failpoint("mid-write");
      }
    }
  }
  failpoint("before-file-sync");
  file.sync();
  file.close();
  failpoint("after-file-sync");
  return checksums.finish(path.filename().string());
}

FileRecord write_text_file(const std::filesystem::path& path, std::string_view text) {
  std::vector<uint32_t> crcs;
  const FileSegment segment{0, static_cast<int64_t>(text.size()), text.data()};
  return write_checkpoint_file(path, {segment}, crcs, [](const std::string&) {});
}

void check_block(const std::filesystem::path& folder, const FileRecord& record, int64_t block) {
  const DurableFile file = DurableFile::open(folder / record.name);
  if (const int64_t size = file.size(); size != record.bytes)
    throw Error(str(record.name, ": expected ", record.bytes, " bytes, got ", size));
  const int64_t begin = block * kBlockBytes, end = std::min(record.bytes, begin + kBlockBytes);
  std::vector<std::byte> buffer(
      static_cast<size_t>(std::min(kChunkBytes, std::max<int64_t>(end - begin, 0))));
  uint32_t crc = 0;
  for (int64_t at = begin; at < end; at += kChunkBytes) {
    const int64_t count = std::min(kChunkBytes, end - at);
    file.read_at(buffer.data(), count, at);
    crc = crc32c(buffer.data(), static_cast<size_t>(count), crc);
  }
  if (begin < end && crc != record.block_crcs[static_cast<size_t>(block)])
    throw Error(str(record.name, ": checksum mismatch in bytes [", begin, ", ", end, ")"));
}

}  // namespace shoal
