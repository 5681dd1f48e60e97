// Checkpoints: one directory per step, one HDF5 file per writing rank, a manifest, a rename
// (docs/checkpoints.md). Tensors are stored once, in global coordinates under their global names, so a
// checkpoint loads under any layout. The trainer is the only caller of CheckpointStore; `shoal inspect` uses
// the read-only functions below.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/nn/placement.h"
#include "core/tensor/tensor.h"
#include "parallel/communicator.h"

namespace shoal {

/// This rank's piece of one logical tensor. Every rank passes the same names in the same order.
struct StateTensor {
  std::string name;  // path in the HDF5 files: "model/layers.0.qkv.weight", "optim/m/...", "router/..."
  Tensor value;      // f32, f64, bf16, i64, i32 or u8; on any device; load writes into it
  Shape global_shape;
  Box box;                // the piece of it that value holds
  int replica_index = 0;  // which of replica_count equal copies this rank holds; one of them is written
  int replica_count = 1;
  bool is_flat = false;  // value is flat and holds `boxes` one after the other, perhaps none; no `box`
  std::vector<Box> boxes = {};
};

struct CheckpointOptions {
  std::filesystem::path folder;  // <run>/checkpoints
  int64_t keep_last = 3;         // 0: keep all
  int64_t keep_every = 0;        // steps that are multiples of this are never pruned; 0: none
  std::string run_id = {};       // checkpoints of other runs are refused; "": all are accepted
  bool read_only = false;        // nothing is removed or renamed: a training may be writing there
};

/// What one committed checkpoint says about itself.
struct CheckpointInfo {
  int64_t step = 0;
  std::filesystem::path path;
  int64_t num_tensors = 0, total_bytes = 0;
  std::string problem;  // "" when everything verifies; otherwise file, place and reason
};

struct LoadedCheckpoint {
  int64_t step = 0;
  std::string state_json;  // as given to save()
  std::string config_yaml;
  std::filesystem::path path;
  std::string run_id;                 // of the run that saved it; "": unknown
  std::vector<std::string> rejected;  // one line per newer checkpoint that did not verify
};

class CheckpointStore {
 public:
  /// Collective. Removes left-over temporary directories, unless read_only.
  CheckpointStore(CheckpointOptions options, Communicator& world);

  /// Collective. Writes step's checkpoint and commits it with a rename, then prunes. When it cannot be
  /// written (disk full, I/O error on any rank) every rank returns the same message, nothing is left behind
  /// and older checkpoints are untouched;
  /// "" on success. A step that exists already is left as it is, unless it is damaged or of another run.
  std::string save(int64_t step, const std::vector<StateTensor>& state, const std::string& state_json,
                   const std::string& config_yaml);

  /// Collective. The newest checkpoint that verifies is described; corrupt ones and those of other runs are
  /// renamed to "step-N.bad-K" (unless read_only), warned about and listed in `rejected`. Empty when the
  /// folder holds no checkpoint at all; throws Error when it holds checkpoints but none verifies. `step`:
  /// only that one (missing or corrupt: Error).
  std::optional<LoadedCheckpoint> find(std::optional<int64_t> step = std::nullopt);
  /// Collective. Fills the tensors from a found checkpoint. Every name, dtype and global shape must match and
  /// each tensor must be covered; all mismatches are named in one Error. Tensors in the checkpoint that are
  /// not asked for: Error too, unless `allow_extra`.
  void load(const LoadedCheckpoint& checkpoint, const std::vector<StateTensor>& state,
            bool allow_extra = false);

  /// From now on; see CheckpointOptions. The same on every rank.
  void set_run_id(std::string run_id) { options_.run_id = std::move(run_id); }

  /// Test hook, called at every named point of saving ("before-rename", ...) and loading, from
  /// SHOAL_CHECKPOINT_FAILPOINT too.
  void set_failpoint(std::function<void(const std::string& point)> hook) { failpoint_ = std::move(hook); }

 private:
  CheckpointOptions options_;
  Communicator& world_;
  std::function<void(const std::string&)> failpoint_;
};

/// All committed checkpoints of a folder, newest first; verify = read everything and check all checksums.
std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& folder, bool verify);

struct StoredTensor {
  std::string name, dtype;
  Shape shape;
  int64_t bytes = 0;
  int num_pieces = 0;
};
/// The tensors of one checkpoint directory, sorted by name. Throws Error when the manifest does not verify.
std::vector<StoredTensor> list_tensors(const std::filesystem::path& checkpoint);

}  // namespace shoal
