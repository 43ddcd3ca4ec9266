"""How full best-fit rows are, how long the plan takes, and how many real tokens per second a model
reads beside one conversation a row in length buckets.

    python benchmarks/packing.py SQUAD.json --tokenizer gpt2:DIR [--context 1024] [--rounds 5]
    python benchmarks/packing.py documents [--context 1024] [--rounds 5]

The second form compares packed rows of text with and without `data.document_mask`, by CPU time on
one thread: a forward and backward pass of a GPT of 4 layers of width 256.

Each paragraph of the SQuAD file is one conversation: the paragraph and its first question, then a
turn for each further question. Both ways read the same conversations; their steps alternate, and
the ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from windlass.data.describe import describe
from windlass.data.loader import Loader
from windlass.data.open import open_data
from windlass.data.packing import best_fit
from windlass.data.samples import positions_of
from windlass.model.build import build_model
from windlass.model.documents import Documents, documents_of
from windlass.model.gpt import initialise
from windlass.recipe import Recipe

STEPS, CONVERSATIONS = 4, 32  # in a round; in a step of one conversation a row
ROWS = 4  # of text, in a pass


def write_conversations(squad: Path, file: Path) -> None:
    with file.open("w") as out:
        for article in json.loads(squad.read_text())["data"]:
            for part in article["paragraphs"]:
                messages = []
                for number, qa in enumerate(part["qas"]):
                    asked = qa["question"] if number else f"{part['context']}\n{qa['question']}"
                    messages.append({"role": "user", "content": asked})
                    answer = qa["answers"][0]["text"]
                    messages.append({"role": "assistant", "content": answer})
                if messages:
                    out.write(json.dumps({"messages": messages}) + "\n")


def recipe_of(options: argparse.Namespace, folder: Path, packing: str, batch: int) -> Recipe:
    model = {"layers": 4, "heads": 4, "width": 256, "context": options.context, "position": "rope"}
    data = {"source": str(folder / "talk.jsonl"), "dir": str(folder / "data"), "format": "chat"}
    data |= {"tokenizer": options.tokenizer, "packing": packing, "prefetch": 0}
    train = {"global_batch": batch, "micro_batch": 4 if packing == "packed" else 1}
    return Recipe.model_validate({"model": model, "data": data, "train": train})


def lengths() -> None:
    """Fill and seconds for a million items of log-normal lengths."""
    draw = np.random.default_rng(0)
    print("a million items, log-normal (median 330 tokens, sigma 1.1), cut at the context")
    for context in (1024, 2048, 8192, 32768):
        sizes = np.clip(draw.lognormal(5.8, 1.1, 10**6).astype(np.int64), 1, context)
        started = time.process_time()
        _, edges = best_fit(sizes, context)
        seconds, rows = time.process_time() - started, len(edges) - 1
        fill = sizes.sum() / (rows * context)
        print(f"  context {context:6,}: {rows:9,} rows, {fill:.3%} filled, {seconds:.2f} s")


def speeds(options: argparse.Namespace, folder: Path) -> None:
    write_conversations(options.squad, folder / "talk.jsonl")
    plain = recipe_of(options, folder, "packed", CONVERSATIONS)
    data = open_data(plain)
    packed = open_data(recipe_of(options, folder, "best-fit", 1))
    facts = describe(packed)["train"]
    print(
        f"{facts['items']:,} conversations, {facts['lengths']} tokens: {facts['samples']:,} rows of "
        f"{options.context:,}, {facts['fill']:.2%} filled, {facts['items_per_sample']} in each"
    )
    rows = max(1, round(CONVERSATIONS / facts["items_per_sample"]))
    recipes = {"a row each": plain, "best-fit": recipe_of(options, folder, "best-fit", rows)}
    model: Any = build_model(plain, data.vocab, device="cpu")
    initialise(model, 1)
    loaders: dict[str, Loader] = {}
    for name, recipe in recipes.items():
        samples = packed.train if name == "best-fit" else data.train
        buckets = name != "best-fit"
        loaders[name] = Loader(samples, recipe.batch(1), 0, 1, prefetch=0, length_buckets=buckets)
    found: dict[str, list[float]] = {name: [] for name in loaders}
    for turn in range(options.rounds + 1):
        for name in list(loaders) if turn % 2 else list(loaders)[::-1]:
            tokens, padded, started = 0, 0, time.perf_counter()
            for _, step in zip(range(STEPS), loaders[name], strict=False):
                for micro in step.micro:
                    b = micro.batch
                    model(b.tokens, b.labels, **documents_of(b, model)).backward()
                    padded += b.tokens.numel()
                tokens += step.real_tokens
                model.zero_grad()
            rate = tokens / (time.perf_counter() - started)
            if turn:  # the first is a warm-up
                found[name].append(rate)
            print(f"  {turn} {name:10} {rate:8,.0f} real tokens/s, {tokens / padded:.1%} of all")
    ratios = [b / a for a, b in zip(*found.values(), strict=True)]
    middle = {name: round(statistics.median(rates)) for name, rates in found.items()}
    print(f"median real tokens/s {middle}; ratio {statistics.median(ratios):.2f}")


def documents(options: argparse.Namespace) -> None:
    """Packed rows, whose documents have log-normal lengths, with attention over rows and within
    documents."""
    torch.set_num_threads(1)
    model: Any = build_model(recipe_of(options, Path(), "packed", ROWS), 257, device="cpu")
    initialise(model, 1)
    draw = np.random.default_rng(0)
    shape = ROWS, options.context
    tokens = torch.from_numpy(draw.integers(0, 257, shape))
    print("| mean document | documents in a row | whole rows (tok/s) | documents (tok/s) | ratio |")
    print("|---:|---:|---:|---:|---:|")
    for mean in (32, 128, 512, 2048, 8192):
        sizes = np.ceil(draw.lognormal(np.log(mean) - 0.5, 1.0, 10 * tokens.numel() // mean + 10))
        numbers = np.repeat(np.arange(len(sizes)), sizes.astype(np.int64))[: tokens.numel()]
        numbers = numbers.reshape(shape)
        own = Documents(torch.from_numpy(numbers), torch.from_numpy(positions_of(numbers)))
        ways: list[dict[str, Any]] = [{}, {"documents": own}]
        seconds: list[list[float]] = [[], []]
        for turn in range(options.rounds + 1):
            for way in (0, 1) if turn % 2 else (1, 0):
                started = time.thread_time()
                model(tokens, tokens, **ways[way]).backward()
                model.zero_grad()
                seconds[way] += [time.thread_time() - started] * bool(turn)  # the first warms up
        rates = [tokens.numel() / statistics.median(times) for times in seconds]
        ratio = statistics.median(a / b for a, b in zip(*seconds, strict=True))
        count = np.mean([len(np.unique(row)) for row in numbers])
        print(f"| {mean:,} | {count:.1f} | {rates[0]:,.0f} | {rates[1]:,.0f} | {ratio:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("squad", type=Path, help="a SQuAD file, or the word documents")
    parser.add_argument("--tokenizer", default="byte")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if str(options.squad) == "documents":
        documents(options)
        return
    lengths()
    with tempfile.TemporaryDirectory() as name:
        speeds(options, Path(name))


if __name__ == "__main__":
    main()
