#!/usr/bin/env bash
# Compares what ptxas says of each CUDA kernel with tests/cuda/budget.txt: registers per thread and bytes of static shared
# memory, the largest of a kernel's instances. A kernel above its budget, or one that is not in the file, is a failure; so are
# more registers than its largest block can have. Run after the target cuda_compile.
#   tests/cuda/budget.sh [BUILD_FOLDER]          compares
#   tests/cuda/budget.sh [BUILD_FOLDER] --write  raises the budgets to what is used, adds what is new, drops what is gone
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
folder=${1:-build}/cuda_compile
budget=tests/cuda/budget.txt
mode=${2-}
shopt -s nullglob
reports=("$folder"/*.ptxas)
if [[ ${#reports[@]} -eq 0 ]]; then
  echo "budget.sh: nothing in $folder; build cuda_compile first" >&2
  exit 1
fi

# "KERNEL REGISTERS SHARED" of each kernel. A name is demangled and loses its namespaces, template arguments and parameters.
used() {
  cat "${reports[@]}" | c++filt | awk '
    /Compiling entry function/ {
      name = $0
      sub(/.*entry function ./, "", name)
      gsub(/\(anonymous namespace\)::/, "", name)
      sub(/[<(].*/, "", name); sub(/.*(::| )/, "", name)
    }
    / Used [0-9]+ registers/ {
      registers = $0; sub(/.* Used /, "", registers); registers += 0
      shared = 0
      if (match($0, /[0-9]+ bytes smem/)) shared = substr($0, RSTART, RLENGTH) + 0
      if (registers > most[name]) most[name] = registers
      if (shared > bytes[name]) bytes[name] = shared
    }
    END { for (name in most) print name, most[name], bytes[name] + 0 }' | sort
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
used >"$scratch/used"
[[ -s $scratch/used ]] || { echo "budget.sh: no kernel in ${reports[*]}" >&2; exit 1; }
touch "$scratch/old"
[[ ! -f $budget ]] || grep -v '^#' "$budget" >"$scratch/old" || true

if [[ $mode == --write ]]; then
  {
    echo "# kernel: most registers per thread, bytes of static shared memory, largest block. Written by tests/cuda/budget.sh;"
    echo "# the largest block is what the launcher asks for at most, 1024 unless changed here."
    awk 'FILENAME == ARGV[1] { registers[$1] = $2; shared[$1] = $3; block[$1] = $4; next }
         { if (registers[$1] > $2) $2 = registers[$1]
           if (shared[$1] > $3) $3 = shared[$1]
           print $1, $2, $3, ($1 in block ? block[$1] : 1024) }' "$scratch/old" "$scratch/used"
  } >"$scratch/new"
  cp "$scratch/new" "$budget"
  exit 0
fi

awk 'FILENAME == ARGV[1] { registers[$1] = $2; shared[$1] = $3; block[$1] = $4; next }
  !($1 in registers) { print "budget: " $1 " is not in tests/cuda/budget.txt; add it with budget.sh BUILD --write"; bad = 1; next }
  $2 > registers[$1] { print "budget: " $1 " uses " $2 " registers, expected at most " registers[$1]; bad = 1 }
  $3 > shared[$1] { print "budget: " $1 " uses " $3 " bytes of shared memory, expected at most " shared[$1]; bad = 1 }
  int(($2 + 7) / 8) * 8 * block[$1] > 65536 {
    print "budget: " $1 " uses " $2 " registers; a block of " block[$1] " threads cannot have them"; bad = 1
  }
  { seen++ }
  END { printf "budget: %d kernels%s\n", seen, bad ? "" : ", all within their registers and shared memory"; exit bad }' \
  "$scratch/old" "$scratch/used"
