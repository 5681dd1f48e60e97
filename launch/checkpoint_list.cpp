// Read-only views of checkpoints for `shoal inspect`; one process, nothing collective.
#include <algorithm>

#include "launch/checkpoint.h"
#include "launch/checkpoint_agreement.h"
#include "launch/checkpoint_folder.h"

namespace shoal {

std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& folder, bool verify) {
  std::vector<CheckpointInfo> list;
  for (const int64_t step : committed_steps(folder)) {
    CheckpointInfo info;
    info.step = step;
    info.path = folder / step_name(step);
    std::string problem;
    const std::string failure = message_of([&] {
      const ManifestResult result = read_manifest(info.path);
      problem = result.problem;
      if (!problem.empty()) return;
      info.num_tensors = static_cast<int64_t>(result.manifest.tensors.size());
      for (const FileRecord& file : result.manifest.files) info.total_bytes += file.bytes;
      problem = quick_problem(info.path);
      if (!verify || !problem.empty()) return;
      for (const FileRecord& file : result.manifest.files)
        for (int64_t block = 0; block < file.num_blocks(); block++) check_block(info.path, file, block);
    });
    info.problem = problem.empty() ? failure : problem;
    list.push_back(std::move(info));
  }
  return list;
}

std::vector<StoredTensor> list_tensors(const std::filesystem::path& checkpoint) {
  const ManifestResult result = read_manifest(checkpoint);
  if (!result.problem.empty()) throw Error(str("checkpoint ", checkpoint.string(), ": ", result.problem));
  std::vector<StoredTensor> list;
  for (const TensorRecord& tensor : result.manifest.tensors)
    list.push_back({tensor.name, dtype_name(tensor.dtype), tensor.shape,
                    tensor.shape.numel() * dtype_size(tensor.dtype), static_cast<int>(tensor.pieces.size())});
  return list;
}

}  // namespace shoal
