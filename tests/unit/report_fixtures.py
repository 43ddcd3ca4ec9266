"""Run directories as a training leaves them, made up without training."""

import copy
import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from windlass.recipe import Recipe
from windlass.reports.view import RunView
from windlass.run import Run
from windlass.study.study import Study

BEGIN = datetime(2026, 3, 1, 9, 0, 0, tzinfo=UTC)
EVERY, STEP_SECONDS, TOKENS_PER_STEP = 10, 0.5, 2048
NASTY = '</script><script>document.title="owned"</script><!-- <b>&amp; "quotes" \u2028 \x1b[31m'


def stamp(seconds: float) -> str:
    text = (BEGIN + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def loss_at(step: int, seed: int, lr: float = 1e-3) -> float:
    noise = np.random.Generator(np.random.Philox(key=seed * 100_003 + step)).normal(0, 0.04)
    penalty = 0.35 * math.log10(lr / 1e-3) ** 2
    return 1.62 + penalty + 2.9 * math.exp(-step / 55) + 0.9 * math.exp(-step / 400) + float(noise)


def add_lines(run: Run, *lines: dict[str, Any]) -> None:
    """Append lines to a ledger, at its end's time and of its first attempt unless they say
    otherwise.
    """
    with run.metrics_path.open("a") as file:
        for line in lines:
            file.write(json.dumps({"time": stamp(99), "attempt": 0, **line}) + "\n")


def edit(run: Run, change: Any) -> None:
    lines = [change(json.loads(line)) for line in run.metrics_path.read_text().splitlines()]
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines if line))


def changed(view: RunView, **fields: Any) -> RunView:
    other = copy.copy(view)
    vars(other).update(fields)
    return other


class Writer:
    """Writes a ledger and device files while a pretended clock runs."""

    def __init__(self, run: Path, ranks: int, seed: int, lr: float, steps: int, device: str):
        self.run, self.ranks, self.seed = run, ranks, seed
        self.lr, self.steps, self.device = lr, steps, device
        self.now, self.attempt, self.seconds = 0.0, 0, dict[str, float]()
        (run / "devices").mkdir(parents=True, exist_ok=True)

    def line(self, kind: str, step: int, **fields: Any) -> None:
        line = {"kind": kind, "step": step, "time": stamp(self.now), "attempt": self.attempt}
        seconds = {} if kind in ("eval", "sample") else {"seconds": dict(self.seconds)}
        add_lines(Run(self.run), line | seconds | fields)

    def devices(self, seconds: float, phase: str) -> None:
        """A sample of every rank a second; the phase takes these seconds."""
        busy = {"train": 93.0, "eval": 71.0, "save": 40.0}.get(phase, 3.0)
        for rank in range(self.ranks):
            with (self.run / "devices" / f"rank-{rank:05d}.jsonl").open("a") as file:
                for second in range(math.ceil(seconds)):
                    wave = 2.5 * math.sin(0.7 * (self.now + second) + rank)
                    sample = {"time": stamp(self.now + second), "attempt": self.attempt}
                    sample["phase"] = phase
                    sample["util_pct"] = busy + wave - rank
                    if self.device == "cpu":
                        sample["rss_mb"] = 2100.0 + 5 * rank
                    else:
                        sample["power_w"] = 240 + 8 * wave
                        sample["mem_alloc_mb"] = 1480.0 + 60 * rank + 4 * wave
                        sample["mem_reserved_mb"] = 1900.0 + 60 * rank
                        sample["peak_alloc_mb"] = 1700.0 + 60 * rank
                    file.write(json.dumps(sample) + "\n")
        self.now += seconds
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def start(self, event: str, step: int) -> None:
        self.devices(4.0, "startup")
        sizes = {"parameters": 813_568, "samples_per_epoch": 4000, "global_batch": 16}
        self.line("event", step, event=event, world=self.ranks, steps=self.steps, **sizes)

    def train(self, first: int, last: int) -> None:
        for step in range(first + 1, last + 1):
            if step % EVERY == 0:
                self.devices(EVERY * STEP_SECONDS, "train")
                rate = TOKENS_PER_STEP / STEP_SECONDS * (1 + 0.03 * math.sin(step / 9))
                rate *= 0.4 if step == EVERY else 1
                loss = loss_at(step, self.seed, self.lr)
                norm = 0.4 + 2.2 * math.exp(-step / 40) + 0.05 * math.cos(step)
                lr = self.lr * min(1, step / 20) * (1 + math.cos(math.pi * step / self.steps)) / 2
                ms = 2_048_000 / rate
                line = {"loss": loss, "lr": lr, "grad_norm": norm, "tokens": step * TOKENS_PER_STEP}
                line |= {"samples": step * 16, "epoch": step / 250, "mfu": rate / 10_000}
                line |= {"step_ms": ms, "forward_ms": 0.31 * ms, "backward_ms": 0.58 * ms}
                self.line("train", step, **line, tokens_per_s=rate, samples_per_s=rate / 128)
            if step % 50 == 0:
                self.evaluate(step)
            if step % 100 == 0:
                self.devices(0.4, "save")
                self.line("event", step, event="checkpoint", path=f"checkpoints/step-{step:08d}")

    def evaluate(self, step: int) -> None:
        self.devices(2.0, "eval")
        value = loss_at(step, self.seed, self.lr) + 0.06
        scores = {"suite": "loss", "loss": value, "perplexity": math.exp(value)}
        scores |= {"samples": 512, "tokens": 65_536, "runtime_s": 2.0, "samples_per_s": 512 / 2.0}
        self.line("eval", step, **scores, epoch=step * 16 / 4000, samples_trained=step * 16)
        scores = {"acc": 0.25 + step / 9000, "acc_norm": 0.26 + step / 8000, "items": 1000}
        self.line("eval", step, suite="hellaswag", **scores)
        text = f"def step_{step}(self):\n    return '<b>bold</b>'  # {NASTY}"
        self.line("sample", step, index=0, prompt="def ", text=text)


def rows_of(table: Any, shown: bool = False) -> list[dict[str, Any]]:
    """The values of a table's rows by column, or with `shown` its texts by heading."""
    names = table.headings if shown else [column.name for column in table.columns]
    rows = table.texts() if shown else table.rows
    return [dict(zip(names, row, strict=True)) for row in rows]


def build_run(
    path: Path,
    *overrides: str,
    steps: int = 400,
    ranks: int = 2,
    seed: int = 1,
    lr: float = 1e-3,
    killed_at: int = 0,
    finished: bool = True,
    device: str = "cuda",
) -> Run:
    """A run directory; with `killed_at` the first attempt dies there with a torn line, and the
    second resumes.
    """
    settings = [f"train.steps={steps}", f"optim.lr={lr}", f"run.seed={seed}", *overrides]
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(Recipe.load("quickstart", settings).toml())
    environment = {"python": "3.11.7", "hosts": ["node-a", "node-b"]}
    environment["command"] = ["windlass", "train", "quickstart", f"run.notes={NASTY}"]
    (path / "environment.json").write_text(json.dumps(environment))
    writer = Writer(path, ranks, seed, lr, steps, device)
    writer.start("started", 0)
    writer.evaluate(0)
    if killed_at:
        writer.train(0, killed_at)
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "step": 999, "lo\n')  # the kill tore this line
        writer.now += 3600  # the machine was gone for an hour
        writer.attempt, writer.seconds = 1, {}
        writer.start("resumed", killed_at // 100 * 100)
    writer.train(killed_at // 100 * 100, steps)
    if finished:
        means = {"avg_gpu_util_pct": 91.7, "avg_mem_alloc_mb": 1510.0}
        means |= {"avg_mem_reserved_mb": 1930.0, "peak_mem_mb": 1760.0}
        writer.line("summary", steps, steps=steps, world=ranks, parameters=813_568, **means)
        writer.line("event", steps, event="finished")
    return Run(path)


def build_study(
    path: Path,
    rates: tuple[float, ...] = (1e-2, 1e-3, 1e-4),
    seeds: tuple[int, ...] = (1, 2),
    overrides: tuple[str, ...] = (),
) -> Path:
    """A study of learning rates, schedules and seeds: one cell failed, one waits, the others
    finished.
    """
    axes = {"optim.lr": rates, "optim.schedule.kind": ("cosine", "wsd"), "run.seed": seeds}
    study = Study.create(Recipe.load("quickstart", ["train.steps=200", *overrides]), axes, path)
    for number, cell in enumerate(study.cells[:-1]):  # the last one still waits
        lr, kind, seed = cell.assignment.values()
        settings = (f"optim.schedule.kind={kind}", *overrides)
        options = {"seed": seed, "lr": lr, "finished": number != 1}
        path_of_run = study.run_of(cell).path
        run = build_run(path_of_run, *settings, **options, steps=200, ranks=1, device="cpu")
        if number == 1:
            failed = {"kind": "event", "event": "failed", "step": 200}
            add_lines(run, failed | {"reason": "step 151: loss not finite on rank 0"})
    return path
