"""Windlass's side of the comparisons that are no training.

python benchmarks/peers/windlass_side.py generate LAYERS BATCH TOKENS
python benchmarks/peers/windlass_side.py hellaswag LAYERS GPT2_DIR FILE.jsonl ITEMS
python benchmarks/peers/windlass_side.py loop TOKENS.bin VOCAB STEPS RECIPE KEY=VALUE ...

`loop` is a bare training loop of a recipe's model, to which Windlass's trainer is compared.
"""

import json
import sys
import time
from typing import Any

import numpy as np
import torch

from windlass.data.vocabulary import named_tokenizer
from windlass.evaluation import likelihood
from windlass.evaluation.generate import Sampling, generate
from windlass.evaluation.source import alone
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.optim.build import build_optimizer
from windlass.processes import keep_freed_memory
from windlass.recipe import Recipe

PROMPT = 16  # tokens


def gpt2(layers: str) -> Any:
    model = build_model(Recipe.load("gpt2-124m", [f"model.layers={layers}"]), 50_257, "cpu")
    initialise(model, 0)
    return model.eval()


def tokens_per_s(layers: str, batch: str, tokens: str) -> None:
    model, prompts = gpt2(layers), torch.arange(PROMPT * int(batch)).reshape(-1, PROMPT).tolist()
    generate(model, prompts, Sampling(max_tokens=2, temperature=0))
    began = time.perf_counter()
    texts = generate(model, prompts, Sampling(max_tokens=int(tokens), temperature=0))
    assert texts and all(len(text) == int(tokens) for text in texts)
    rate = int(batch) * int(tokens) / (time.perf_counter() - began)
    print(json.dumps({"tokens/s": rate}))


def items_per_s(layers: str, folder: str, file: str, count: str) -> None:
    model, tokenizer = gpt2(layers), named_tokenizer(f"gpt2:{folder}")
    items = likelihood.read_items(file, int(count))
    began = time.perf_counter()
    rows = likelihood.continuations(items, tokenizer)
    likelihood.evaluate_hellaswag(model, items, rows, alone("cpu"))
    print(json.dumps({"items/s": len(items) / (time.perf_counter() - began)}))


def loop(path: str, vocab: str, steps: str, name: str, *settings: str) -> None:
    keep_freed_memory()  # as the trainer, whose own cost is measured
    recipe, tokens = Recipe.load(name, settings), np.memmap(path, dtype=np.uint16, mode="r")
    batch, context = recipe.train.global_batch, recipe.model.context
    model = build_model(recipe, int(vocab), "cpu")
    initialise(model, 0)
    parameters = list(model.parameters())
    optimizer, seconds = build_optimizer(model, recipe.optim, "cpu"), []
    starts = np.random.default_rng(0).integers(0, len(tokens) - context, (int(steps), batch))
    for row in starts:
        began = time.perf_counter()
        both = np.stack([tokens[i : i + context + 1] for i in row]).astype(np.int64)
        ids = torch.from_numpy(both)
        loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) / (batch * context)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, recipe.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"step_s": seconds}))


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    {"generate": tokens_per_s, "hellaswag": items_per_s, "loop": loop}[what](*rest)
