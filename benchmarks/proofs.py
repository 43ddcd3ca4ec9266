"""A ladder, published laws of scaling and a published small training, beside Windlass.

    python benchmarks/proofs.py forms studies/cpu
    python benchmarks/proofs.py runs studies/cpu
    python benchmarks/proofs.py hoffmann svg_extracted_data.csv   # epoch-research/analyzing-chinchilla
    python benchmarks/proofs.py gadre scaling-law-runs.csv        # mlfoundations/scaling, as in tests
    python benchmarks/proofs.py names names.txt                   # karpathy/makemore, 3 minutes

Each prints a table.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from windlass import Recipe, train
from windlass.data.open import Data
from windlass.reports.law import error_table, law_table
from windlass.study.ladder import open_ladder
from windlass.study.law import FORMS, Observation, fit_law

HUBER = 1e-3  # Hoffmann et al.
PUBLISHED = {  # E, A, B, α, β
    "Hoffmann et al.": (1.69, 406.4, 410.7, 0.34, 0.28),
    "Besiroglu et al.": (1.81724, 477.84, 2143.86, 0.34731, 0.36718),
}
OUTLIERS = 5  # runs with the highest losses, which Besiroglu et al. leave out
LEAST = 10  # tokens for each parameter


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


def hoffmann(path: str) -> None:
    """The constants of Hoffmann et al.'s runs, read off their figure 4 by Besiroglu et al."""
    with open(path, encoding="utf-8") as file:
        rows = [
            (float(r["Model Size"]), float(r["Training FLOP"]), float(r["loss"]))
            for r in csv.DictReader(file)
        ]
    rows.sort(key=lambda row: row[2])
    runs = [Observation("", round(n), 0, round(c / 6 / n), loss) for n, c, loss in rows]
    law = fit_law(runs[:-OUTLIERS], huber=HUBER)
    fitted = law.constants()
    names = ("E", "A", "B", "α", "β")
    lines = [[who, *(f"{x:.4g}" for x in values)] for who, values in PUBLISHED.items()]
    lines.append(["Windlass", *(f"{fitted[name][0]:.4g}" for name in names)])
    ranges = (f"{fitted[name][1]:.4g} to {fitted[name][2]:.4g}" for name in names)
    table(["", *names], [*lines, ["80 % range", *ranges]])


def gadre(path: str) -> None:
    """The error on the larger half of each training set's runs, by form, fitted to the smaller."""
    with open(path, encoding="utf-8") as file:
        every = list(csv.DictReader(file))
    lines = []
    for form, embeddings, huber in itertools.product(FORMS, (True, False), (1e-2, HUBER)):
        line = [FORMS[form].formula, "all" if embeddings else "without embeddings", f"{huber:g}"]
        for data, least in itertools.product(("c4_original", "rpj"), (0, LEAST)):
            runs = [
                Observation(
                    r["id"],
                    int(r["params"]),
                    int(r["params_no_embed"]),
                    int(r["tokens"]),
                    float(r["c4_val_loss"]),
                )
                for r in every
                if r["data"] == data and float(r["tokens_per_param"]) >= least
            ]
            runs.sort(key=lambda run: run.parameters * run.tokens)
            half = len(runs) // 2
            law = fit_law(runs[:half], form, embeddings=embeddings, samples=0, huber=huber)
            errors = [law.loss(r.size(embeddings), r.tokens) / r.loss - 1 for r in runs[half:]]
            line.append(f"{100 * np.abs(errors).mean():.2f}")
        lines.append(line)
    sets = [f"{name}, {which}" for name in ("C4", "RedPajama") for which in ("all", "≥ 10")]
    table(["Form", "N counts", "δ", *(f"{each} (%)" for each in sets)], lines)


def forms(path: str) -> None:
    """The error of each form on a ladder's largest size."""
    print(law_table(open_ladder(path)).markdown())


def runs(path: str) -> None:
    """The runs of a ladder beside its law, without their names."""
    seen = error_table(open_ladder(path))
    shown = [i for i, column in enumerate(seen.columns) if column.name not in ("run", "flops")]
    rows = sorted(([row[i] for i in shown] for row in seen.rows), key=lambda row: row[:2])
    print(replace(seen, columns=[seen.columns[i] for i in shown], rows=rows).markdown())


class Names:
    """A name in each row: 0, its letters, 0; the labels after its end are masked."""

    def __init__(self, words: Sequence[str], letters: str, longest: int):
        self.rows = np.zeros((len(words), longest + 2), dtype=np.int64)
        self.labels = np.full((len(words), longest + 1), -100, dtype=np.int64)
        for row, word in enumerate(words):
            self.rows[row, 1 : len(word) + 1] = [letters.index(letter) + 1 for letter in word]
            self.labels[row, : len(word) + 1] = self.rows[row, 1 : len(word) + 2]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.rows[indices, :-1], self.labels[indices]


def names(path: str, seeds: Sequence[int] = (1,)) -> None:
    """The validation loss of makemore's transformer: its settings, split and 1,000 test names."""
    words = Path(path).read_text(encoding="utf-8").split()
    letters, longest = "".join(sorted(set("".join(words)))), max(map(len, words))
    torch.manual_seed(3407)  # as makemore.py divides the words
    order = torch.randperm(len(words)).tolist()
    parts = ([words[i] for i in order[:-1000]], [words[i] for i in order[-1000:]])
    seen, held_out = (Names(part, letters, longest) for part in parts)
    data = Data(seen, held_out, tokenizer=None, fingerprint="names", vocab=len(letters) + 1)
    model = {"layers": 4, "heads": 4, "width": 64, "context": longest + 1, "vocab": 0}
    model |= {"position": "learned", "norm": "layernorm", "activation": "gelu", "qk_norm": False}
    model |= dict.fromkeys(("attn_bias", "ff_bias", "norm_bias"), True)
    model |= {"tie_head": False, "zero_init_output": False}
    changes = {f"model.{name}": value for name, value in model.items()}
    changes |= {"train.steps": 3000, "train.global_batch": 32, "train.grad_clip": 0}
    changes |= {"optim.lr": 5e-4, "optim.betas": [0.9, 0.99], "optim.weight_decay": 0.01}
    changes |= {"optim.decay_on": "all", "optim.schedule.kind": "constant"}
    changes |= {"optim.schedule.warmup": 0, "eval.every": 1000, "eval.batches": 0}
    changes |= {"eval.sample_every": 0, "checkpoint.every": 0}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            own = {"run.seed": seed, "run.dir": f"{folder}/{seed}"}
            run = train(Recipe.load("quickstart", changes | own), data=data)
            losses = [x["loss"] for x in run.ledger() if x["kind"] == "eval" and x["step"]]
            lines.append([f"Windlass, seed {seed}", *(f"{loss:.4f}" for loss in losses)])
    table(["", "1,000 steps", "2,000 steps", "3,000 steps"], lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    commands = {each.__name__: each for each in (forms, runs, hoffmann, gadre, names)}
    parser.add_argument("command", choices=commands)
    parser.add_argument("file")
    given = parser.parse_args()
    commands[given.command](given.file)
