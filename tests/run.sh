#!/usr/bin/env bash
# Builds and runs all tests; the last line reads `N passed, N failed, N skipped` (gtest cases, summed over all
# builds). Exit status 0 only when nothing failed.
#   tests/run.sh                 Release, each instruction set, CUDA kernels emulated, ASan + UBSan, TSan
#   tests/run.sh --quick         Release only
#   tests/run.sh --only PATTERN  only the cases that match the gtest filter PATTERN
# A binary that crashes, hangs or runs nothing counts as one failed test.
set -uo pipefail

quick=0 only=""
while [[ $# -gt 0 ]]; do
  case "$1" in
    --quick) quick=1 ;;
    --only)
      only=${2:?--only needs a gtest filter}
      shift
      ;;
    *)
      sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
      exit 2
      ;;
  esac
  shift
done

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 1
# shellcheck source=launch/common.sh
source launch/common.sh

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
jobs=$(nproc)
passed=0 failed=0 skipped=0
failures=()

fail() { # MESSAGE: one failed test that is no gtest case
  failed=$((failed + 1))
  failures+=("$1")
  printf '  FAILED  %s\n' "$1"
}

finish() {
  if [[ ${#failures[@]} -gt 0 ]]; then
    printf '\nFailed:\n'
    printf '  %s\n' "${failures[@]}"
  fi
  printf '\ntook %d min %d s' $((SECONDS / 60)) $((SECONDS % 60))
  printf '\n%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
  [[ $failed -eq 0 ]]
  exit
}

# build FOLDER TARGET... -- CMAKE_ARG...: configures and builds; a failure is counted and its output shown.
build() {
  local folder=$1 targets=() log=$results/build.log started=$SECONDS
  shift
  while [[ $1 != -- ]]; do
    targets+=("$1")
    shift
  done
  shift
  printf '\n== %s: build\n' "$folder"
  if ! { configure "$folder" "$@" && nice -n 5 ninja -C "$folder" -j "$jobs" "${targets[@]}"; } >"$log" 2>&1; then
    grep -aE -A 5 'error|Error|undefined reference|FAILED:' "$log" | head -n 60
    fail "$folder: build"
    return 1
  fi
  printf '   built in %d s\n' $((SECONDS - started))
}

# suites FOLDER [CTEST_ARG...]: names of the test suites, one a line; those that take longest first, so that no core is idle
# at the end.
suites() {
  local folder=$1 all
  shift
  all=$(ctest --test-dir "$folder" -N "$@" 2>/dev/null | sed -n 's/^ *Test *#[0-9]*: //p')
  grep -xE 'kills|launch|interruption|parity' <<<"$all"
  grep -vxE 'kills|launch|interruption|parity' <<<"$all"
}

# run_suite FOLDER SUITE LABEL [NAME=VALUE...]: runs one suite with that environment. Leaves LABEL.json (what
# gtest did), LABEL.log (its output), LABEL.status and LABEL.seconds in the results folder.
run_suite() {
  local folder=$1 suite=$2 label=$3 started=$SECONDS status=0
  shift 3
  [[ -z $only ]] || set -- "$@" "GTEST_FILTER=$only"
  env "$@" GTEST_OUTPUT="json:$results/$label.json" GTEST_COLOR=no ctest --test-dir "$folder" -R "^$suite\$" -V \
    2>&1 | sed -E 's/^[0-9]+: //' >"$results/$label.log" || status=$?
  echo "$status" >"$results/$label.status"
  echo $((SECONDS - started)) >"$results/$label.seconds"
}

# Reads a gtest JSON report; prints "total failed skipped", then one line "F name" or "S name" per such case.
read_report() {
  awk '
    /"testsuite": \[/ { suite = name }
    /^ *"name": / { name = $0; sub(/^ *"name": "/, "", name); sub(/",?$/, "", name); gsub(/\\\//, "/", name); bad = 0 }
    /"result": / { if ($2 ~ /COMPLETED|SKIPPED/) { total++
                     if ($2 ~ /SKIPPED/) { skipped++; lines = lines "S " suite "." name "\n" } } }
    /"failures": \[/ { if (!bad) { bad = 1; failed++; lines = lines "F " suite "." name "\n" } }
    END { printf "%d %d %d\n%s", total, failed, skipped, lines }' "$1"
}

# The output of failed cases only; of a crash also what came last.
show_failures() {
  awk '
    /^\[ RUN      \]/ { open = 1; text = "" }
    open { text = text "    " $0 "\n" }
    /^\[       OK \]|^\[  SKIPPED \]/ { open = 0 }
    /^\[  FAILED  \]/ && open { printf "%s", text; open = 0 }
    END { if (open) printf "%s", text }' "$1" | head -n 120
}

# skip_reason LOG NAME: what the case gave to GTEST_SKIP.
skip_reason() {
  awk -v name="$2" '
    /^\[ RUN      \]/ { inside = $4 == name }
    inside && reason { if ($0 == "") exit; print; exit }
    inside && /: Skipped$/ { reason = 1 }' "$1"
}

collect() { # LABEL
  local label=$1 total=0 bad=0 skip=0 kind name status seconds
  status=$(cat "$results/$label.status" 2>/dev/null || echo 1)
  seconds=$(cat "$results/$label.seconds" 2>/dev/null || echo '?')
  if [[ ! -s $results/$label.json ]]; then
    if [[ $status -eq 0 ]]; then
      fail "$label: ran nothing (no gtest report)"
    else
      show_failures "$results/$label.log"
      tail -n 15 "$results/$label.log" | sed 's/^/    /'
      fail "$label: crashed, timed out or could not start"
    fi
    return
  fi
  while read -r kind name rest; do
    case "$kind" in
      F) failures+=("$label: $name") ;;
      S) printf '  skipped %s: %s: %s\n' "$label" "$name" "$(skip_reason "$results/$label.log" "$name")" ;;
      *) total=$kind bad=$name skip=$rest ;;
    esac
  done < <(read_report "$results/$label.json")
  passed=$((passed + total - bad - skip)) failed=$((failed + bad)) skipped=$((skipped + skip))
  if [[ $bad -gt 0 ]]; then
    show_failures "$results/$label.log"
  elif [[ $status -ne 0 ]]; then
    tail -n 40 "$results/$label.log" | sed 's/^/    /'
    fail "$label: all cases passed but the program failed (exit code, leak or data race)"
  elif [[ $total -eq 0 && -z $only ]]; then
    fail "$label: ran 0 tests"
  fi
  [[ $total -eq 0 && -n $only ]] ||
    printf '  %-28s %4d passed %3d failed %3d skipped %5s s\n' \
      "$label" $((total - bad - skip)) "$bad" "$skip" "$seconds"
}

# run_all FOLDER TAG FILTERS CTEST_SELECTION ENV...: every selected suite, as many at once as there are cores.
# FILTERS names an array suite -> gtest filter; suites that are not in it run whole. The suite launch, the longest, runs in
# halves: as many processes as gtest has shards.
run_all() {
  local folder=$1 tag=$2 selection=$4 suite label shard shards labels=()
  local -n filters=$3
  shift 4
  # shellcheck disable=SC2086
  for suite in $(suites "$folder" $selection); do
    shards=1
    [[ $suite != launch || -n $only ]] || shards=2
    for ((shard = 0; shard < shards; shard++)); do
      label=$suite$tag
      [[ $shards -eq 1 ]] || label+="-$((shard + 1))of$shards"
      labels+=("$label")
      while [[ $(jobs -rp | wc -l) -ge $jobs ]]; do wait -n; done
      run_suite "$folder" "$suite" "$label" "$@" "GTEST_FILTER=${filters[$suite]-*}" \
        GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard &
    done
  done
  wait
  [[ ${#labels[@]} -gt 0 ]] || fail "$folder: no test suites"
  for suite in "${labels[@]}"; do collect "$suite"; done
}

check_format() {
  local version
  version=$(clang-format --version 2>/dev/null | sed -n 's/.*version \([0-9]*\).*/\1/p')
  if [[ $version != 14 ]]; then
    echo "format: not checked (clang-format 14 decides; found '${version:-none}')"
  elif ! ninja -C build format-check >"$results/format.log" 2>&1; then
    grep -aE 'error:' "$results/format.log" | sort -u -t : -k 1,1 | head -n 20
    fail "format: run ninja -C build format"
  fi
}

# Every *_test.cpp must be part of the build, or its cases would be missing silently.
check_all_built() {
  local file
  while IFS= read -r file; do
    grep -qF "$file" build/build.ninja || fail "$file belongs to no test suite in tests/CMakeLists.txt"
  done < <(find tests -name '*_test.cpp' | sort)
}

# nvcc compiles for one GPU architecture per run, another one with each commit.
architectures=(80 90a 100a)
architecture=${architectures[$(($(git rev-list --count HEAD 2>/dev/null || echo 1) % ${#architectures[@]}))]}
release=(-DCMAKE_BUILD_TYPE=Release -DSHOAL_BENCH=ON "-DSHOAL_CUDA_ARCHITECTURES=$architecture")

has_cpu_flag() { grep -qm 1 -w "$1" /proc/cpuinfo; }

# What instrumented builds run: every way through the code once. Comparisons of whole runs, and each further layout of ranks, are
# left to the Release build. Of the parity suite one of a kind under ASan; under TSan only cases in which threads meet.
# shellcheck disable=SC2034  # run_all takes them by name
declare -A no_filters=()
join() { # GTEST_FILTER of several patterns
  local IFS=:
  echo "$*"
}
# shellcheck disable=SC2034
declare -A asan_filters=(
  [cuda]="-$(join 'CudaEngine.OneRank*' 'CudaEngine.Recomputation*' 'CudaEngine.TheOrder*' 'CudaEngine.ARun*')"
  [kills]='*OneOfEachKind*'
  [launch]="-$(join 'MemoryEstimate.*' 'Bench.*' 'RankInvariantRuns.*' 'LayoutPage.LeavesRanks*' 'Report.LongRuns*' \
    Edges.ThreeFiveAndSeven* Edges.EMP_05* Trainer.RE_01* Trainer.RS_03* Trainer.EMP_07* Trainer.EV_01* \
    StepProfile.ARunWithIt* RunFolder.DamagedMetrics* RunFolder.RunKeeps* ReplicaCheck.RunsThat* \
    Robustness.NumberOfThreads* '*Fp8Training.EndsWithALoss*')"
  [mpi_3]='-TableOverMpi.*:ParityMpi.*'
  [mpi_plain]='-TableOverMpi.*:ParityMpi.*'
  [parity]="$(join '*/GeneratedTable.*/Part0' '*/MixedPrecision.*sequence*' Zero.StagesGiveTheResultOfOneRank 'Zero.EveryOptimizer*' \
    'Zero.Recomputation*' 'ContextParity.RoutersSee*' 'ContextParity.RecomputeParts*' 'PipelineParity.StagesGive*' \
    'PipelineParity.WeightGradients*' 'Parity.ExpertTensorParallelRanksDropPad*' 'Parity.DispatchOverTwoLevels*' \
    'Parity.TensorParallelRanksRecompute*' 'Parity.Muon*' 'RankInvariant.EveryOptimizer*')"
)
# shellcheck disable=SC2034
declare -A tsan_filters=(
  [data]='*Prefetch*'
  [launch]="$(join Trainer.RS_11* Trainer.LR_03* 'CheckpointStore.*')-*LargeTensors*"
  [parallel]='-RunWorld.*' # starts MPI, which is not built for TSan
  [parity]="$(join '*/GeneratedTable.*/Part0' Zero.StagesGiveTheResultOfOneRank 'PipelineParity.StagesGive*' \
    'ContextParity.RoutersSee*')"
)

isa_stage() { # Values must not depend on the instruction set beyond rounding.
  local isa
  for isa in scalar avx2 avx512; do
    if [[ $isa == scalar ]] || has_cpu_flag "${isa/%avx512/avx512bw}"; then
      run_all build "[$isa]" no_filters "-R ^ops$" SHOAL_CPU_ISA=$isa
    else
      echo "  not run: ops[$isa], this CPU has no $isa"
    fi
  done
}

asan_stage() {
  # AVX-512 kernels are the same sources with wider vectors; AVX2 has their loops and their tails.
  build build-asan asan_tests -- -DCMAKE_BUILD_TYPE=Sanitize -DSHOAL_SANITIZE=address \
    "-DSHOAL_CPU_ISAS=scalar;avx2" || return
  printf '== build-asan: tests under ASan and UBSan\n'
  # Open MPI keeps memory until exit, so leaks are looked for only in suites without it.
  run_all build-asan "[asan]" asan_filters "-LE mpi|no_asan" UBSAN_OPTIONS=print_stacktrace=1
  run_all build-asan "[asan]" asan_filters "-L mpi -LE no_asan" UBSAN_OPTIONS=print_stacktrace=1 \
    ASAN_OPTIONS=detect_leaks=0
}

tsan_stage() {
  build build-tsan tsan_tests -- -DCMAKE_BUILD_TYPE=Sanitize -DSHOAL_SANITIZE=thread \
    -DSHOAL_CPU_ISAS=scalar || return
  printf '== build-tsan: threads under TSan\n'
  run_all build-tsan "[tsan]" tsan_filters "-L tsan" \
    "TSAN_OPTIONS=suppressions=$PWD/tests/tsan_suppressions.txt"
}

# CUDA: nvcc must take the kernels, the program must link with the real libraries, and the emulator with TSan must find no
# race and need every barrier.
cuda_stage() {
  local targets=() has
  has=$(ninja -C build -t targets all 2>/dev/null | grep -oE '^(cuda_compile|cuda_tsan|shoal_cuda):')
  for target in cuda_compile cuda_tsan shoal_cuda; do
    if grep -qx "$target:" <<<"$has"; then targets+=("$target"); else echo "  not run: $target, its compiler is missing"; fi
  done
  if [[ ${#targets[@]} -gt 0 ]]; then
    build build "${targets[@]}" -- "${release[@]}" || return
  fi
  if [[ " ${targets[*]-} " == *" cuda_compile "* ]]; then
    echo "   nvcc compiled for sm_$architecture"
    tests/cuda/budget.sh build || fail "cuda: a kernel above its budget (tests/cuda/budget.txt)"
  fi
  if [[ ! -x build/tests/cuda_test ]]; then
    echo "  not run: CUDA kernels in the emulator, this processor is not x86-64"
    return
  fi
  printf '== build: CUDA kernels in the emulator\n'
  if [[ -x build/tests/cuda_tsan_test ]]; then
    local label="cuda[tsan]" status=0 started=$SECONDS
    timeout 600 env GTEST_FILTER="${only:-*}" GTEST_OUTPUT="json:$results/$label.json" build/tests/cuda_tsan_test \
      >"$results/$label.log" 2>&1 || status=$?
    echo "$status" >"$results/$label.status"
    echo $((SECONDS - started)) >"$results/$label.seconds"
    collect "$label"
  fi
  [[ -n $only ]] || tests/cuda/mutate.sh build || fail "cuda: a barrier that no test needs"
}

# A function, so that editing this file during a run does no harm: bash reads scripts piece by piece.
main() {
  launch/setup.sh || {
    fail "launch/setup.sh"
    finish
  }

  build build all -- "${release[@]}" || finish
  check_format
  check_all_built
  printf '== build: tests\n'
  run_all build "" no_filters ""
  if [[ $quick -eq 0 ]]; then
    isa_stage
    cuda_stage
    asan_stage
    tsan_stage
  fi
  finish
}

main
