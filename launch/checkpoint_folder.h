// The folder of checkpoints as one process sees it: listing, retention, removal, quarantine. Rank 0 and the
// offline tools call it. Directories that somebody renamed or deleted by hand are tolerated.
#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "launch/checkpoint_format.h"
#include "launch/checkpoint_shard.h"

namespace shoal {

/// Steps of the committed directories, newest (largest) first. Nothing in a missing folder.
std::vector<int64_t> committed_steps(const std::filesystem::path& folder);

/// Names of the directories that set_aside() made, sorted.
std::vector<std::string> names_set_aside(const std::filesystem::path& folder);

/// Reads and checks the manifest of one directory, whose name says the step. Throws FileError when it cannot
/// be read.
ManifestResult read_manifest(const std::filesystem::path& checkpoint);
/// "" when the manifest holds and every file has the size it should have; reads no tensor bytes. Throws when
/// the files cannot be reached (see says_corrupt).
std::string quick_problem(const std::filesystem::path& checkpoint);

/// "" or that the checkpoint belongs to another run than `run_id`. An unknown id on either side is accepted.
std::string foreign_problem(const Manifest& manifest, const std::string& run_id);

/// Whether the error says that the files are wrong, rather than that they cannot be reached just now
/// (permissions, too many open files, a stale mount, no memory): only wrong ones may be set aside.
bool says_corrupt(const std::exception& error);

/// A new directory "step-N.tmp-<random>" in the folder, which is created when needed.
std::filesystem::path create_temporary(const std::filesystem::path& folder, int64_t step);
/// Removes a committed or temporary directory. It stops to be a checkpoint with the first change on disk.
void remove_checkpoint(const std::filesystem::path& checkpoint, const Failpoint& failpoint);
/// Removes what interrupted saves and removals have left behind.
void remove_temporaries(const std::filesystem::path& folder);
/// Renames to "step-N.bad-K" with the first free K and returns the new name.
std::string set_aside(const std::filesystem::path& checkpoint);

/// Removes old checkpoints: all but `just_saved`, the newest `keep_last` whose manifest and sizes hold (0:
/// all), and multiples of `keep_every`. Newer damaged ones do not count, and stay.
void prune_checkpoints(const std::filesystem::path& folder, int64_t keep_last, int64_t keep_every,
                       int64_t just_saved, const Failpoint& failpoint);

}  // namespace shoal
