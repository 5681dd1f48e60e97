#include "launch/checkpoint_folder.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <new>
#include <random>

namespace shoal {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kTemporaryMark = ".tmp-", kBadMark = ".bad-";

std::string random_name() {
  std::random_device device;
  char text[17];
  std::snprintf(text, sizeof text, "%08x%08x", device(), device());
  return text;
}

std::vector<std::string> directories(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code failure;
  // A link to a disk that is not mounted must not look like a run without checkpoints.
  if (fs::is_symlink(folder, failure) && !fs::exists(folder, failure))
    throw FileError(folder, "follow the symbolic link", ENOENT);
  failure.clear();
  for (fs::directory_iterator entry(folder, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    std::error_code vanished;
    if (entry->is_directory(vanished)) names.push_back(entry->path().filename().string());
  }
  if (failure && failure.value() != ENOENT) throw FileError(folder, "list the directory", failure.value());
  return names;
}

// step-000000010 + mark + anything
bool is_marked(const std::string& name, std::string_view mark) {
  const size_t at = name.find(mark);
  return at != std::string::npos && step_of_name(std::string_view(name).substr(0, at)).has_value();
}

// The folder and its missing parents, each made durable in its own parent.
void create_folder(const fs::path& folder) {
  if (folder.empty() || fs::is_directory(folder)) return;
  create_folder(folder.parent_path());
  std::error_code failure;
  fs::create_directory(folder, failure);
  if (failure) throw FileError(folder, "create the directory", failure.value());
  sync_directory(folder.has_parent_path() ? folder.parent_path() : fs::path("."));
}

}  // namespace

std::vector<int64_t> committed_steps(const fs::path& folder) {
  std::vector<int64_t> steps;
  for (const std::string& name : directories(folder))
    if (const auto step = step_of_name(name)) steps.push_back(*step);
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

std::vector<std::string> names_set_aside(const fs::path& folder) {
  std::vector<std::string> names = directories(folder);
  std::erase_if(names, [](const std::string& name) { return !is_marked(name, kBadMark); });
  std::sort(names.begin(), names.end());
  return names;
}

ManifestResult read_manifest(const fs::path& checkpoint) {
  ManifestResult result = parse_manifest(read_file(checkpoint / kManifestName, kMaxManifestBytes));
  const auto step = step_of_name(checkpoint.filename().string());
  if (result.problem.empty() && step && *step != result.manifest.step)
    result.problem = str(kManifestName, ": it belongs to step ", result.manifest.step, ", not ", *step);
  return result;
}

std::string quick_problem(const fs::path& checkpoint) {
  try {
    const ManifestResult result = read_manifest(checkpoint);
    if (!result.problem.empty()) return result.problem;
    for (const FileRecord& file : result.manifest.files)
      if (const int64_t size = DurableFile::open(checkpoint / file.name).size(); size != file.bytes)
        return str(file.name, ": expected ", file.bytes, " bytes, got ", size);
  } catch (const std::exception& error) {
    if (!says_corrupt(error)) throw;
    return error.what();
  }
  return "";
}

std::string foreign_problem(const Manifest& manifest, const std::string& run_id) {
  if (run_id.empty() || manifest.run.empty() || manifest.run == run_id) return "";
  return str(kManifestName, ": it belongs to run ", manifest.run, ", this folder to run ", run_id,
             "; to go on from it, remove the file ", kRunIdName,
             " beside the folder of checkpoints and give a checkpoint that was set aside its name back");
}

bool says_corrupt(const std::exception& error) {
  if (const auto* file_error = dynamic_cast<const FileError*>(&error)) {
    for (const int number : {ENOENT, EIO, ELOOP, ENOTDIR, EISDIR, ENXIO})
      if (file_error->number() == number) return true;
    return false;
  }
  return dynamic_cast<const std::bad_alloc*>(&error) == nullptr;
}

fs::path create_temporary(const fs::path& folder, int64_t step) {
  create_folder(folder);
  const fs::path path = folder / str(step_name(step), kTemporaryMark, random_name());
  std::error_code failure;
  if (!fs::create_directory(path, failure) && !failure)
    failure = std::make_error_code(std::errc::file_exists);
  if (failure) throw FileError(path, "create the directory", failure.value());
  return path;
}

void remove_checkpoint(const fs::path& checkpoint, const Failpoint& failpoint) {
  fs::path doomed = checkpoint;
  if (step_of_name(checkpoint.filename().string())) {
    // Under a temporary name a half-removed directory is neither loaded nor reported as damaged.
    doomed = checkpoint.parent_path() /
             str(checkpoint.filename().string(), kTemporaryMark, "removed-", random_name());
    rename_new(checkpoint, doomed);
    failpoint("prune-renamed");
  }
  std::error_code failure;
  if (fs::is_symlink(doomed, failure)) {
    // The link goes; what it points to lies elsewhere, perhaps in an archive.
    if (!fs::remove(doomed, failure) && failure) throw FileError(doomed, "remove the link", failure.value());
    failpoint("prune-manifest-removed");
    return;
  }
  failure.clear();
  fs::remove(doomed / kManifestName, failure);
  failpoint("prune-manifest-removed");
  if (!failure) fs::remove_all(doomed, failure);
  if (failure) throw FileError(doomed, "remove the directory", failure.value());
}

void remove_temporaries(const fs::path& folder) {
  for (const std::string& name : directories(folder))
    if (is_marked(name, kTemporaryMark)) remove_checkpoint(folder / name, [](const std::string&) {});
}

std::string set_aside(const fs::path& checkpoint) {
  for (int k = 1;; k++) {
    const fs::path target = checkpoint.parent_path() / str(checkpoint.filename().string(), kBadMark, k);
    try {
      rename_new(checkpoint, target);
    } catch (const FileError& error) {
      if ((error.number() == EEXIST || error.number() == ENOTEMPTY) && k < 1000) continue;
      throw;
    }
    sync_directory(checkpoint.parent_path());
    return target.filename().string();
  }
}

void prune_checkpoints(const fs::path& folder, int64_t keep_last, int64_t keep_every, int64_t just_saved,
                       const Failpoint& failpoint) {
  if (keep_last <= 0) return;
  bool removed = false;
  int64_t kept = 0;
  for (const int64_t step : committed_steps(folder)) {
    const fs::path path = folder / step_name(step);
    if (kept < keep_last) {
      if (step == just_saved || quick_problem(path).empty()) kept++;
      continue;
    }
    if (step == just_saved || (keep_every > 0 && step % keep_every == 0)) continue;
    remove_checkpoint(path, failpoint);
    removed = true;
  }
  if (removed) sync_directory(folder);
}

}  // namespace shoal
