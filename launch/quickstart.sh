#!/usr/bin/env bash
# From a clean checkout to a trained MoE language model: installs what is missing, builds, tokenises text,
# trains on two ranks, evaluates, generates a sample and draws a report. A second run reuses everything.
#   launch/quickstart.sh                 trains on the text of configs/quickstart.yaml
#   TEXT=book.txt launch/quickstart.sh   trains on that text instead
#   RANKS=4 launch/quickstart.sh         number of ranks, default 2
# Further arguments are config overrides, for example run.steps=200.
set -euo pipefail

config=configs/quickstart.yaml
folder=runs name=quickstart
ranks=${RANKS:-2}
overrides=("$@")

if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 0
fi
[[ $ranks =~ ^[1-9][0-9]*$ ]] || {
  echo "quickstart: RANKS: expected a positive number, got '$ranks'" >&2
  exit 2
}
if [[ -n ${TEXT-} ]]; then
  text=$(realpath -e -- "$TEXT" 2>/dev/null) || {
    echo "quickstart: TEXT: no file or folder '$TEXT'" >&2
    exit 2
  }
  # Another text is another run, so it gets a folder of its own. The path becomes a quoted YAML string.
  name=quickstart-$(cksum <<<"$text" | cut -d ' ' -f 1)
  quoted=${text//\\/\\\\}
  quoted=${quoted//\"/\\\"}
  quoted=${quoted//\$/\$\$}
  overrides=("data.text=[\"$quoted\"]" "run.name=$name" "${overrides[@]}")
fi
for setting in "$@"; do
  case $setting in
    run.name=*) name=${setting#*=} ;;
    run.folder=*) folder=${setting#*=} ;;
    *=*) ;;
    *)
      echo "quickstart: expected config overrides (key=value), got '$setting'" >&2
      exit 2
      ;;
  esac
done
run=$folder/$name

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
source launch/common.sh

step=0
step() {
  step=$((step + 1))
  printf '\n[%d/6] %s\n' "$step" "$1"
}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Runs a command, shows the end of its output when it fails.
quietly() {
  local status=0
  "$@" >"$log" 2>&1 || status=$?
  if [[ $status -ne 0 ]]; then
    tail -n 40 "$log" >&2
    printf 'quickstart: failed: %s\n' "$*" >&2
  fi
  return "$status"
}
# Runs a job under mpirun. On Ctrl-C mpirun would leave its ranks one second to save; here it stands in a session
# of its own, which Ctrl-C does not reach, and is sent SIGUSR1, which has no limit. A second Ctrl-C is SIGTERM.
# Returns the job's status; `asked` counts the requests to stop.
asked=0
under_mpirun() {
  local job status=0
  stop() {
    asked=$((asked + 1))
    if [[ $asked -eq 1 ]]; then
      printf '\nquickstart: saving at the end of this step; once more Ctrl-C ends it at once\n' >&2
      kill -USR1 "$job" 2>/dev/null || true
    else
      kill -TERM "$job" 2>/dev/null || true
    fi
  }
  setsid mpirun "${mpirun_flags[@]}" "$@" </dev/null &
  job=$!
  trap stop INT TERM HUP
  while true; do
    status=0
    wait "$job" || status=$?
    kill -0 "$job" 2>/dev/null || break # else a signal has ended the waiting, not the job
  done
  [[ $asked -eq 0 || $status -le 128 ]] || { status=0 && wait "$job" || status=$?; }
  trap - INT TERM HUP
  return "$status"
}

step "Packages"
launch/setup.sh

step "Build (the first time takes a few minutes)"
quietly configure build -DCMAKE_BUILD_TYPE=Release
if [[ -t 1 && ${TERM:-dumb} != dumb ]]; then
  ninja -C build shoal # one line that counts up
else
  ninja -C build --quiet shoal
fi

step "Prepare the text: tokenizer and tokens"
build/shoal prepare "$config" "${overrides[@]}"

step "Train on $ranks ranks"
set_mpirun_flags "$ranks"
under_mpirun build/shoal train "$config" "${overrides[@]}"
if [[ $asked -gt 0 ]]; then
  echo "quickstart: stopped; the same command goes on from the checkpoint"
  exit 130
fi

step "A sample of the trained model"
build/shoal generate "$run" --prompt "The function returns" --tokens 120 --temperature 0.8

step "Report"
build/shoal report "$run"

cat <<TXT

Done. What is there now:
  $run/report.html     curves and expert load; open it in a browser
  $run/metrics.jsonl   the same numbers, one JSON object a line
  $run/checkpoints     resumable: run the same command with more steps to go on
Try next:
  build/shoal generate $run --prompt "Your text"
  build/shoal eval $run
TXT
