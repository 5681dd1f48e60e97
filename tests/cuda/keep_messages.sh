#!/usr/bin/env bash
# keep_messages.sh FILE COMMAND...: runs the command and keeps what it says in FILE; shows it only when the command fails.
set -uo pipefail
file=$1
shift
"$@" >"$file" 2>&1 && exit
status=$?
grep -v '^ptxas info' "$file" >&2
exit "$status"
