#!/usr/bin/env bash
# Sync-mutation score: each barrier of a block or a warp, and each wait for asynchronous copies, of each CUDA kernel
# does nothing in turn; then some test must fail, by a wrong value in the Release build or by a race that TSan
# reports. Prints the survivors and the score; exit status 0 only at 100 %.
#   tests/cuda/mutate.sh [BUILD_FOLDER]
set -uo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." || exit 1
folder=${1:-build}/tests
values=$folder/cuda_test races=$folder/cuda_tsan_test
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# fails PROGRAM SUITE BARRIER: whether the suite notices that the barrier is gone. No answer in time is one.
fails() {
  ! SHOAL_EMULATOR_SKIP=$3 timeout 120 "$1" --gtest_filter="$2.*" --gtest_fail_fast >"$scratch/log" 2>&1
}

main() {
  local total=0 by_values=0 by_races=0 survivors=0 unseen=0 suite barrier file line
  # Each barrier with the suite of its kernel: not with those that run kernels of all files.
  if ! SHOAL_EMULATOR_BARRIERS=$scratch/barriers "$values" \
      --gtest_filter='Cuda*-CudaAutograd*:CudaEngine*:CudaMemory*:CudaDispatcher*:CudaFailures*' --gtest_brief=1 >"$scratch/log" 2>&1; then
    tail -n 20 "$scratch/log"
    echo "mutate.sh: $values fails without any mutation, or is not there"
    return 1
  fi
  while IFS=: read -r file line _; do
    if ! grep -q " $(basename "$file"):$line\$" "$scratch/barriers"; then
      echo "never executed: the barrier of $file:$line"
      unseen=$((unseen + 1))
    fi
  done < <(grep -nE '__syncthreads(_or|_and|_count)?\(|__syncwarp\(|wait_copies<[0-9]+>\(' core/backend/cuda/*)
  while IFS=$'\t' read -r suite barrier; do
    suite=${suite%%.*}
    total=$((total + 1))
    if fails "$values" "$suite" "$barrier"; then
      by_values=$((by_values + 1))
    elif [[ -x $races ]] && fails "$races" "$suite" "$barrier"; then
      by_races=$((by_races + 1))
    else
      survivors=$((survivors + 1))
      echo "no test of $suite needs the barrier: $barrier"
    fi
  done <"$scratch/barriers"
  [[ -x $races ]] || echo "races were not looked for: $races is not there"
  echo "sync-mutation score: $((by_values + by_races)) of $total barriers are needed and tested" \
    "($by_values by values, $by_races by races), $unseen never executed"
  [[ $total -gt 0 && $survivors -eq 0 && $unseen -eq 0 ]]
}

main
