"""Windlass's side of the comparisons that do not train by the command alone.

python benchmarks/peers/windlass_side.py generate LAYERS BATCH TOKENS
python benchmarks/peers/windlass_side.py overhead TOKENS.bin BLOCK RECIPE KEY=VALUE ...
"""

import contextlib
import json
import sys
import time
from typing import Any

import numpy as np
import torch

from windlass.cli import main
from windlass.evaluation.generate import Sampling, generate
from windlass.evaluation.passes import Passes
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.optim.build import build_optimizer
from windlass.recipe import Recipe
from windlass.training.trainer import Trainer

PROMPT = 16  # tokens


def gpt2(layers: str) -> Any:
    model = build_model(Recipe.load("gpt2-124m", [f"model.layers={layers}"]), 50_257, "cpu")
    initialise(model, 0)
    return model.eval()


def tokens_per_s(layers: str, batch: str, tokens: str) -> None:
    model, prompts = gpt2(layers), torch.arange(PROMPT * int(batch)).reshape(-1, PROMPT).tolist()
    generate(Passes(model), prompts, Sampling(max_tokens=2, temperature=0))
    began = time.perf_counter()
    texts = generate(Passes(model), prompts, Sampling(max_tokens=int(tokens), temperature=0))
    assert texts and all(len(text) == int(tokens) for text in texts)
    rate = int(batch) * int(tokens) / (time.perf_counter() - began)
    print(json.dumps({"tokens/s": rate}))


def overhead(path: str, block: str, preset: str, *settings: str) -> None:
    """Print the seconds of a step of the trainer, and of a bare loop that trains its model.

    They take turns in one process, `block` steps at a time, because a machine's speed drifts by
    more in a second than they differ.
    """
    tokens, steps = np.memmap(path, dtype=np.uint16, mode="r"), int(block)
    draw, optimizer = np.random.default_rng(0), None
    began, seconds = 0.0, {"trainer_s": list[float](), "bare_s": list[float]()}
    next_batch = Trainer.next_batch

    def record(name: str) -> None:
        nonlocal began
        before, began = began, time.perf_counter()
        seconds[name].append((began - before) / steps)

    def turns(self: Trainer, loader: Any) -> Any:
        nonlocal began, optimizer
        if self.state.step % steps == 0:
            if optimizer:
                record("trainer_s")
            else:
                optimizer = build_optimizer(self.model, self.recipe.optim, "cpu")
                began = time.perf_counter()
            for _ in range(steps):
                step(self, optimizer)
            record("bare_s")
        return next_batch(self, loader)

    def step(self: Trainer, optimizer: torch.optim.Optimizer) -> None:
        context = self.batch.context
        row = draw.integers(0, len(tokens) - context, self.batch.micro_batch)
        both = np.stack([tokens[i : i + context + 1] for i in row]).astype(np.int64)
        ids = torch.from_numpy(both)
        loss = self.model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) / (row.size * context)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    Trainer.next_batch = turns  # type: ignore[method-assign]
    sys.argv = ["windlass", "train", preset, *settings]
    with contextlib.redirect_stdout(sys.stderr):
        try:
            main()
        except SystemExit as end:  # `main` ends every command so
            if end.code:
                raise
    print(json.dumps(seconds))


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    {"generate": tokens_per_s, "overhead": overhead}[what](*rest)
