#!/usr/bin/env bash
# Checks the CUDA backend on the GPU of this machine and writes one JSON file with commit, card, date and results:
#   1. builds the program with CUDA, the tests of tests/cuda for the device, and the benchmark of kernels;
#   2. runs the tests that the emulator runs, on the device, those of attention also by cuDNN where it is;
#   3. runs a part of them under each tool of compute-sanitizer;
#   4. trains the same model on the CPU and on CUDA, in f32 and in bf16, and compares losses;
#   5. times every kernel of a MoE layer against the card's limits (docs/cuda.md), and profiles a step.
#   tests/device/run.sh [FILE]     default: tests/device/results/CARD.json
# Takes under 8 minutes on 16 cores. Each part has a time limit, and what failed is in the file, which is written anew after
# each part: whoever ends this script early has the parts until then. Exit status 0 only when nothing failed. TEXT is a file
# to train on (default: the sources of core/), BUILD the build folder (build-device).
set -uo pipefail
export LC_ALL=C

if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '$d'
  exit 0
fi
target=${1:+$(realpath -m -- "$1")}
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." || exit 1

query() { nvidia-smi --id=0 --query-gpu="$1" --format=csv,noheader,nounits 2>/dev/null | head -n 1; }
if ! card=$(query name) || [[ -z $card ]]; then
  echo "device check: nvidia-smi finds no GPU here; nothing was run" >&2
  exit 1
fi
capability=$(query compute_cap)
case $capability in
  8.*) architecture=80 ;;
  9.0) architecture=90a ;;
  10.*) architecture=100a ;;
  *)
    echo "device check: $card has compute capability $capability; kernels are compiled for 8.x, 9.0 and 10.x" >&2
    exit 1
    ;;
esac
# Bytes/s and dense FLOP/s of bf16 and f32 by the card's data sheet; of other cards they are measured.
limits=()
case $card in
  *H200*) limits=(--bytes-per-second 4.8e12 --bf16-flops 989e12 --f32-flops 67e12) ;;
  *H100*) limits=(--bytes-per-second 3.35e12 --bf16-flops 989e12 --f32-flops 67e12) ;;
  *A100*) limits=(--bytes-per-second 2.0e12 --bf16-flops 312e12 --f32-flops 19.5e12) ;;
  *B200*) limits=(--bytes-per-second 8.0e12 --bf16-flops 2250e12 --f32-flops 75e12) ;;
esac
target=${target:-$PWD/tests/device/results/${card// /-}.json}

build=${BUILD:-build-device}
text=${TEXT:-core}
commit="$(git rev-parse HEAD 2>/dev/null)$(git diff --quiet HEAD 2>/dev/null || echo ' with changes')"
driver=$(query driver_version)
nvcc=$(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
parts=()

quote() { # stdin as a JSON string
  sed 's/\\/\\\\/g; s/"/\\"/g; s/\t/\\t/g' | tr -d '\001-\011\013-\037\177' | awk '
    BEGIN { printf "\"" }
    { printf "%s%s", (NR > 1 ? "\\n" : ""), $0 }
    END { printf "\"" }'
}

# part NAME LIMIT COMMAND...: runs it for at most LIMIT seconds, keeps its output, notes how it ended.
part() {
  local name=$1 limit=$2 started=$SECONDS status=0
  shift 2
  timeout -k 10 "$limit" "$@" >"$work/$name.log" 2>&1 || status=$?
  [[ $status -eq 0 ]] || failures=$((failures + 1))
  printf '%-28s %s in %d s\n' "$name" "$([[ $status -eq 0 ]] && echo passed || echo "FAILED ($status)")" $((SECONDS - started))
  [[ $status -eq 0 ]] || tail -n 25 "$work/$name.log" | sed 's/^/    /'
  parts+=("    {\"part\": \"$name\", \"status\": $status, \"seconds\": $((SECONDS - started)), \"output\": $(
    tail -n 40 "$work/$name.log" | quote
  )}")
  write_results
  return "$status"
}

# skip NAME REASON: a part that is not run here.
skip() {
  printf '%-28s not run: %s\n' "$1" "$2"
  parts+=("    {\"part\": \"$1\", \"status\": null, \"seconds\": 0, \"output\": $(quote <<<"not run: $2")}")
  write_results
}

# whole FILE: the JSON in it; null when it is not there or not complete, as a part left it that was ended.
whole() {
  if [[ -s $1 && $(tail -c 2 "$1") == '}' ]]; then cat "$1"; else echo null; fi
}

write_results() {
  mkdir -p "$(dirname "$target")"
  {
    printf '{\n  "commit": "%s",\n' "$commit"
    printf '  "card": "%s",\n  "driver": "%s",\n  "nvcc": "%s",\n' "$card" "$driver" "$nvcc"
    printf '  "date": "%s",\n  "seconds": %d,\n  "failed_parts": %d,\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$SECONDS" "$failures"
    printf '  "kernels": %s,\n' "$(whole "$work/kernels.json")"
    printf '  "kernels_cudnn": %s,\n' "$(whole "$work/kernels-cudnn.json")"
    printf '  "tests": {%s},\n' \
      "$(sed -n 's/^  \("tests"\|"failures"\): \([0-9]*\),/\1: \2/p' "$work/tests.json" 2>/dev/null | paste -sd ,)"
    printf '  "parts": [\n%s\n  ]\n}\n' "$(printf '%s,\n' "${parts[@]}" | sed '$s/,$//')"
  } >"$work/results.json"
  mv "$work/results.json" "$target"
}

# What does not build is missing afterwards, and the rest is there.
build_all() {
  rm -f $build/shoal $build/tests/cuda_device_test $build/tests/bench/kernel_bench
  cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Release -DSHOAL_CUDA=ON -DSHOAL_BENCH=ON \
    "-DSHOAL_CUDA_ARCHITECTURES=$architecture" && ninja -k 0 -C $build shoal cuda_device_test kernel_bench
}

# train NAME OVERRIDE...: a short run of the quickstart's model.
train() {
  local name=$1
  shift
  $build/shoal train configs/quickstart.yaml "data.text=[$text]" 'data.extensions=[.cpp, .h, .inc, .txt]' data.prepared="$work/data" \
    run.folder="$work/runs" run.name="$name" run.steps=60 run.log_every=1 eval.every=0 eval.at_end=false \
    checkpoint.every=0 checkpoint.at_end=false "$@"
}

# losses NAME: the loss of each step, one a line.
losses() { sed -n 's/^{"kind":"step".*"loss":\([-0-9.e+]*\),"aux_loss".*/\1/p' "$work/runs/$1/metrics.jsonl"; }

# same_losses A B MOST: the largest relative difference of two runs is below MOST.
same_losses() {
  paste <(losses "$1") <(losses "$2") | awk -v most="$3" '
    NF != 2 { print "line " NR ": " $0; bad = 1; next }
    { d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > largest) { largest = d; at = NR } sum += d }
    END { printf "%d steps, largest difference %.2e (step %d), mean %.2e, expected at most %s\n", NR, largest, at, sum / NR, most
          exit bad || NR < 60 || largest > most }'
}

# built NAME PART...: whether the program is there; else its parts are not run.
built() {
  local program=$1 name
  shift
  [[ -x $build/$program ]] && return
  for name in "$@"; do skip "$name" "$program was not built"; done
  return 1
}

has_cudnn() { ldconfig -p 2>/dev/null | grep 'libcudnn\.so\.' >/dev/null; }

run_tests() {
  built tests/cuda_device_test tests sanitizer tests-cudnn || return
  part tests 120 env GTEST_OUTPUT="json:$work/tests.json" $build/tests/cuda_device_test --gtest_brief=1
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck initcheck; do
      part "sanitizer-$tool" 60 env SHOAL_CUDA_CACHE=0 compute-sanitizer --tool "$tool" --error-exitcode 9 \
        $build/tests/cuda_device_test --gtest_brief=1 --gtest_filter='*Norm*:*Attention*:*Routing*:*Permute*:*CrossEntropy*'
    done
  else
    skip sanitizer "compute-sanitizer is not on the path"
  fi
  if has_cudnn; then
    part tests-cudnn 60 env SHOAL_ATTENTION=cudnn $build/tests/cuda_device_test --gtest_brief=1 \
      --gtest_filter='CudaBf16Attention.Forward*:CudaBf16AttentionBackward.*'
  else
    skip tests-cudnn "cuDNN is not installed"
  fi
}

run_training() {
  local precision most
  built shoal train || return
  part train-cpu 90 bash -c 'train cpu'
  for precision in f32 bf16; do
    most=0.005
    [[ $precision == f32 ]] || most=0.03
    part "train-cuda-$precision" 60 bash -c 'train "cuda-$0" run.device=cuda run.precision="$0"' $precision &&
      part "losses-$precision" 10 bash -c 'same_losses cpu "cuda-$0" "$1"' $precision $most
  done
  part profile 60 bash -c 'train profiled run.device=cuda run.precision=bf16 run.profile=5 run.steps=20'
}

run_bench() {
  built tests/bench/kernel_bench kernels || return
  part kernels 90 bash -c '"$0" --device cuda --json "${@:2}" >"$1"' $build/tests/bench/kernel_bench "$work/kernels.json" "${limits[@]}"
  if has_cudnn; then
    part kernels-cudnn 40 bash -c 'SHOAL_ATTENTION=cudnn "$0" --device cuda --json --only bf16_attention "${@:2}" >"$1"' \
      $build/tests/bench/kernel_bench "$work/kernels-cudnn.json" "${limits[@]}"
  else
    skip kernels-cudnn "cuDNN is not installed"
  fi
}

main() {
  export -f build_all train losses same_losses
  export build work text architecture
  part build 280 bash -c build_all
  run_tests
  run_training
  run_bench
  echo "written: $target; $failures parts failed, $SECONDS s"
  [[ $failures -eq 0 ]]
}

main
