"""What a save costs: tokens/s with saves in the background beside tokens/s without, and beside
saves that are waited for.

    python benchmarks/save_overhead.py [RECIPE] [KEY=VALUE ...] [--rounds 8] [--steps 6] [--dir DIR] [--json FILE]

The three are measured interleaved, in an order that changes from round to round, because two runs
of the same command differ by more than a save costs. A segment is `steps` training steps with one
save after the first; it ends when the save is committed, hashing, fsync and rename included, so
that nothing of its cost can fall outside. The time lost to a save is the median, over the rounds,
of a segment's time less that of the same round's segment without a save; beside it stands the
difference of the fastest segments, because what else runs on a machine only ever adds time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from windlass.checkpoint.choose import Policy
from windlass.checkpoint.save import Writer
from windlass.checkpoint.state_dict import gather_shard
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.optim.build import build_optimizer
from windlass.recipe import Recipe

MODES = ("without", "background", "waiting")


class Bench:
    def __init__(self, recipe: Recipe, micro_batch: int, folder: Path):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        vocab = recipe.model.vocab or 257
        self.model = build_model(recipe, vocab, self.device)
        initialise(self.model, recipe.run.seed)
        self.optimizer = build_optimizer(self.model, recipe.optim, self.device)
        self.shape = (micro_batch, recipe.model.context)
        self.tokens = torch.randint(0, vocab, self.shape, device=self.device)
        self.number = 0
        self.writers = {
            mode: Writer(
                folder / mode / "checkpoints",
                policy=Policy(last=1, best=False),
                background=mode == "background",
            )
            for mode in MODES[1:]
        }

    def step(self) -> None:
        self.optimizer.zero_grad()
        (self.model(self.tokens, self.tokens) / self.tokens.numel()).backward()
        for writer in self.writers.values():
            writer.settle()
        self.optimizer.step()

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def segment(self, mode: str, steps: int) -> tuple[float, float]:
        """Seconds of a segment, and of the call to `save` in it."""
        self.sync()
        began = time.perf_counter()
        self.step()
        blocked = 0.0
        if mode != "without":
            self.sync()
            called = time.perf_counter()
            self.number += 1
            self.writers[mode].write(
                self.number, gather_shard(self.model, self.optimizer), {"step": self.number}
            )
            blocked = time.perf_counter() - called
        for _ in range(steps - 1):
            self.step()
        self.sync()
        if mode != "without":
            outcomes = self.writers[mode].wait()
            assert len(outcomes) == 1 and not outcomes[0].error, outcomes
        return time.perf_counter() - began, blocked


def measure(bench: Bench, rounds: int, steps: int) -> dict[str, dict[str, float]]:
    for mode in MODES:
        bench.segment(mode, 2)
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    blocked: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(rounds):
        for mode in MODES[turn % 3 :] + MODES[: turn % 3]:
            seconds, called = bench.segment(mode, steps)
            times[mode].append(seconds)
            blocked[mode].append(called)
    tokens = bench.tokens.numel() * steps
    return {
        mode: {
            "tokens_per_s": tokens / statistics.median(times[mode]),
            "segment_s": statistics.median(times[mode]),
            "lost_s": statistics.median(
                t - base for t, base in zip(times[mode], times["without"], strict=True)
            ),
            "fastest_s": min(times[mode]),
            "lost_fastest_s": min(times[mode]) - min(times["without"]),
            "blocked_s": statistics.median(blocked[mode]),
        }
        for mode in MODES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe", nargs="?", default="shakespeare-char")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--steps", type=int, default=6, help="steps in a segment; a save must fit into them"
    )
    parser.add_argument("--micro-batch", type=int, default=12)
    parser.add_argument("--dir", type=Path, help="where to save: the disk that is measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="save-overhead-", dir=options.dir))
    try:
        recipe = Recipe.load(options.recipe, options.overrides)
        bench = Bench(recipe, options.micro_batch, folder)
        found = measure(bench, options.rounds, options.steps)
        size = gather_shard(bench.model, bench.optimizer).nbytes
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        f"{options.recipe} on {bench.device}, {size / 1e6:,.0f} MB a save, {options.rounds} rounds of {options.steps} steps"
    )
    print(
        f"{'saves':<12}{'tokens/s':>10}{'segment s':>11}{'lost s':>9}{'fastest s':>11}{'lost s':>9}{'in save() s':>13}"
    )
    for mode, row in found.items():
        print(
            f"{mode:<12}{row['tokens_per_s']:>10,.0f}{row['segment_s']:>11.3f}{row['lost_s']:>9.3f}"
            f"{row['fastest_s']:>11.3f}{row['lost_fastest_s']:>9.3f}{row['blocked_s']:>13.3f}"
        )
    share = found["background"]["lost_s"] / found["waiting"]["lost_s"]
    fastest = found["background"]["lost_fastest_s"] / found["waiting"]["lost_fastest_s"]
    print(
        f"a save in the background costs {share:.0%} of one that is waited for (medians), {fastest:.0%} (fastest segments)"
    )
    if found["waiting"]["lost_s"] > 2 * found["waiting"]["blocked_s"]:
        print(
            "more time was lost than the call took: the machine was busy with other things, and the medians mean nothing"
        )
    if options.json:
        options.json.write_text(
            json.dumps({"bytes": size, "share": share, **found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
