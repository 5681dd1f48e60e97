"""A run of Shoal as its peer sees it: settings, tokens and initial weights, read from the run's folder.

The folder is what `shoal train CONFIG run.steps=0 checkpoint.at_end=true` leaves on one rank.
"""
import json
from pathlib import Path

import numpy


class Run:
    def __init__(self, folder):
        self.folder = Path(folder)
        with open(self.folder / "metrics.jsonl", encoding="utf-8") as rows:
            row = json.loads(rows.readline())
        self.settings, self.params = row["config"], row["params_total"]
        self.flops_per_token = row["flops_per_token"]
        self.seq, self.batch = self.number("data.seq_len"), self.number("data.global_batch")
        expect = {"data.loader.sampling": "sequential", "data.split.val_fraction": "0",
                  "data.loader.mask_documents": "false", "optim.schedule.kind": "constant",
                  "optim.schedule.warmup_steps": "0", "optim.optimizer.kind": "adamw"}
        for key, value in expect.items():
            if self.settings.get(key) != value:
                raise SystemExit(f"{folder}: {key} is {self.settings.get(key)}, the peer knows only {value}")
        self.tokens = self._tokens()

    def text(self, key):
        return self.settings[key]

    def number(self, key):
        """An integer; 0 for one that the run does not have."""
        return int(self.settings.get(key, 0))

    def real(self, key):
        return float(self.settings[key])

    def flag(self, key):
        return self.settings[key] == "true"

    def _tokens(self):
        """Every token of the prepared text; 16 bits each, as for all vocabularies below 65500."""
        return numpy.memmap(Path(self.text("data.prepared")) / "tokens.bin", dtype="<u2", mode="r")

    def rows(self, step, rank, world):
        """Rows of one rank in one step (from 0), [B / world, S + 1]: its part of the global batch, in order."""
        windows = (len(self.tokens) - 1) // self.seq
        local = self.batch // world
        first = step * self.batch + rank * local
        starts = [(row % windows) * self.seq for row in range(first, first + local)]
        return numpy.stack([self.tokens[at:at + self.seq + 1].astype("int64") for at in starts])

    def weights(self):
        """Name and value of every initial parameter, in Shoal's names and shapes."""
        import h5py
        [path] = self.folder.glob("checkpoints/step-000000000/w*.h5")
        with h5py.File(path, "r") as file:
            for name, dataset in file["model"].items():
                yield name, dataset[()]
