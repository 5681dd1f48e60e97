// What Open MPI's launcher leaves behind when it is killed with SIGKILL: its folder below TMPDIR, and shared
// memory of jobs that had not got far enough to give up its names. The next start on the same host clears
// both.
#pragma once

namespace shoal {

/// Marks the folder of this job's launcher as one of a Shoal job, and removes the marked folders of launchers
/// that are gone, with their shared memory. Others' folders are left alone. One rank of each host calls it
/// before MPI starts; does nothing under other launchers. Failures are ignored: nothing depends on it.
void tidy_launcher_folders();

}  // namespace shoal
