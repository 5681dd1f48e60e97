"""Shoal against PyTorch on the same model, tokens, batch and cores, in alternating rounds.

    tests/bench/pytorch/compare.py FOLDER tests/bench/configs/moe.yaml --precision bf16

FOLDER is what setup.sh made. First the variants of PyTorch that may be the fastest are tried, unless --variant names
one; then rounds of the best one and Shoal follow each other. Both start from the same weights and see the same tokens,
so their losses must agree; a difference ends the comparison.
"""
import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# What counts as PyTorch's answer to a precision of Shoal: for bf16 the best of any.
PRECISIONS = {"f32": ["f32"], "bf16": ["autocast", "master", "f32"]}
# nats; in bf16 the first steps of a large model, whose loss still jumps, differ by up to a percent.
LOSS_TOLERANCE = {"f32": 2e-3, "bf16": 0.15}
# Tried one after the other; each stays when it makes steps faster.
SWITCHES = [["--explicit-attention"], ["--expert-rows", "32"], ["--native-experts"], ["--compile"], ["--layout", "ep"],
            ["--layout", "ddp"]]
EXPERTS_ONLY = ("--expert-rows", "--native-experts", "ep")
NEWEST_ONLY = ("--explicit-attention", "--native-experts", "--compile")


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("environments", type=Path, help="folder of setup.sh")
    p.add_argument("config")
    p.add_argument("--precision", choices=PRECISIONS, default="f32")
    p.add_argument("--shoal", default="build/shoal")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--steps", type=int, default=8, help="timed steps of a round")
    p.add_argument("--warmup", type=int, default=3, help="steps before them")
    p.add_argument("--cores", type=int, default=2)
    p.add_argument("--variant", help="'newest --precision autocast ...': compare with this one, try no others")
    p.add_argument("--override", action="append", default=[], help="key=value for Shoal, so for both")
    return p.parse_args()


class Bench:
    def __init__(self, args, folder):
        self.args, self.folder = args, Path(folder)
        self.moe = False

    def shoal(self, name, layout, *overrides):
        """Trains with Shoal; returns the peak memory in MiB: that of the largest rank times the ranks."""
        ranks = self.args.cores if layout == "ep" else 1
        command = ["mpirun", "-n", str(ranks), "--bind-to", "core"] if ranks > 1 else []
        command += [self.args.shoal, "train", self.args.config, *self.args.override, f"run.folder={self.folder}",
                    f"run.name={name}", f"data.prepared={self.folder}/data", f"parallel.ep={ranks}",
                    f"run.threads={self.args.cores // ranks}", *overrides]
        env = dict(os.environ)
        if os.geteuid() == 0:
            env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        errors = process.stderr.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{shlex.join(command)}: exit code {process.returncode}\n{errors}")
        return ranks * usage.ru_maxrss / 1024

    def start(self):
        self.shoal("start", "threads", "run.steps=0", "checkpoint.at_end=true")
        with open(self.folder / "start/metrics.jsonl", encoding="utf-8") as rows:
            row = json.loads(rows.readline())
        self.moe = int(row["config"].get("model.moe.num_experts", 0)) > 0
        self.tokens = int(row["config"]["data.seq_len"]) * int(row["config"]["data.global_batch"])
        self.flops = row["flops_per_token"]
        print(f"{self.args.config}: {row['params_total'] / 1e6:.1f} M parameters, {self.tokens} tokens per step, "
              f"{self.flops / 1e6:.1f} MFLOP per token", flush=True)

    def measure_shoal(self, round_number, layout):
        args, name = self.args, f"{layout}-{round_number}"
        overrides = [f"run.steps={args.warmup + args.steps}"]
        if args.precision != "f32":
            overrides.append(f"run.precision={args.precision}")
        peak = self.shoal(name, layout, *overrides)
        with open(self.folder / name / "metrics.jsonl", encoding="utf-8") as rows:
            steps = [row for row in map(json.loads, rows) if row["kind"] == "step"]
        timed = [row["step_ms"] for row in steps[args.warmup:]]
        return {"tokens_per_s": self.tokens / statistics.median(timed) * 1e3, "peak_mib": peak,
                "losses": [row["loss"] for row in steps]}

    def measure_torch(self, environment, switches, steps):
        """None when this variant does not run."""
        command = [HERE / "tuned.sh", self.args.environments / environment / "python", HERE / "peer.py",
                   self.folder / "start", "--cores", str(self.args.cores), "--steps", str(steps), "--warmup",
                   str(self.args.warmup), *switches]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            print(f"  {environment} {shlex.join(switches)}: does not run: {reason}", flush=True)
            return None
        result = json.loads(done.stdout.splitlines()[-1])
        if not result["losses"][-1] < result["losses"][0]:
            sys.exit(f"{environment} {shlex.join(switches)}: the loss does not fall: {result['losses']}")
        print(f"  {environment} {shlex.join(switches)}: {described(result)}", flush=True)
        return result

    def best_variant(self):
        found = []
        for environment in ("newest", "debian"):
            for precision in PRECISIONS[self.args.precision]:
                found.append(self.search(environment, ["--precision", precision]))
        _, environment, switches = max(found)
        return environment, switches

    def search(self, environment, switches):
        """The fastest of one PyTorch and precision: switches that help are kept."""
        few = max(3, self.args.steps // 2)
        result = self.measure_torch(environment, switches, few)
        best = result["tokens_per_s"] if result else 0.0
        for switch in SWITCHES:
            if environment != "newest" and switch[0] in NEWEST_ONLY:
                continue
            if not self.moe and any(word in EXPERTS_ONLY for word in switch):
                continue
            tried = [*switches, *switch]  # a second --layout replaces the first
            result = self.measure_torch(environment, tried, few)
            if result and result["tokens_per_s"] > best:
                best, switches = result["tokens_per_s"], tried
        return best, environment, switches


def described(result):
    parts = " / ".join(f"{ms:.0f}" for ms in result["ms"].values())
    return (f"{result['tokens_per_s']:.0f} tokens/s, {parts} ms forward / backward / optimizer, "
            f"{result['cpu_s_per_step']:.2f} CPU s and {result['faults_per_step']:.0f} page faults per step, "
            f"{result['peak_mib']:.0f} MiB ({result['library_mib']:.0f} of them before the model)")


def check_losses(precision, torch, shoal, what):
    worst = max(abs(a - b) for a, b in zip(torch["losses"], shoal["losses"]))
    if worst > LOSS_TOLERANCE[precision]:
        sys.exit(f"{what}: not the same training; losses of PyTorch {torch['losses']}, of Shoal {shoal['losses']}")
    return worst


def print_summary(rounds, layouts, flops):
    def median(values):
        return statistics.median(list(values))

    torch_speed = median(r["torch"]["tokens_per_s"] for r in rounds)
    torch_peak = median(r["torch"]["peak_mib"] for r in rounds)
    torch_own = torch_peak - median(r["torch"]["library_mib"] for r in rounds)
    print(f"PyTorch: median {torch_speed:.0f} tokens/s, {torch_speed * flops / 1e9:.0f} GFLOP/s, {torch_peak:.0f} MiB, "
          f"{torch_own:.0f} MiB without its libraries")
    for layout in layouts:
        speed = median(r[layout]["tokens_per_s"] for r in rounds)
        peak = median(r[layout]["peak_mib"] for r in rounds)
        ratios = [r[layout]["tokens_per_s"] / r["torch"]["tokens_per_s"] for r in rounds]
        print(f"Shoal, {layout}: median {speed:.0f} tokens/s, {speed * flops / 1e9:.0f} GFLOP/s, {peak:.0f} MiB; "
              f"{median(ratios):.2f} x PyTorch ({', '.join(f'{ratio:.2f}' for ratio in ratios)}), "
              f"{100 * peak / torch_peak:.0f} % of its memory, {100 * peak / torch_own:.0f} % without its libraries")


def main():
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, folder)
        bench.start()
        if args.variant:
            environment, *switches = shlex.split(args.variant)
        else:
            environment, switches = bench.best_variant()
            print(f"fastest: {environment} {shlex.join(switches)}", flush=True)
        layouts, rounds = ["threads", "ep"] if bench.moe else ["threads"], []
        for i in range(args.rounds):
            result = {"torch": bench.measure_torch(environment, switches, args.steps)}
            if result["torch"] is None:
                sys.exit(1)
            for layout in layouts:
                result[layout] = bench.measure_shoal(i, layout)
                worst = check_losses(args.precision, result["torch"], result[layout], layout)
                print(f"  Shoal, {layout}: {result[layout]['tokens_per_s']:.0f} tokens/s, "
                      f"{result[layout]['peak_mib']:.0f} MiB; losses differ by at most {worst:.1e}", flush=True)
            print(f"round {i + 1}, load average {os.getloadavg()[0]:.1f}", flush=True)
            rounds.append(result)
        print_summary(rounds, layouts, bench.flops)


main()
