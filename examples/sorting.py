"""A GPT of 85,728 parameters learns to sort six digits, from samples of our own.

    python examples/sorting.py     # about a minute

It is the demo of karpathy/minGPT (demo.ipynb): digits from 0 to 2, a loss on the sorted half alone,
a quarter of the 729 sequences held out, 2,000 steps of 64 samples.
"""

from __future__ import annotations

import itertools
import sys
import zlib

import numpy as np
import torch

from windlass import Data, Recipe, Run, load_model, train
from windlass.model.gpt import GPT

LENGTH, DIGITS = 6, 3
SETTINGS = {
    "model": {"layers": 3, "heads": 3, "width": 48, "context": 2 * LENGTH - 1, "vocab": 0}
    | {"position": "learned", "norm": "layernorm", "activation": "gelu", "tie_head": False}
    | {"attn_bias": True, "ff_bias": True, "norm_bias": True, "qk_norm": False, "dropout": 0.1}
    | {"zero_init_output": False},
    "train": {"steps": 2000, "global_batch": 64},
    "optim": {"lr": 5e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "optim.schedule": {"kind": "constant", "warmup": 0},
    "eval": {"every": 500, "sample_every": 0},
}


class Sorting:
    """Sequences followed by themselves sorted; the labels of the first half are masked."""

    def __init__(self, held_out: bool):
        every = np.array(list(itertools.product(range(DIGITS), repeat=LENGTH)), dtype=np.int64)
        chosen = [(zlib.crc32(row.tobytes()) % 4 == 0) == held_out for row in every]
        self.inputs = every[chosen]

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = self.inputs[indices]
        rows = np.concatenate([rows, np.sort(rows, axis=1)], axis=1)
        labels = rows[:, 1:].copy()
        labels[:, : LENGTH - 1] = -100
        return rows[:, :-1], labels


@torch.no_grad()
def correct(run: Run, samples: Sorting) -> float:
    """The part of the sequences that the model sorts, one digit after the other, each the likeliest."""
    model = load_model(run, model=GPT(run.recipe.model, DIGITS), device="cpu")
    tokens = torch.from_numpy(samples.inputs)
    for _ in range(LENGTH):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    wanted = torch.from_numpy(np.sort(samples.inputs, axis=1))
    return float((tokens[:, LENGTH:] == wanted).all(dim=1).float().mean())


def main(*changes: str) -> dict[str, float]:
    """Train, and return the correct part of the training and of the held-out sequences."""
    recipe = Recipe.load("quickstart", {"run.dir": "runs/sorting"})
    for section, settings in SETTINGS.items():
        recipe = recipe.replace({f"{section}.{key}": value for key, value in settings.items()})
    seen, held_out = Sorting(held_out=False), Sorting(held_out=True)
    data = Data(train=seen, val=held_out, tokenizer=None, fingerprint="sorting", vocab=DIGITS)
    run = train(recipe.replace(changes), data=data)
    return {"seen": correct(run, seen), "held out": correct(run, held_out)}


if __name__ == "__main__":
    for name, share in main(*sys.argv[1:]).items():
        print(f"{name}: {share:.2%} correct")
