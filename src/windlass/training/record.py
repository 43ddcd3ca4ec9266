"""What a training writes down while it runs: ledger lines, terminal, trackers, the summary at the end. Rank 0 writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from windlass.checkpoint.retention import best
from windlass.run import Line, Run, read_lines
from windlass.telemetry.timing import device_hours, mfu, throughput, wall_time

if TYPE_CHECKING:
    from windlass.model.size import HfSizes
    from windlass.parallel.dist import Ranks
    from windlass.recipe import BatchPlan, Horizon
    from windlass.telemetry.console import Console
    from windlass.telemetry.devices import DeviceSampler
    from windlass.telemetry.ledger import Ledger
    from windlass.telemetry.timing import Goodput, StepTimer
    from windlass.telemetry.trackers import Note, Trackers
    from windlass.training.start import StartPlan
    from windlass.training.state import TrainState

HEARTBEAT_SECONDS = 10.0
"""How often the run's heartbeat file is touched, by which `windlass runs` tells a running run from a killed one."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known of the model and its device, for the ledger and the checkpoints."""

    custom: bool  # a module of the user's own
    parameters: int  # trained parameters
    precision: str  # arithmetic, with `auto` resolved
    dropout: bool  # whether it draws random numbers in training
    ties: list[list[str]]  # names of weights that were tied before the model was parallelized
    hf: HfSizes | None  # sizes of a model of `transformers`
    flops_per_token: float | None
    """Forward and backward, by the 6N convention plus attention; None where not known."""
    device_name: str
    peak_flops: float | None  # FLOP/s of the device; None where not known


@dataclass
class Recorder:
    """Writes down what the loop did. Each method is called by every rank at the same step."""

    run: Run
    world: int
    main: bool
    facts: ModelFacts
    horizon: Horizon
    state: TrainState
    ledger: Ledger
    console: Console
    timer: StepTimer
    goodput: Goodput
    sampler: DeviceSampler
    trackers: Trackers | None
    logged: tuple[int, int, int] = (0, 0, 0)  # step, samples and tokens at the last `train` line
    padded_tokens: int = 0  # tokens with padding since then
    last_loss: float | None = None
    _next_beat: float = field(default=0.0, repr=False)

    def started(self, plan: StartPlan, ranks: Ranks, batch: BatchPlan, resumed_from: str, notes: list[str]) -> None:
        """The terminal's header and the event of this start."""
        facts, state, recipe = self.facts, self.state, plan.recipe
        self.console.header(
            run=str(self.run.path), recipe=recipe.preset, config_hash=recipe.config_hash, device=facts.device_name,
            world=ranks.world, strategy=ranks.strategy, precision=facts.precision, parameters=facts.parameters,
            tokens_per_step=batch.tokens_per_step, first_step=state.step,
        )  # fmt: skip
        for note in notes:
            self.console.warning(note)
        branched = plan.branch_from
        self.event(
            "branched" if branched else "resumed" if plan.resuming and state.step else "started", steps=self.horizon.steps,
            world=ranks.world, strategy=ranks.strategy, precision=facts.precision, micro_batch=batch.micro_batch,
            accumulation=batch.accumulation, parameters=facts.parameters, global_batch=batch.global_batch,
            samples_per_epoch=self.horizon.samples_per_epoch, device=facts.device_name,
            branched_from=str(branched.absolute()) if branched else None, extended_from=plan.extends_from or None,
        )  # fmt: skip
        if resumed_from:
            self.console.event(f"resumed from {resumed_from}", state.step)

    def rewound(self, reason: str, left_out: list[int]) -> None:
        """The run returned to the step of the state: a new attempt, whose lines replace those after that step."""
        self.ledger.attempt += 1
        self.sampler.attempt = self.ledger.attempt
        self.event("rewound", reason=reason, left_out=left_out)
        start, stop = left_out
        self.console.warning(f"{reason}: back to step {self.state.step}, samples {start} to {stop} are left out")
        self.restart_counts()

    def restart_counts(self) -> None:
        """At a start or after a rewind: speeds are measured from here on."""
        self.logged = (self.state.step, self.state.samples, self.state.tokens)
        self.padded_tokens = 0
        self.timer.read()

    def event(self, event: str, step: int | None = None, **fields: Any) -> None:
        """An `event` line."""
        self.ledger.write("event", self.state.step if step is None else step, event=event, **fields)

    def train(self, loss: float, lr: float, grad_norm: float, loss_scale: float | None, device: torch.device) -> None:
        """A `train` line: the step's own loss over all ranks, and speeds since the last line. Waits for the device."""
        state, times = self.state, self.timer.read()
        step, samples, tokens = self.logged
        steps, seconds = max(1, state.step - step), times.get("step_ms", 0.0) / 1e3
        rates = {}
        if seconds:
            tokens_per_s = (state.tokens - tokens) / steps / seconds
            padded_per_s = self.padded_tokens / steps / seconds
            samples_per_s = (state.samples - samples) / steps / seconds
            flops = self.facts.flops_per_token
            rates = {
                "tokens_per_s": tokens_per_s, "tokens_per_s_per_device": tokens_per_s / self.world,
                "padded_tokens_per_s": padded_per_s if padded_per_s != tokens_per_s else None,
                "samples_per_s": samples_per_s, "samples_per_s_per_device": samples_per_s / self.world,
                "steps_per_s": 1 / seconds,
                "mfu": mfu(tokens_per_s, flops, self.facts.peak_flops, self.world) if flops else None,
            }  # fmt: skip
        self.logged, self.padded_tokens = (state.step, state.samples, state.tokens), 0
        self.last_loss = loss
        line = self.ledger.write(
            "train", state.step, loss=loss, lr=lr, grad_norm=grad_norm, tokens=state.tokens, samples=state.samples,
            epoch=self.epoch, **times, **rates, loss_scale=loss_scale,
        )  # fmt: skip
        self.console.step(line | {"mem_mb": _memory_mb(device)})

    @property
    def epoch(self) -> float:
        """Epochs of the training data done."""
        return self.state.samples / self.horizon.samples_per_epoch

    def evaluation(self, measured: list[dict[str, Any]]) -> list[Line]:
        """`eval` lines, one for each suite; returns them."""
        more = {"epoch": self.epoch, "samples_trained": self.state.samples}
        lines = [self.ledger.write("eval", self.state.step, **fields, **more) for fields in measured]
        for line in lines:
            self.console.eval(line)
        return lines

    def samples(self, prompt: str, texts: list[str]) -> None:
        """Generated texts: `sample` lines, files and terminal."""
        for index, text in enumerate(texts):
            if self.main:
                self.ledger.write("sample", self.state.step, index=index, prompt=prompt, text=text)
                with contextlib.suppress(OSError):
                    self.run.samples_dir.mkdir(exist_ok=True)
                    file = self.run.samples_dir / f"step-{self.state.step:08d}-{index}.txt"
                    file.write_text(text, encoding="utf-8")
            self.console.sample(text, self.state.step)

    def beat(self) -> None:
        """Touch the heartbeat file where it is time; costs a clock reading otherwise."""
        now = time.monotonic()
        if self.main and now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_SECONDS
            with contextlib.suppress(OSError):
                self.run.heartbeat_path.touch()

    def poll(self) -> None:
        """What happened beside the steps: messages of the trackers, a ledger or sampler that cannot write."""
        self.beat()
        if self.trackers is not None:
            self._show(self.trackers.poll())
        for source in (self.ledger, self.sampler):
            if source.warning:
                self.console.warning(source.warning)
                source.warning = None

    def finish_trackers(self, seconds: float) -> None:
        """Let the trackers take the rest of the ledger, for so long."""
        if self.trackers is not None:
            self._show(self.trackers.finish(max(0.0, seconds)))

    def _show(self, notes: list[Note]) -> None:
        for note in notes:
            (self.console.warning if note.warning else self.console.event)(note.text)

    def summary(self, measure: str, scores: Mapping[int, float], losses: Mapping[int, float]) -> None:
        """The run's last line on rank 0, computed from the effective ledger, so that a resume inflates nothing."""
        from windlass.telemetry.devices import summarise_devices

        if not self.main:
            return
        state, run = self.state, self.run
        self.event("measured")  # a last stamp of the wall time
        raw, speed = list(read_lines(run.metrics_path)), throughput(run.ledger())
        if self.last_loss is None:  # this start had nothing left to do but the end
            self.last_loss = next((x["loss"] for x in reversed(run.lines("train"))), None)
        evaluations, seconds = run.lines("eval", suite="loss"), wall_time(raw)
        means = {}
        if speed is not None:
            means = {
                "steps_per_s_mean": speed.steps_per_s, "samples_per_s_mean": speed.samples_per_s,
                "tokens_per_s_mean": speed.tokens_per_s, "mfu_mean": speed.mfu,
            }  # fmt: skip
        best_step = best(scores, measure)
        self.ledger.write(
            "summary", state.step, steps=self.horizon.steps, tokens=state.tokens, samples=state.samples, epochs=self.epoch,
            final_loss=self.last_loss, final_eval_loss=evaluations[-1]["loss"] if evaluations else None,
            best_eval_loss=min(losses.values(), default=None), best_measure=measure, best_step=best_step,
            best_score=None if best_step is None else scores[best_step],
            runtime_s=seconds["total"], wall_time=seconds, device_hours=device_hours(raw), world=self.world,
            parameters=self.facts.parameters, updates_skipped=state.updates_skipped, attempts=self.ledger.attempt + 1,
            **means, **summarise_devices(run),
        )  # fmt: skip


def start_profiler(steps: int, path: Path, cuda: bool, console: Console) -> torch.profiler.profile:
    """Trace `steps` steps of this rank, after one that is left out and one to warm up, into a file for Perfetto."""

    def write(profiler: torch.profiler.profile) -> None:
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))
        console.event(f"profile: {path}; open it at https://ui.perfetto.dev (drag the file into the page)")

    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=steps, repeat=1)
    profiler = torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=write, record_shapes=True
    )
    profiler.start()
    return profiler


def _memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 1e6
    import psutil

    return float(psutil.Process().memory_info().rss) / 1e6
