// CheckpointStore::save: plan, write, agree, commit, prune (docs/checkpoints.md).
#include <algorithm>
#include <bit>
#include <map>

#include "core/base/log.h"
#include "core/base/text.h"
#include "launch/checkpoint.h"
#include "launch/checkpoint_agreement.h"
#include "launch/checkpoint_folder.h"
#include "launch/checkpoint_hdf5.h"
#include "launch/checkpoint_shard.h"
#include "launch/checkpoint_state.h"

namespace shoal {

namespace fs = std::filesystem;
static_assert(std::endian::native == std::endian::little, "tensor bytes are stored as they lie in memory");

namespace {

struct SaveRequest {
  int64_t step;
  const std::vector<StateTensor>& state;
  const std::string& state_json;
  const std::string& config_yaml;
};

// Of equal copies one is written; taking turns by position spreads the work over the replicas. Shards
// without elements are not stored, except those of a tensor that has none at all.
bool is_written_here(const StateTensor& tensor, size_t position) {
  const bool my_turn =
      static_cast<size_t>(tensor.replica_index) == position % static_cast<size_t>(tensor.replica_count);
  return my_turn && (tensor.value.numel() > 0 || tensor.global_shape.numel() == 0);
}

// This rank's pieces, one a record; offsets and checksums are filled in by write_shard.
Manifest plan_part(const SaveRequest& request, const std::string& run_id, int rank) {
  Manifest part;
  part.step = request.step;
  part.run = run_id;
  for (size_t k = 0; k < request.state.size(); k++) {
    const StateTensor& tensor = request.state[k];
    if (!is_written_here(tensor, k)) continue;
    for (const StatePiece& held : pieces_of(tensor)) {
      PieceRecord piece;
      piece.file = shard_name(rank);
      piece.bytes = held.value.num_bytes();
      piece.box = held.box;
      part.tensors.push_back({tensor.name, tensor.value.dtype(), tensor.global_shape, {std::move(piece)}});
    }
  }
  return part;
}

Manifest merge_parts(const std::vector<std::string>& texts, int64_t world) {
  Manifest merged;
  std::map<std::string, size_t> positions;
  for (const std::string& text : texts) {
    Manifest part = parse_manifest_part(text);
    merged.step = part.step;
    merged.run = part.run;
    for (FileRecord& file : part.files) merged.files.push_back(std::move(file));
    for (TensorRecord& tensor : part.tensors) {
      const auto [at, is_new] = positions.emplace(tensor.name, merged.tensors.size());
      if (is_new) {
        merged.tensors.push_back(std::move(tensor));
      } else {
        auto& pieces = merged.tensors[at->second].pieces;
        pieces.insert(pieces.end(), tensor.pieces.begin(), tensor.pieces.end());
      }
    }
  }
  merged.world = world;
  merged.sort();
  return merged;
}

// Rank 0: every tensor of the state is covered exactly once. Returns the bytes of all ranks as text.
std::string check_plan(const SaveRequest& request, const std::vector<std::string>& texts) {
  const Manifest plan = merge_parts(texts, 1);
  int64_t total = static_cast<int64_t>(request.state_json.size() + request.config_yaml.size());
  for (const StateTensor& tensor : request.state) {
    const TensorRecord* record = plan.find_tensor(tensor.name);
    std::vector<Box> boxes;
    if (record != nullptr)
      for (const PieceRecord& piece : record->pieces) {
        boxes.push_back(piece.box);
        total += piece.bytes;
      }
    const std::string problem = coverage_problem(tensor.global_shape, boxes);
    if (!problem.empty())
      throw Error(str("checkpoint: tensor ", tensor.name, ' ', tensor.global_shape, ": over all ranks ",
                      problem, "; check box and replica_index"));
  }
  return std::to_string(total);
}

// Rank 0: the temporary directory's name; "" when there is nothing to do.
std::string prepare_directory(const CheckpointOptions& options, int64_t step, int64_t total_bytes,
                              const Failpoint& failpoint) {
  const fs::path target = options.folder / step_name(step);
  if (fs::exists(target)) {
    std::string problem = quick_problem(target);
    if (problem.empty()) problem = foreign_problem(read_manifest(target).manifest, options.run_id);
    if (!problem.empty())
      log::warn("checkpoint ", target.string(), " cannot be kept (", problem, "), set aside as ",
                set_aside(target));
    else
      return "";
  }
  failpoint("before-directory");
  const fs::path path = create_temporary(options.folder, step);
  failpoint("after-directory");
  // 5 % and 1 MiB more than the tensors: HDF5's own structures, directories, the manifest.
  const int64_t needed = total_bytes + total_bytes / 20 + (int64_t{1} << 20);
  if (const int64_t available = free_bytes(path); available < needed) {
    remove_checkpoint(path, failpoint);
    throw Error(str(options.folder.string(), ": not enough space: needed ", needed, " bytes, free ",
                    available, " bytes"));
  }
  return path.filename().string();
}

// Writes this rank's file and completes `part` with offsets and checksums.
void write_shard(const fs::path& directory, const SaveRequest& request, int rank, Manifest& part,
                 const Failpoint& failpoint) {
  failpoint("before-layout");
  std::vector<DatasetSpec> specs;
  std::vector<Tensor> host;  // keeps copies of device tensors alive; CPU tensors are written in place
  std::vector<const void*> data;
  for (size_t k = 0; k < request.state.size(); k++) {
    const StateTensor& tensor = request.state[k];
    if (!is_written_here(tensor, k)) continue;
    int number = 0;
    for (const StatePiece& held : pieces_of(tensor)) {
      const std::string path = tensor.is_flat ? str(tensor.name, '/', number++) : tensor.name;
      specs.push_back({path, tensor.value.dtype(), held.box, tensor.global_shape, 0});
      host.push_back(held.value.to(Device{}));
      data.push_back(host.back().bytes());
    }
  }
  if (rank == 0)
    for (const auto& [name, text] :
         {std::pair(kStateName, &request.state_json), std::pair(kConfigName, &request.config_yaml)}) {
      specs.push_back({str(kMetaGroup, '/', name), {}, {}, {}, static_cast<int64_t>(text->size())});
      data.push_back(text->data());
    }
  const ShardLayout layout = make_shard_layout(specs);
  failpoint("after-layout");
  std::vector<FileSegment> segments;
  std::map<int64_t, size_t> tensor_at;  // offset in the file -> position in part.tensors
  for (const auto& [offset, bytes] : layout.metadata)
    segments.push_back({offset, static_cast<int64_t>(bytes.size()), bytes.data()});
  for (size_t i = 0; i < specs.size(); i++) {
    if (i < part.tensors.size()) part.tensors[i].pieces[0].offset = layout.offsets[i];
    if (specs[i].bytes() == 0) continue;
    segments.push_back({layout.offsets[i], specs[i].bytes(), data[i]});
    if (i < part.tensors.size()) tensor_at[layout.offsets[i]] = i;
  }
  std::sort(segments.begin(), segments.end(),
            [](const FileSegment& a, const FileSegment& b) { return a.offset < b.offset; });
  std::vector<uint32_t> crcs;
  part.files.push_back(write_checkpoint_file(directory / shard_name(rank), segments, crcs, failpoint));
  for (size_t i = 0; i < segments.size(); i++)
    if (const auto found = tensor_at.find(segments[i].offset); found != tensor_at.end())
      part.tensors[found->second].pieces[0].crc = crcs[i];
}

// Rank 0, when every rank's file is safely on disk: the manifest, then the rename that makes it a checkpoint.
void commit(const fs::path& temporary, const fs::path& target, const SaveRequest& request, Manifest manifest,
            const Failpoint& failpoint) {
  failpoint("before-state");
  manifest.files.push_back(write_text_file(temporary / kStateName, request.state_json));
  manifest.files.push_back(write_text_file(temporary / kConfigName, request.config_yaml));
  manifest.sort();
  if (const std::string problem = manifest_problem(manifest); !problem.empty())
    throw Error("checkpoint: the manifest would be refused when loading: " + problem);
  failpoint("before-manifest");
  write_text_file(temporary / kManifestName, manifest_text(manifest));
  failpoint("after-manifest");
  sync_directory(temporary);
  failpoint("before-rename");
  rename_new(temporary, target);
  try {
    failpoint("after-rename");
    sync_directory(target.parent_path());
  } catch (...) {
    // Whether the rename survives a power failure is unknown, so this is not a checkpoint.
    remove_checkpoint(target, [](const std::string&) {});
    throw;
  }
}

void prune_after_commit(const CheckpointOptions& options, int64_t step, const Failpoint& failpoint) {
  const std::string problem = message_of([&] {
    failpoint("after-commit");
    prune_checkpoints(options.folder, options.keep_last, options.keep_every, step, failpoint);
    failpoint("after-prune");
  });
  if (!problem.empty()) log::warn("old checkpoints are not removed: ", problem);
}

}  // namespace

std::string CheckpointStore::save(int64_t step, const std::vector<StateTensor>& state,
                                  const std::string& state_json, const std::string& config_yaml) {
  const SaveRequest request{step, state, state_json, config_yaml};
  const Failpoint failpoint = [this](const std::string& point) {
    if (failpoint_) failpoint_(point);
  };
  const int rank = world_.rank();
  std::string problem = step < 0 ? str("expected step >= 0, got ", step) : state_problem(state);
  problem = agree_on_problems(world_, problem);
  if (!problem.empty()) throw Error("checkpoint save: " + problem);
  const int64_t signature = state_signature(state);
  SHOAL_CHECK(world_.max(signature) == world_.min(signature),
              "checkpoint save: the ranks pass different tensor names, dtypes or global shapes");
  Manifest part = plan_part(request, options_.run_id, rank);
  const std::vector<std::string> plans = world_.gather_strings(manifest_part_text(part));
  const std::string total = run_on_first(world_, [&] { return check_plan(request, plans); });

  fs::path temporary;
  const auto failed = [&](const std::string& reason) {
    return str("checkpoint of step ", step, " in ", options_.folder.string(), " was not written: ", reason,
               "; earlier checkpoints are untouched");
  };
  try {
    const std::string name =
        run_on_first(world_, [&] { return prepare_directory(options_, step, std::stoll(total), failpoint); });
    if (name.empty()) return "";
    temporary = options_.folder / name;
  } catch (const Error& error) {
    run_on_first(world_, [&] { return message_of([&] { remove_temporaries(options_.folder); }); });
    return failed(error.what());
  }

  problem = message_of([&] {
    if (rank == 0 || !part.tensors.empty()) write_shard(temporary, request, rank, part, failpoint);
  });
  problem = agree_on_problems(world_, problem);
  std::vector<std::string> parts;
  if (problem.empty()) parts = world_.gather_strings(manifest_part_text(part));
  try {
    run_on_first(world_, [&] {
      if (!problem.empty()) throw Error(problem);
      commit(temporary, options_.folder / step_name(step), request, merge_parts(parts, world_.size()),
             failpoint);
      prune_after_commit(options_, step, failpoint);
      return std::string();
    });
  } catch (const Error& error) {
    const std::string left =
        run_on_first(world_, [&] { return message_of([&] { remove_temporaries(options_.folder); }); });
    return failed(error.what()) + (left.empty() ? "" : "; left behind: " + left);
  }
  return "";
}

}  // namespace shoal
