"""Trains in PyTorch what a run of Shoal trains: same model, initial weights, tokens, batch and optimizer.

    tests/bench/pytorch/tuned.sh FOLDER/newest/python tests/bench/pytorch/peer.py RUN --steps 8

RUN is the folder of a run (run.py says which). Prints one line of JSON; --help lists the variants.
"""
import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

PRECISIONS = {
    "f32": "f32 throughout",
    "autocast": "bf16 autocast over f32 weights",
    "master": "bf16 weights and activations, f32 master weights in the optimizer",
}
LAYOUTS = {"threads": "one process", "ddp": "data parallel over gloo", "ep": "experts spread over gloo ranks"}


def parse():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("run")
    p.add_argument("--steps", type=int, default=8, help="timed steps, after the warm-up")
    p.add_argument("--warmup", type=int, default=3)
    p.add_argument("--cores", type=int, default=2, help="threads, or ranks of one thread")
    p.add_argument("--layout", choices=LAYOUTS, default="threads", help=str(LAYOUTS))
    p.add_argument("--precision", choices=PRECISIONS, default="f32", help=str(PRECISIONS))
    p.add_argument("--compile", action="store_true", help="torch.compile")
    p.add_argument("--explicit-attention", action="store_true", help="instead of scaled_dot_product_attention")
    p.add_argument("--native-experts", action="store_true", help="grouped_mm instead of a loop over experts")
    p.add_argument("--expert-rows", type=int, default=1, help="pad each expert's rows to a multiple of this")
    p.add_argument("--port", type=int, default=29517)
    return p.parse_args()


def launch_ranks(args):
    """Starts this program once per rank, each on a core of its own; returns the exit code."""
    ranks = []
    for rank, core in zip(range(args.cores), sorted(os.sched_getaffinity(0))):
        env = dict(os.environ, PEER_RANK=str(rank))
        ranks.append(subprocess.Popen(["taskset", "-c", str(core), sys.executable, *sys.argv], env=env))
    return max(abs(process.wait()) for process in ranks)


args = parse()
if args.layout != "threads" and "PEER_RANK" not in os.environ:
    sys.exit(launch_ranks(args))
RANK = int(os.environ.get("PEER_RANK", 0))
WORLD = 1 if args.layout == "threads" else args.cores
THREADS = args.cores // WORLD
os.environ["OMP_NUM_THREADS"] = str(THREADS)

import torch  # noqa: E402  (after the number of threads)
from torch import distributed  # noqa: E402

from model import NEWEST, Transformer  # noqa: E402
from moe import AllToAll, Local  # noqa: E402
from run import Run  # noqa: E402


@dataclass
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    seq: int
    rope_theta: float  # 0: learned positions
    layer_norm: bool
    eps: float
    bias: bool
    tied: bool
    gated: bool
    ffn: int  # width of dense layers
    experts: int  # 0: none
    top_k: int
    expert: int
    shared: int
    aux_coeff: float
    fused_attention: bool
    native_experts: bool
    expert_rows: int  # each expert's rows are padded to a multiple of this


def shape_of(run):
    experts = run.number("model.moe.num_experts")
    rope = run.text("model.position.kind") == "rope"
    return Shape(
        layers=run.number("model.layers"), hidden=run.number("model.hidden_size"), heads=run.number("model.heads"),
        kv_heads=run.number("model.kv_heads"), head_size=run.number("model.head_size"),
        vocab=run.number("model.vocab_size"), seq=run.seq,
        rope_theta=run.real("model.position.theta") if rope else 0.0,
        layer_norm=run.text("model.norm.kind") == "layer_norm", eps=run.real("model.norm.eps"),
        bias=run.flag("model.bias"), tied=run.flag("model.tie_embeddings"),
        gated=run.text("model.ffn.activation.kind") == "swiglu",
        ffn=0 if experts else run.number("model.ffn.hidden"), experts=experts,
        top_k=run.number("model.moe.top_k"), expert=run.number("model.moe.hidden") if experts else 0,
        shared=run.number("model.moe.shared_experts") * run.number("model.moe.hidden") if experts else 0,
        aux_coeff=run.real("model.moe.router.aux_coeff") if experts else 0.0,
        fused_attention=NEWEST and not args.explicit_attention, native_experts=args.native_experts,
        expert_rows=args.expert_rows)


def is_expert(name):
    return args.layout == "ep" and ".moe.experts." in name


def load_weights(model, run):
    """The run's initial weights; with experts spread, this rank's part of them."""
    params, count = dict(model.named_parameters()), 0
    for name, value in run.weights():
        count += value.size
        value = torch.from_numpy(value)
        if is_expert(name):
            value = value.chunk(WORLD)[RANK]
        params.pop(name).data.copy_(value)
    if params or count != run.params:
        raise SystemExit(f"{run.folder}: not the peer's model: {sorted(params)} are missing, "
                         f"{count} of {run.params} values are there")


def decays(name):
    """Shoal's rule: matrices and routers, not norms, biases and embeddings."""
    return not any(part in name for part in ("norm", "bias", ".b1", ".b2", "embedding", "position"))


class Optimizer:
    """AdamW after clipping by the global norm; f32 master weights when the model's are bf16."""

    def __init__(self, run, named):
        self.limit = run.real("optim.clip_norm")
        self.params = [p for _, p in named]
        self.expert = [is_expert(name) for name, _ in named]
        self.masters = self.params
        if args.precision == "master":
            self.masters = [torch.nn.Parameter(p.detach().clone()) for p in self.params]
            for p in self.params:
                p.data = p.data.bfloat16()
        decay = run.real("optim.optimizer.weight_decay")
        groups = [{"params": [m for m, (name, _) in zip(self.masters, named) if decays(name) == chosen],
                   "weight_decay": decay if chosen else 0.0} for chosen in (True, False)]
        fastest = {"fused": True} if NEWEST else {"foreach": True}
        self.adamw = torch.optim.AdamW(groups, lr=run.real("optim.learning_rate"), eps=run.real("optim.optimizer.eps"),
                                       betas=(run.real("optim.optimizer.beta1"), run.real("optim.optimizer.beta2")),
                                       **fastest)

    def norm(self, gradients):
        norms = torch.stack(torch._foreach_norm(gradients)).float()
        if args.layout != "ep":
            return norms.norm().item()
        expert = torch.tensor(self.expert)
        squares = norms[expert].square().sum()
        distributed.all_reduce(squares)
        return (norms[~expert].square().sum() + squares).sqrt().item()

    def step(self):
        gradients = [p.grad for p in self.params]
        if args.layout == "ep":  # sums over the ranks' means
            torch._foreach_div_([g for g, expert in zip(gradients, self.expert) if expert], WORLD)
        norm = self.norm(gradients)
        if self.masters is not self.params:
            gradients = [g.float() for g in gradients]
            for master, gradient in zip(self.masters, gradients):
                master.grad = gradient
        if norm > self.limit:
            torch._foreach_mul_(gradients, self.limit / norm)
        self.adamw.step()
        if self.masters is not self.params:
            for p, master in zip(self.params, self.masters):
                p.data.copy_(master.data)
        for p in (*self.params, *self.masters):
            p.grad = None


def parallel(model):
    """The model with its replicated gradients averaged over the ranks during backward."""
    if WORLD == 1:
        return model
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, [n for n, _ in model.named_parameters() if is_expert(n)])
    return ddp(model, gradient_as_bucket_view=True, broadcast_buffers=False)


def precision():
    if args.precision == "autocast":
        return torch.autocast("cpu", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def train(run, net, optimizer):
    """Steps; for each its loss, the seconds of its parts, and the CPU seconds and page faults of this rank."""
    rows = []
    for step in range(args.warmup + args.steps):
        batch = torch.from_numpy(run.rows(step, RANK, WORLD))
        if WORLD > 1:
            distributed.barrier()
        before, times = resource.getrusage(resource.RUSAGE_SELF), [time.perf_counter()]
        with precision():
            loss, total = net(batch)
        times.append(time.perf_counter())
        total.backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        after, loss = resource.getrusage(resource.RUSAGE_SELF), loss.detach()
        if WORLD > 1:
            distributed.all_reduce(loss)
        rows.append({
            "loss": loss.item() / WORLD, "seconds": times[-1] - times[0],
            "parts": [b - a for a, b in zip(times, times[1:])],
            "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "faults": after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt,
        })
    return rows


def over_ranks(value):
    value = torch.tensor(float(value))
    if WORLD > 1:
        distributed.all_reduce(value)
    return value.item()


def report(run, rows, library_mib):
    timed = rows[args.warmup:]
    seconds = statistics.median(row["seconds"] for row in timed)
    parts = [statistics.median(part) * 1e3 for part in zip(*(row["parts"] for row in timed))]
    tokens = run.batch * run.seq
    result = {
        "torch": torch.__version__, "layout": args.layout, "precision": args.precision, "compile": args.compile,
        "attention": "fused" if NEWEST and not args.explicit_attention else "explicit",
        "experts": "native" if args.native_experts else "loop", "expert_rows": args.expert_rows,
        "tokens_per_s": tokens / seconds, "gflops": tokens / seconds * run.flops_per_token / 1e9,
        "ms": dict(zip(("forward", "backward", "optimizer"), parts)),
        "cpu_s_per_step": over_ranks(statistics.median(row["cpu"] for row in timed)),
        "faults_per_step": over_ranks(statistics.median(row["faults"] for row in timed)),
        "peak_mib": over_ranks(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "library_mib": over_ranks(library_mib),
        "losses": [round(row["loss"], 5) for row in rows],
    }
    if RANK == 0:
        print(json.dumps(result), flush=True)


def main():
    torch.set_num_threads(THREADS)
    if WORLD > 1:
        distributed.init_process_group("gloo", f"tcp://127.0.0.1:{args.port}", rank=RANK, world_size=WORLD)
    library_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    run = Run(args.run)
    model = Transformer(shape_of(run), AllToAll(WORLD) if args.layout == "ep" else Local())
    load_weights(model, run)
    optimizer = Optimizer(run, list(model.named_parameters()))
    net = parallel(torch.compile(model) if args.compile else model)
    report(run, train(run, net, optimizer), library_mib)


main()
