#!/usr/bin/env bash
# Two "hosts" on this machine: network namespaces with addresses of their own, joined by a virtual cable, and process
# namespaces, so that ranks of one cannot reach the memory of the other. mpirun starts two ranks on each, over TCP.
#   tests/launch/jobs/two_hosts.sh [build folder]
# A model is trained with all experts spread over both hosts, by the flat and by the hierarchical dispatcher: both
# must give the losses of the same ranks on one host, and the hierarchical one must move fewer bytes over the cable,
# by the kernel's counters. Needs root; says what is missing and ends with 77 (skipped) where it is not permitted.
set -u -o pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
build=$(cd "${1:-$root/build}" && pwd)
work=$(mktemp -d)
tag=$$
a=shoal-a-$tag b=shoal-b-$tag

cleanup() {
  ip netns pids "$a" 2>/dev/null | xargs -r kill -9 2>/dev/null
  ip netns pids "$b" 2>/dev/null | xargs -r kill -9 2>/dev/null
  ip netns delete "$a" 2>/dev/null
  ip netns delete "$b" 2>/dev/null
  rm -rf "$work"
}
trap cleanup EXIT
skip() {
  echo "skipped: $*"
  exit 77
}

[[ $(id -u) -eq 0 ]] || skip "two hosts need network namespaces, which need root"
command -v ip >/dev/null || skip "the program ip is missing (Debian package iproute2)"
ip netns add "$a" 2>"$work/error" && ip netns add "$b" 2>>"$work/error" || skip "network namespaces: $(cat "$work/error")"
ip link add "va$tag" netns "$a" type veth peer name "vb$tag" netns "$b" 2>"$work/error" ||
  skip "a virtual cable between network namespaces: $(cat "$work/error")"
for end in "$a va$tag 10.213.7.1" "$b vb$tag 10.213.7.2"; do
  read -r host device address <<<"$end"
  ip -n "$host" addr add "$address/24" dev "$device"
  ip -n "$host" link set "$device" up
  ip -n "$host" link set lo up
done
unshare --pid --fork --mount-proc --uts true 2>"$work/error" || skip "process namespaces: $(cat "$work/error")"

# Enters a host: its network, and names and processes of its own. mpirun starts its daemon on the other host by it.
cat >"$work/enter" <<EOF
#!/usr/bin/env bash
case \$1 in 10.213.7.1) net=$a name=node-a ;; *) net=$b name=node-b ;; esac
shift
exec ip netns exec \$net unshare --pid --fork --mount-proc --uts --kill-child sh -c "hostname \$name; exec sh -c '\$*'"
EOF
chmod +x "$work/enter"

# A word salad with structure: what is learned does not matter.
for i in $(seq 1 3000); do echo "the $((i % 7)) cats see $((i % 11)) dogs and $((i % 5)) owls."; done >"$work/text.txt"
train="$build/shoal train $root/configs/quickstart.yaml run.folder=$work/runs run.steps=12 run.log_every=1 run.threads=1
  model.layers=2 model.hidden_size=128 model.heads=4 model.moe.top_k=8 model.moe.hidden=32 data.tokenizer=byte
  data.text=[$work/text.txt] data.seq_len=64 eval.every=0 eval.at_end=false checkpoint.every=0 checkpoint.at_end=false
  parallel.ep=4"
losses() { grep -o '"loss":[^,]*' "$work/runs/$1/metrics.jsonl"; }
bytes() { ip netns exec "$a" cat "/sys/class/net/va$tag/statistics/tx_bytes"; }

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
# shellcheck disable=SC2086
mpirun --oversubscribe --bind-to none -n 4 $train run.name=one >"$work/one.log" 2>&1 || {
  echo "FAILED: the run on one host"
  tail -20 "$work/one.log"
  exit 1
}

status=0
declare -A moved
for kind in all_to_all hierarchical; do
  before=$(bytes)
  # shellcheck disable=SC2086
  timeout 120 "$work/enter" 10.213.7.1 "exec mpirun --oversubscribe --bind-to none --mca plm_rsh_agent $work/enter \
    --mca oob_tcp_if_include 10.213.7.0/24 --mca btl_tcp_if_include 10.213.7.0/24 --mca btl tcp,vader,self \
    -x OMPI_MCA_mpi_yield_when_idle --host 10.213.7.1:2,10.213.7.2:2 -n 4 $(echo $train) \
    run.name=$kind parallel.dispatcher=$kind" >"$work/$kind.log" 2>&1
  code=$?
  moved[$kind]=$(($(bytes) - before))
  if [[ $code -ne 0 ]]; then
    echo "FAILED: $kind over two hosts ended with $code"
    tail -30 "$work/$kind.log"
    exit 1
  fi
  echo "$kind: ${moved[$kind]} bytes from host a to host b in 12 steps"
done
if [[ $(losses one) != "$(losses all_to_all)" ]]; then
  echo "FAILED: losses over two hosts differ from those on one"
  diff <(losses one) <(losses all_to_all) | head
  status=1
fi
# Sums run node by node, so the last digits may differ.
if ! paste <(losses one | cut -d: -f2) <(losses hierarchical | cut -d: -f2) |
  awk '{d = $1 - $2; if (d < 0) d = -d; n++; if (d > 1e-3 * $1) bad = 1} END {exit bad || n != 12}'; then
  echo "FAILED: losses with the hierarchical dispatcher are others"
  paste <(losses one) <(losses hierarchical)
  status=1
fi
if [[ ${moved[hierarchical]} -ge ${moved[all_to_all]} ]]; then
  echo "FAILED: the hierarchical dispatcher moved no fewer bytes between the hosts"
  status=1
fi
[[ $status -eq 0 ]] && echo "passed: two hosts give the losses of one"
exit $status
