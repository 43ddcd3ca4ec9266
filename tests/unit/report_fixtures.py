"""Run directories as a training leaves them, made up without training: for the tests of what reads runs."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from windlass.recipe import Recipe
from windlass.run import Run
from windlass.study.study import Study

BEGIN = datetime(2026, 3, 1, 9, 0, 0, tzinfo=UTC)
EVERY = 10
STEP_SECONDS = 0.5
TOKENS_PER_STEP = 2048
NASTY = '</script><script>document.title="owned"</script><!-- <b>&amp; "quotes" \u2028 \x1b[31m'


def stamp(seconds: float) -> str:
    return (BEGIN + timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def loss_at(step: int, seed: int, lr: float = 1e-3) -> float:
    best = 1e-3
    penalty = 0.35 * (math.log10(lr / best)) ** 2
    noise = np.random.Generator(np.random.Philox(key=seed * 100_003 + step)).normal(0, 0.04)
    return 1.62 + penalty + 2.9 * math.exp(-step / 55) + 0.9 * math.exp(-step / 400) + float(noise)


class Writer:
    """Writes a ledger and device files while a pretended clock runs."""

    def __init__(self, run: Path, ranks: int, seed: int, lr: float, steps: int, device: str = "cuda"):
        self.run, self.ranks, self.seed, self.lr, self.steps, self.device = run, ranks, seed, lr, steps, device
        self.now, self.attempt = 0.0, 0
        self.seconds: dict[str, float] = {}
        (run / "devices").mkdir(parents=True, exist_ok=True)

    def line(self, kind: str, step: int, **fields: Any) -> None:
        record: dict[str, Any] = {"kind": kind, "step": step, "time": stamp(self.now), "attempt": self.attempt}
        if kind in ("train", "event", "summary"):
            record["seconds"] = dict(self.seconds)
        record |= fields
        with (self.run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def devices(self, seconds: float, phase: str) -> None:
        """A sample of every rank a second; the phase takes these seconds."""
        busy = {"train": 93.0, "eval": 71.0, "save": 40.0}.get(phase, 3.0)
        for rank in range(self.ranks):
            samples = []
            for second in range(math.ceil(seconds)):
                wave = 2.5 * math.sin(0.7 * (self.now + second) + rank)
                sample = {
                    "time": stamp(self.now + second),
                    "rank": rank,
                    "phase": phase,
                    "util_pct": busy + wave - rank,
                }
                sample |= {"rss_mb": 2100.0 + 5 * rank} if self.device == "cpu" else {
                    "power_w": 240 + 8 * wave, "mem_alloc_mb": 1480.0 + 60 * rank + 4 * wave,
                    "mem_reserved_mb": 1900.0 + 60 * rank, "peak_alloc_mb": 1700.0 + 60 * rank,
                }  # fmt: skip
                samples.append(sample)
            with (self.run / "devices" / f"rank-{rank:05d}.jsonl").open("a") as file:
                file.writelines(json.dumps(sample) + "\n" for sample in samples)
        self.now += seconds
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def start(self, event: str, step: int) -> None:
        self.devices(4.0, "startup")
        self.line(
            "event", step, event=event, parameters=813_568, world=self.ranks, strategy="ddp", steps=self.steps,
            samples_per_epoch=4000, global_batch=16,
        )  # fmt: skip

    def train(self, first: int, last: int, eval_every: int = 50, save_every: int = 100) -> None:
        for step in range(first + 1, last + 1):
            if step % EVERY == 0:
                self.devices(EVERY * STEP_SECONDS, "train")
                self._train_line(step)
            if step % eval_every == 0:
                self.evaluate(step)
            if step % save_every == 0:
                self.devices(0.4, "save")
                self.line("event", step, event="checkpoint", path=f"checkpoints/step-{step:08d}")

    def _train_line(self, step: int) -> None:
        rate = TOKENS_PER_STEP / STEP_SECONDS * (1 + 0.03 * math.sin(step / 9))
        if step == EVERY:
            rate *= 0.4
        warm = min(1.0, step / 20)
        lr = self.lr * warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))
        ms = 1000 * TOKENS_PER_STEP / rate
        self.line(
            "train", step, loss=loss_at(step, self.seed, self.lr), lr=lr,
            grad_norm=0.4 + 2.2 * math.exp(-step / 40) + 0.05 * math.cos(step), tokens=step * TOKENS_PER_STEP,
            samples=step * 16, epoch=step * 16 / 4000, step_ms=ms, forward_ms=0.31 * ms, backward_ms=0.58 * ms,
            optimizer_ms=0.07 * ms, data_ms=0.01 * ms, tokens_per_s=rate, samples_per_s=rate / 128,
            tokens_per_s_per_device=rate / self.ranks, mfu=0.41 * rate / 4096,
        )  # fmt: skip

    def evaluate(self, step: int) -> None:
        self.devices(2.0, "eval")
        value = loss_at(step, self.seed, self.lr) + 0.06
        self.line(
            "eval", step, suite="loss", loss=value, perplexity=math.exp(value), epoch=step * 16 / 4000,
            samples_trained=step * 16, samples=512, tokens=65_536, runtime_s=2.0, samples_per_s=512 / 2.0,
        )  # fmt: skip
        self.line(
            "eval", step, suite="hellaswag", accuracy=0.25 + step / 9000, accuracy_norm=0.26 + step / 8000, items=1000
        )
        text = f"def step_{step}(self):\n    return '<b>bold</b>'  # {NASTY}"
        self.line("sample", step, index=0, prompt="def ", text=text)

    def finish(self, step: int) -> None:
        self.line("event", step, event="measured")
        self.line(
            "summary", step, steps=self.steps, avg_gpu_util_pct=91.7, std_gpu_util_pct=4.2, avg_mem_alloc_mb=1510.0,
            avg_mem_reserved_mb=1930.0, peak_mem_mb=1760.0, samples_per_s_mean=31.4, steps_per_s_mean=1.96,
            tokens_per_s_mean=4019.2, world=self.ranks, parameters=813_568,
        )  # fmt: skip
        self.line("event", step, event="finished")


def build_run(
    path: Path, *overrides: str, steps: int = 400, ranks: int = 2, seed: int = 1, lr: float = 1e-3, killed_at: int = 0,
    finished: bool = True, device: str = "cuda",
) -> Run:  # fmt: skip
    """A run directory; with `killed_at` the first attempt dies there with a torn line, and the second resumes."""
    recipe = Recipe.load("quickstart", [f"train.steps={steps}", f"optim.lr={lr}", f"run.seed={seed}", *overrides])
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(recipe.toml())
    environment = {
        "windlass": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "hosts": ["node-a", "node-b"],
        "devices": {"rank 0": "NVIDIA H200", "rank 1": "NVIDIA H200"}, "command": f"windlass train quickstart {NASTY}",
    }  # fmt: skip
    (path / "environment.json").write_text(json.dumps(environment, indent=2))
    writer = Writer(path, ranks, seed, lr, steps, device)
    writer.start("started", 0)
    writer.evaluate(0)
    at = 0
    if killed_at:
        writer.train(0, killed_at)
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "step": 999, "lo')  # the kill tore this line
            file.write("\n")
        at = killed_at // 100 * 100
        writer.now += 3600  # the machine was gone for an hour
        writer.attempt, writer.seconds = 1, {}
        writer.start("resumed", at)
    writer.train(at, steps)
    if finished:
        writer.finish(steps)
    return Run(path)


def build_study(
    path: Path, rates: tuple[float, ...] = (1e-2, 1e-3, 1e-4), seeds: tuple[int, ...] = (1, 2),
    overrides: tuple[str, ...] = (),
) -> Path:  # fmt: skip
    """A study of learning rates, schedules and seeds: one cell failed, one waits, the others finished."""
    axes = {"optim.lr": rates, "optim.schedule.kind": ("cosine", "wsd"), "run.seed": seeds}
    study = Study.create(Recipe.load("quickstart", ["train.steps=200", *overrides]), axes, path)
    for number, cell in enumerate(study.cells[:-1]):  # the last one still waits
        lr, kind, seed = cell.assignment.values()
        run = build_run(
            study.run_of(cell).path, f"optim.schedule.kind={kind}", *overrides, steps=200, ranks=1, seed=seed, lr=lr, device="cpu",
            finished=number != 1,
        )  # fmt: skip
        if number == 1:
            with run.metrics_path.open("a") as file:
                failure = {"kind": "event", "event": "failed", "step": 200, "time": stamp(999), "attempt": 0}
                file.write(json.dumps(failure | {"reason": "step 151: loss not finite on rank 0"}) + "\n")
    return path
