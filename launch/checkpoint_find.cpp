// CheckpointStore::find: the newest checkpoint that verifies (docs/checkpoints.md).
#include <algorithm>

#include "core/base/log.h"
#include "core/base/text.h"
#include "launch/checkpoint.h"
#include "launch/checkpoint_agreement.h"
#include "launch/checkpoint_folder.h"
#include "launch/crc32c.h"

namespace shoal {

namespace fs = std::filesystem;

namespace {

// What this rank found, as text that can be gathered: a number (smaller = earlier in the files; the earliest
// problem of all ranks is reported), 'c' corrupt or 'u' unreachable, the message.
std::string verdict_text(int64_t position, const std::exception& error) {
  return str(position, says_corrupt(error) ? 'c' : 'u', error.what());
}

// This rank's share of the blocks of all files. "" or the verdict.
std::string check_my_blocks(const fs::path& path, const Manifest& manifest, const Communicator& world) {
  int64_t position = 0;
  for (const FileRecord& file : manifest.files)
    for (int64_t block = 0; block < std::max<int64_t>(file.num_blocks(), 1); block++) {
      if (position++ % world.size() != world.rank()) continue;
      try {
        check_block(path, file, block);
      } catch (const std::exception& error) {
        return verdict_text(position, error);
      }
    }
  return "";
}

// Collective. Reads everything, the work divided over the ranks. Returns why the checkpoint is corrupt, or
// "". Throws the same Error on every rank when it is of a newer format or cannot be reached.
std::string verify(Communicator& world, const fs::path& path, const std::string& run_id) {
  ManifestResult result;
  const std::string text = run_on_first(world, [&]() -> std::string {
    try {
      return "m" + read_file(path / kManifestName, kMaxManifestBytes);
    } catch (const std::exception& error) {
      if (!says_corrupt(error)) throw;
      return str("c", error.what());
    }
  });
  if (text[0] == 'c') return text.substr(1);
  result = parse_manifest(std::string_view(text).substr(1));
  if (result.newer_version >= 0)
    throw Error(
        str("checkpoint ", path.string(), ": ", result.problem,
            "; use the program that wrote it, or move it out of the folder to go on from an older one"));
  if (!result.problem.empty()) return result.problem;
  if (step_name(result.manifest.step) != path.filename().string())
    return str(kManifestName, ": it belongs to step ", result.manifest.step);
  if (std::string foreign = foreign_problem(result.manifest, run_id); !foreign.empty()) return foreign;

  const std::vector<std::string> verdicts =
      world.gather_strings(check_my_blocks(path, result.manifest, world));
  std::string reason;
  int64_t first = INT64_MAX;
  for (const std::string& verdict : verdicts) {
    if (verdict.empty()) continue;
    size_t digits = 0;
    const int64_t position = std::stoll(verdict, &digits);
    if (verdict[digits] == 'u')
      throw Error(str("checkpoint ", path.string(), " cannot be read: ", verdict.substr(digits + 1)));
    if (position < first) reason = verdict.substr(digits + 1);
    first = std::min(first, position);
  }
  return reason;
}

// Collective. The small files of a verified checkpoint.
std::string shared_text(Communicator& world, const fs::path& path, const char* name) {
  return run_on_first(world, [&] {
    const ManifestResult result = read_manifest(path);
    if (!result.problem.empty()) throw Error(path.string() + ": " + result.problem);
    std::string text = read_file(path / name, kMaxStateBytes);
    if (crc32c(text) != result.manifest.find_file(name)->crc)
      throw Error(str((path / name).string(), ": checksum mismatch; the file changed after it was verified"));
    return text;
  });
}

// Collective. All steps of the folder, newest first, as rank 0 sees them.
std::vector<int64_t> shared_steps(Communicator& world, const fs::path& folder) {
  const std::string text = run_on_first(world, [&] {
    std::string list;
    for (const int64_t step : committed_steps(folder)) list += str(step, ' ');
    return list;
  });
  std::vector<int64_t> steps;
  std::istringstream in(text);
  for (int64_t step = 0; in >> step;) steps.push_back(step);
  return steps;
}

std::string steps_text(const std::vector<int64_t>& steps) {
  if (steps.empty()) return "it holds no checkpoint";
  std::vector<std::string> texts;
  for (const int64_t step : steps) texts.push_back(std::to_string(step));
  return "it holds steps " + join(texts, ", ");
}

// Collective. Renames a corrupt checkpoint, unless read_only; returns the line to report.
std::string reject(Communicator& world, const fs::path& path, const std::string& reason, bool read_only) {
  const std::string fate = run_on_first(world, [&]() -> std::string {
    if (read_only) return "left in place";
    std::string name;
    const std::string problem = message_of([&] { name = set_aside(path); });
    return problem.empty() ? "set aside as " + name : "could not be set aside: " + problem;
  });
  std::string line = str(path.filename().string(), ": ", reason, " (", fate, ")");
  if (world.rank() == 0) log::warn("checkpoint rejected: ", line);
  return line;
}

}  // namespace

std::optional<LoadedCheckpoint> CheckpointStore::find(std::optional<int64_t> step) {
  const std::vector<int64_t> steps = shared_steps(world_, options_.folder);
  if (step && std::find(steps.begin(), steps.end(), *step) == steps.end())
    throw UsageError(str("checkpoint of step ", *step, " in ", options_.folder.string(), ": not found; ",
                         steps_text(steps)));
  LoadedCheckpoint found;
  for (const int64_t candidate : step ? std::vector<int64_t>{*step} : steps) {
    const fs::path path = options_.folder / step_name(candidate);
    if (failpoint_) failpoint_("before-verify");
    const std::string reason = verify(world_, path, options_.run_id);
    if (!reason.empty()) {
      if (step)
        throw Error(str("checkpoint ", path.string(), " is corrupt: ", reason,
                        "; leave the step open to take the newest one that verifies"));
      found.rejected.push_back(reject(world_, path, reason, options_.read_only));
      continue;
    }
    found.step = candidate;
    found.path = path;
    found.state_json = shared_text(world_, path, kStateName);
    found.config_yaml = shared_text(world_, path, kConfigName);
    found.run_id = run_on_first(world_, [&] { return read_manifest(path).manifest.run; });
    return found;
  }
  if (steps.empty()) {
    // Otherwise the second start after all were set aside would silently begin at step 0.
    const std::string bad =
        run_on_first(world_, [&] { return join(names_set_aside(options_.folder), ", "); });
    if (bad.empty()) return std::nullopt;
    throw Error(str(
        "checkpoints in ", options_.folder.string(), ": only damaged or foreign ones that were set aside: ",
        bad, "; give a good one its name back (without .bad-N), or move them away to begin at step 0"));
  }
  throw Error(str("checkpoints in ", options_.folder.string(), ": none of ", steps.size(), " verifies: ",
                  join(found.rejected, "; "), "; restore one of them, or move them away to begin at step 0"));
}

}  // namespace shoal
