"""The reports of a training, to the ledger, the terminal and the trackers: every rank calls each
method at the same step; rank 0 writes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import InitVar, dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from windlass.data.mixture import Mixture
from windlass.ledger import Ledger, last_start, read_lines
from windlass.parallel.ranks import Ranks
from windlass.recipe import Horizon, Recipe
from windlass.run import Run
from windlass.telemetry.console import Console
from windlass.telemetry.devices import DeviceSampler, summarise_devices
from windlass.telemetry.measures import LOSS
from windlass.telemetry.summary import (
    Scores,
    averages,
    device_hours,
    mfu,
    scores_by_step,
    wall_time,
)
from windlass.telemetry.timing import Goodput, StepProfile, StepTimer
from windlass.telemetry.trackers import Note, Trackers
from windlass.training.state import StepResult, TrainState

HEARTBEAT_SECONDS = 10.0  # a file of this age or less shows that the run is alive


@dataclass
class Recorder:
    """Ledger, terminal and trackers of a run on rank 0; the device sampler on every rank."""

    run: Run
    recipe: Recipe
    ranks: Ranks
    state: TrainState
    horizon: Horizon
    console: Console
    stack: InitVar[ExitStack]  # closes what this opens
    attempt: InitVar[int]  # the number of this start
    began: InitVar[float]  # when it began, as Unix time
    device_name: str
    peak_flops: float | None  # of the device; None: unknown
    flops_per_token: float | None

    def __post_init__(self, stack: ExitStack, attempt: int, began: float) -> None:
        run, ranks, state = self.run, self.ranks, self.state
        device, settings = ranks.device, self.recipe.telemetry
        self.goodput = Goodput(began)
        self.timer = StepTimer(device, self.goodput)
        self.started_up = False  # whether this start has done a step
        self.padded_tokens = 0  # tokens of this start, with padding
        # Step, samples, tokens and padded tokens at the last `train` line, or at this start.
        self.reported = (state.step, state.samples, state.tokens, 0)
        self.logged = dict[str, float]()  # by callbacks, since the last `log` line
        self.evaluations: list[dict[str, Any]] = []  # the effective `eval` lines
        self._losses = list[Tensor]()  # of the steps since they were last read
        self._next_beat = 0.0  # of the monotonic clock
        seconds, steps = self.goodput.seconds, self.horizon.steps
        self.ledger = Ledger(run.metrics_path, attempt, ranks.main, lambda: {"seconds": seconds()})
        stack.callback(self.ledger.close)
        self.sampler = DeviceSampler(
            run.devices_dir, rank=ranks.rank, device=device, attempt=attempt, phases=seconds
        )
        stack.callback(self.sampler.stop)
        self.trackers = Trackers(run.path, settings.trackers if ranks.main else [])
        stack.callback(self.trackers.close)
        self.profile = StepProfile(settings.profile, run.path, ranks.rank, device, steps)
        stack.callback(self.profile.close)

    def emit(self, event: str, text: str = "", *, warning: bool = False, **fields: Any) -> None:
        """Write an `event` line at the present step, or at `step`, and show `text`, if any."""
        step = fields.pop("step", self.state.step)
        self.ledger.write("event", step, event=event, **fields)
        if text and warning:
            self.console.warning(text)
        elif text:
            self.console.event(text, step)

    def read_measured(self) -> set[str]:
        """Read the effective evaluations; returns which of `eval` and `sample` exist here."""
        read = self.run.lines
        lines = self.ranks.decide("measured", lambda: read("eval") + read("sample"))
        self.evaluations = [line for line in lines if line["kind"] == "eval"]
        return {line["kind"] for line in lines if line["step"] == self.state.step}

    def evaluated(self, scores: Mapping[str, Any]) -> None:
        state = self.state
        where = {"epoch": state.epochs(self.horizon), "samples_trained": state.samples}
        line = self.ledger.write("eval", state.step, **scores, **where)
        self.console.eval(line)
        self.evaluations.append(line)

    def write_logged(self) -> None:
        """A `log` line with the numbers that callbacks logged at this step, as `log.NAME`."""
        if self.logged:
            named = {f"log.{name}": value for name, value in self.logged.items()}
            self.ledger.write("log", self.state.step, **named)
        self.logged = {}

    @property
    def scores(self) -> Scores:
        """The values of `checkpoint.best` by step."""
        return scores_by_step(self.evaluations, self.recipe.checkpoint.best)

    def stepped(self, result: StepResult) -> None:
        """Report a completed step. Waits for the device only after the first step of a start."""
        self._losses.append(result.loss)
        self.padded_tokens += result.padded_tokens
        self.console.tick(self.state.step)
        if not self.started_up:
            self.started_up = True
            self.console.done()
            if self.ranks.device.type == "cuda":
                torch.cuda.synchronize(self.ranks.device)
            self.goodput.enter("train")
            seconds = self.goodput.seconds()
            startup, whole = seconds["startup"], sum(seconds.values())
            first = whole - startup - seconds.get("eval", 0.0) - seconds.get("sample", 0.0)
            parts = ", ".join(f"{phase} {spent:.1f} s" for phase, spent in seconds.items() if spent)
            text = f"first step done {whole:.1f} s after the start: {parts}"
            self.emit("first_step", text, startup_s=startup, first_step_s=round(first, 3))
        if self.profile.ends(self.state.step):
            with self.outside("save"):
                text, files = self.profile.write()
            self.emit("profile", text, files=files, warning=not files)

    def read_losses(self) -> None:
        """Add the losses of the steps since the last call to the counters, in the order of the
        steps. Waits for the device."""
        losses = torch.stack(self._losses).tolist() if self._losses else []
        for loss in filter(math.isfinite, losses):
            self.state.loss_sum += loss
            self.state.losses += 1
        self._losses = []

    def train(
        self, result: StepResult, lr: float, loss_scale: Tensor | None, mixture: Mixture | None
    ) -> None:
        """A `train` line: the loss of this step over all ranks, and speeds since the last line."""
        self.read_losses()
        state, world, flops = self.state, self.ranks.world, self.flops_per_token
        times = self.timer.read()  # waits for the device
        now = (state.step, state.samples, state.tokens, self.padded_tokens)
        steps, *counts = (after - before for before, after in zip(self.reported, now, strict=True))
        seconds = max(times["step_ms"], 1e-6) / 1e3
        samples_per_s, tokens_per_s, padded_per_s = (count / steps / seconds for count in counts)
        self.reported = now
        line: dict[str, Any] = {
            "loss": float(result.loss),
            "lr": lr,
            "grad_norm": float(result.grad_norm),
            **self.totals(),
            "epoch": state.epochs(self.horizon),
            **times,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / world,
            "samples_per_s": samples_per_s,
            "samples_per_s_per_device": samples_per_s / world,
            "steps_per_s": 1 / seconds,
        }
        if padded_per_s != tokens_per_s:
            line["padded_tokens_per_s"] = padded_per_s
        if flops:
            line["mfu"] = mfu(tokens_per_s, flops, self.peak_flops, world)
        if loss_scale is not None:
            line["loss_scale"] = float(loss_scale)
        if mixture is not None:
            line |= mixture.progress(state.samples)
        line = self.ledger.write("train", state.step, **line)
        if self.ranks.device.type == "cuda":
            line["gpu_mem_mb"] = torch.cuda.memory_allocated(self.ranks.device) / 1e6
        else:
            line["rss_mb"] = psutil.Process().memory_info().rss / 1e6
        self.console.step(line)

    def totals(self) -> dict[str, int]:
        state = self.state
        totals = {"tokens": state.tokens, "samples": state.samples}
        if state.label_tokens != state.tokens:  # some labels are masked
            totals["label_tokens"] = state.label_tokens
        return totals

    @contextlib.contextmanager
    def outside(self, phase: str) -> Iterator[None]:
        """Count time as `phase`, and not as time of a step."""
        with self.timer.phase("outside"), self.goodput.phase(phase):
            yield

    def beat(self) -> None:
        now = time.monotonic()
        if self.ranks.main and now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_SECONDS
            with contextlib.suppress(OSError):
                self.run.heartbeat_path.touch()

    def poll(self) -> None:
        """Show messages of trackers, and of a ledger or sampler that cannot write."""
        self.beat()
        self.show(self.trackers.poll())
        for source in (self.ledger, self.sampler):
            if source.warning:
                self.console.warning(source.warning, own=True)
                source.warning = None

    def show(self, notes: list[Note]) -> None:
        for note in notes:
            show = self.console.warning if note.warning else self.console.event
            show(note.text)

    def summary(self) -> None:
        """The run's last line, from the effective ledger, so that a resume counts no step twice."""
        if not self.ranks.main:
            return
        self.emit("measured")  # a last stamp of the wall time
        state, measure = self.state, self.recipe.checkpoint.best
        raw, lines = list(read_lines(self.run.metrics_path)), self.run.ledger()
        start, seconds, scores = last_start(lines), wall_time(raw), scores_by_step(lines, measure)
        trained = [x["loss"] for x in lines if x["kind"] == "train"]
        losses = [x["loss"] for x in lines if x["kind"] == "eval" and x["suite"] == LOSS]
        per_epoch = state.step * self.horizon.samples_per_epoch / state.samples or None
        # A branch begins with the samples of another run.
        samples = state.samples - lines[0]["step"] * self.horizon.samples_per_step
        whole_run = samples / (seconds["total"] - seconds["startup"])
        line: dict[str, Any] = {
            "steps": self.horizon.steps,
            **self.totals(),
            "epochs": state.epochs(self.horizon),
            "steps_per_epoch": per_epoch,
            "final_loss": (trained or [None])[-1],
            "final_eval_loss": (losses or [None])[-1],
            "best_eval_loss": scores_by_step(lines, LOSS).best,
            "best_measure": measure,
            "best_step": scores.best_step,
            "best_score": scores.best,
            "runtime_s": seconds["total"],
            "samples_per_s_whole_run": whole_run,
            "wall_time": seconds,
            "device_hours": device_hours(raw),
            "world": self.ranks.world,
            "parameters": start["parameters"],
            "trained": start["trained"],
            "attempts": self.ledger.attempt + 1,
        }
        if state.losses:
            line["train_loss_mean"] = state.loss_sum / state.losses
        line |= averages(lines) | summarise_devices(self.run)
        self.ledger.write("summary", state.step, **line)
