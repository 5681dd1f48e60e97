# shellcheck shell=bash
# Functions shared by launch/quickstart.sh and tests/run.sh; sourced, not run. They expect the current
# directory to be the top of the source tree.

# configure BUILD_DIR [CMAKE_ARG...]: runs CMake when the folder is new, was configured with other arguments,
# or belongs to a source tree that has been moved. Later changes of CMakeLists.txt are found by Ninja.
configure() {
  local folder=$1
  shift
  local wanted="$PWD $*" cache="$folder/CMakeCache.txt" stamp="$folder/configured-with"
  if [[ -f $cache ]] && ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "$cache"; then
    rm -rf "$cache" "$folder/CMakeFiles"
  fi
  if [[ -f $folder/build.ninja && -f $cache && $(cat "$stamp" 2>/dev/null) == "$wanted" ]]; then
    return 0
  fi
  cmake -S . -B "$folder" -G Ninja "$@" && printf '%s\n' "$wanted" >"$stamp"
}

# Sets the array mpirun_flags for a job of $1 ranks on this machine. Open MPI refuses more ranks than physical
# cores without --oversubscribe, and root without its flag; binding would put all threads of a rank on one
# core.
set_mpirun_flags() {
  local ranks=$1 cores
  cores=$(lscpu -p=CORE,SOCKET 2>/dev/null | grep -v '^#' | sort -u | wc -l)
  mpirun_flags=(-n "$ranks")
  if mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
    mpirun_flags+=(--bind-to none)
    [[ $ranks -le $cores ]] || mpirun_flags+=(--oversubscribe)
    [[ $(id -u) -ne 0 ]] || mpirun_flags+=(--allow-run-as-root)
  fi
}
