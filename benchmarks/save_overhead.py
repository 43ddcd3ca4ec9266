"""What a save costs: tokens/s with saves in the background beside tokens/s without, and beside
saves that are waited for.

    python benchmarks/save_overhead.py [RECIPE] [KEY=VALUE ...] [--rounds 8] [--steps 6] [--dir DIR]

The three are measured interleaved, in an order that changes from round to round, because two runs
of the same command differ by more than a save costs. A segment is `steps` training steps with one
save after the first; it ends when the save is committed, hashing, fsync and rename included, so
that nothing of its cost can fall outside. The time lost to a save is the median, over the rounds,
of a segment's time less that of the same round's segment without a save; beside it stands the
difference of the fastest segments, because what else runs on a machine only ever adds time.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from windlass.checkpoint.save import Writer
from windlass.checkpoint.state_dict import gather_shard
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.optim.build import build_optimizer
from windlass.recipe import Recipe
from windlass.recipe.settings import CheckpointSettings

MODES = ("without", "background", "waiting")


class Bench:
    def __init__(self, recipe: Recipe, micro_batch: int, folder: Path):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        vocab = recipe.model.vocab or 257
        self.model = build_model(recipe, vocab, self.device)
        initialise(self.model, recipe.run.seed)
        self.optimizer = build_optimizer(self.model, recipe.optim, self.device)
        shape = (micro_batch, recipe.model.context)
        self.tokens = torch.randint(0, vocab, shape, device=self.device)
        self.number = 0
        few = CheckpointSettings(keep_last=1, keep_best=False)
        self.writers = {
            mode: Writer(
                folder / mode / "checkpoints",
                settings=few.model_copy(update={"background": mode == "background"}),
            )
            for mode in MODES[1:]
        }

    def step(self) -> None:
        self.optimizer.zero_grad()
        (self.model(self.tokens, self.tokens) / self.tokens.numel()).backward()
        for writer in self.writers.values():
            writer.finish_staging()
        self.optimizer.step()

    def clock(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def segment(self, mode: str, steps: int) -> tuple[float, float]:
        """Seconds of a segment, and of the call to `save` in it."""
        began = self.clock()
        self.step()
        blocked = 0.0
        if mode != "without":
            called = self.clock()
            self.number += 1
            shard = gather_shard(self.model, self.optimizer)
            self.writers[mode].write(self.number, shard, {"step": self.number})
            blocked = time.perf_counter() - called
        for _ in range(steps - 1):
            self.step()
        self.clock()
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
    without = times["without"]
    found = {}
    for mode, own in times.items():
        found[mode] = {
            "tokens_per_s": bench.tokens.numel() * steps / median(own),
            "segment_s": median(own),
            "lost_s": median(a - b for a, b in zip(own, without, strict=True)),
            "fastest_s": min(own),
            "lost_fastest_s": min(own) - min(without),
            "blocked_s": median(blocked[mode]),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe", nargs="?", default="shakespeare-char")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6, help="a save must fit into them")
    parser.add_argument("--micro-batch", type=int, default=12)
    parser.add_argument("--dir", type=Path, help="where to save: the disk that is measured")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="save-overhead-", dir=options.dir))
    try:
        recipe = Recipe.load(options.recipe, options.overrides)
        bench = Bench(recipe, options.micro_batch, folder)
        found = measure(bench, options.rounds, options.steps)
        shard = gather_shard(bench.model, bench.optimizer)
        size = sum(box.tensor.nbytes for box in shard.boxes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    how = f"{size / 1e6:,.0f} MB a save, {options.rounds} rounds of {options.steps} steps"
    print(f"{options.recipe} on {bench.device}, {how}")
    head = ("tokens/s", "segment s", "lost s", "fastest s", "lost s", "in save() s")
    widths = (10, 11, 9, 11, 9, 13)
    columns = "".join(f"{text:>{width}}" for text, width in zip(head, widths, strict=True))
    print(f"{'saves':<12}{columns}")
    for mode, row in found.items():
        rate, *seconds = row.values()
        columns = "".join(f"{s:>{width}.3f}" for s, width in zip(seconds, widths[1:], strict=True))
        print(f"{mode:<12}{rate:>10,.0f}{columns}")
    background, waiting = found["background"], found["waiting"]
    share = background["lost_s"] / waiting["lost_s"]
    fastest = background["lost_fastest_s"] / waiting["lost_fastest_s"]
    ratios = f"{share:.0%} of one that is waited for (medians), {fastest:.0%} (fastest segments)"
    print(f"a save in the background costs {ratios}")
    if waiting["lost_s"] > 2 * waiting["blocked_s"]:
        print("more time was lost than the calls took: the machine was busy, so ignore the medians")


if __name__ == "__main__":
    main()
