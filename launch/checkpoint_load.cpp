// CheckpointStore::load: any layout to any layout, by intersecting the stored pieces with this rank's shard.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "core/base/text.h"
#include "launch/checkpoint.h"
#include "launch/checkpoint_agreement.h"
#include "launch/checkpoint_folder.h"
#include "launch/checkpoint_state.h"
#include "launch/crc32c.h"

namespace shoal {

namespace fs = std::filesystem;

namespace {

// Reads byte ranges of one file. Short ranges close to each other, which a shard of an inner dimension gives,
// are served from a buffer.
class RangeReader {
 public:
  explicit RangeReader(const fs::path& path) : file_(DurableFile::open(path)), bytes_(file_.size()) {}

  /// `stride`: distance to the next range, as far as known.
  void read(void* to, int64_t bytes, int64_t offset, int64_t stride) {
    if (bytes >= kBufferBytes / 2 || stride > kMaxBufferedStride) return file_.read_at(to, bytes, offset);
    if (offset < begin_ || offset + bytes > begin_ + static_cast<int64_t>(buffer_.size())) {
      const int64_t count = std::min(kBufferBytes, bytes_ - offset);
      if (count < bytes) throw Error(str(file_.path().string(), ": ends before offset ", offset + bytes));
      buffer_.resize(static_cast<size_t>(count));
      file_.read_at(buffer_.data(), count, offset);
      begin_ = offset;
    }
    std::memcpy(to, buffer_.data() + (offset - begin_), static_cast<size_t>(bytes));
  }

 private:
  static constexpr int64_t kBufferBytes = int64_t{1} << 20;
  static constexpr int64_t kMaxBufferedStride = int64_t{64} << 10;
  DurableFile file_;
  int64_t bytes_;
  int64_t begin_ = 0;
  std::vector<std::byte> buffer_;
};

class TensorReader {
 public:
  explicit TensorReader(fs::path folder) : folder_(std::move(folder)) {}

  /// Fills the value, which lies at `box` of the stored tensor.
  void read(const TensorRecord& record, const Box& box, const Tensor& value) {
    if (value.numel() == 0) return;
    const bool on_host = value.device().type == DeviceType::cpu;
    const Tensor host = on_host ? value : Tensor::empty(value.shape(), value.dtype());
    for (const PieceRecord& piece : record.pieces)
      if (const auto part = intersect(piece.box, box)) read_piece(record, piece, *part, box, host.bytes());
    if (!on_host) value.copy_from(host);
  }

 private:
  void read_piece(const TensorRecord& record, const PieceRecord& piece, const Box& part, const Box& box,
                  std::byte* to) {
    RangeReader& reader = reader_of(piece.file);
    const int64_t size = dtype_size(record.dtype);
    int64_t previous = -1;
    uint32_t crc = 0;
    const bool whole = part == piece.box;
    for_each_run(part, piece.box, box, [&](int64_t from, int64_t into, int64_t count) {
      // Runs of one box are evenly spaced at first; a lone run is read directly.
      const int64_t stride =
          previous < 0 ? (count == part.numel() ? INT64_MAX : count * size) : (from - previous) * size;
      previous = from;
      reader.read(to + into * size, count * size, piece.offset + from * size, stride);
      if (whole) crc = crc32c(to + into * size, static_cast<size_t>(count * size), crc);
    });
    if (whole && crc != piece.crc)
      throw Error(str(piece.file, ": tensor ", record.name, ", piece ", box_text(piece.box),
                      ": checksum mismatch; the file changed after it was verified"));
  }

  RangeReader& reader_of(const std::string& file) {
    auto& reader = readers_[file];
    if (!reader) {
      // A layout with very many shards must not use up the file descriptors.
      if (readers_.size() > kMaxOpenFiles) {
        readers_.clear();
        return *(readers_[file] = std::make_unique<RangeReader>(folder_ / file));
      }
      reader = std::make_unique<RangeReader>(folder_ / file);
    }
    return *reader;
  }

  static constexpr size_t kMaxOpenFiles = 64;
  fs::path folder_;
  std::map<std::string, std::unique_ptr<RangeReader>> readers_;
};

// All differences between what is stored and what is asked for, one line each.
std::vector<std::string> mismatches(const Manifest& manifest, const std::vector<StateTensor>& state,
                                    bool allow_extra) {
  std::vector<std::string> lines, stored, wanted;
  std::map<std::pair<DType, DType>, std::vector<std::string>> other_dtypes;  // wanted, stored -> names
  for (const TensorRecord& record : manifest.tensors) stored.push_back(record.name);
  for (const StateTensor& tensor : state) {
    wanted.push_back(tensor.name);
    const TensorRecord* record = manifest.find_tensor(tensor.name);
    if (record == nullptr) {
      lines.push_back(str(tensor.name, ": not in the checkpoint", suggest(tensor.name, stored)));
      continue;
    }
    if (record->dtype != tensor.value.dtype())
      other_dtypes[{tensor.value.dtype(), record->dtype}].push_back(tensor.name);
    if (!(record->shape == tensor.global_shape))
      lines.push_back(
          str(tensor.name, ": expected shape ", tensor.global_shape, ", the checkpoint has ", record->shape));
  }
  // A run of another precision differs in every tensor: one line says it.
  for (const auto& [dtypes, names] : other_dtypes) {
    const std::string others = names.size() > 1 ? str(" and ", names.size() - 1, " more") : "";
    lines.push_back(str(names.front(), others, ": expected dtype ", dtypes.first, ", the checkpoint has ",
                        dtypes.second));
  }
  if (allow_extra) return lines;
  std::sort(wanted.begin(), wanted.end());
  for (const std::string& name : stored)
    if (!std::binary_search(wanted.begin(), wanted.end(), name))
      lines.push_back(str(name, ": in the checkpoint, but nothing asks for it"));
  return lines;
}

}  // namespace

void CheckpointStore::load(const LoadedCheckpoint& checkpoint, const std::vector<StateTensor>& state,
                           bool allow_extra) {
  const std::string where = "checkpoint " + checkpoint.path.string();
  const std::string text =
      run_on_first(world_, [&] { return read_file(checkpoint.path / kManifestName, kMaxManifestBytes); });
  const ManifestResult result = parse_manifest(text);
  if (!result.problem.empty()) throw Error(where + ": " + result.problem);

  std::string problem = state_problem(state);
  if (problem.empty()) problem = join(mismatches(result.manifest, state, allow_extra), "\n  ");
  problem = agree_on_problems(world_, problem);
  if (!problem.empty()) throw UsageError(where + " does not fit this model:\n  " + problem);

  problem = message_of([&] {
    if (failpoint_) failpoint_("before-load");
    TensorReader reader(checkpoint.path);
    for (const StateTensor& tensor : state)
      for (const StatePiece& piece : pieces_of(tensor))
        reader.read(*result.manifest.find_tensor(tensor.name), piece.box, piece.value);
    if (failpoint_) failpoint_("after-load");
  });
  problem = agree_on_problems(world_, problem);
  if (!problem.empty()) throw Error(where + " cannot be read: " + problem + "; the state is half loaded");
}

}  // namespace shoal
