"""What a training writes: the ledger, the terminal, the trackers, and checkpoints with the counters
in them.

Each method is called by every rank at the same step; rank 0 writes.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn

from windlass.checkpoint.retention import LOSS, Scores, scores_by_step, without_improvement
from windlass.checkpoint.save import SaveOutcome
from windlass.data.facts import Facts, lines, warnings
from windlass.data.loader import StepBatch
from windlass.data.order import describe_order, step_samples
from windlass.estimate.milestones import evaluations
from windlass.model.size import CountedSizes, describe_sizes
from windlass.optim.build import count_groups, describe_groups
from windlass.parallel.dist import Ranks
from windlass.recipe import BatchPlan, Horizon
from windlass.recipe.load import MEASURED_ON
from windlass.run import read_lines
from windlass.telemetry import environment
from windlass.telemetry.console import Console
from windlass.telemetry.devices import DeviceSampler, summarise_devices
from windlass.telemetry.ledger import Ledger
from windlass.telemetry.timing import Goodput, StepTimer, averages, device_hours, mfu, wall_time
from windlass.telemetry.trackers import Note, Trackers
from windlass.training.callbacks import StepResult
from windlass.training.checks import check_first_loss
from windlass.training.start import StartPlan, decide_on_rank_0
from windlass.training.state import TrainState
from windlass.training.threads import Contention

# between touches of the file by which `windlass runs` tells a running run from a killed one
HEARTBEAT_SECONDS = 10.0


@dataclass(frozen=True)
class ModelFacts:
    """Numbers of the model and its device, for the ledger and the checkpoints."""

    sizes: CountedSizes
    precision: str  # arithmetic, with `auto` resolved
    dropout: bool  # whether it draws random numbers in training
    ties: list[list[str]]  # names of weights that were tied before the model was parallelized
    hf: bool  # whether it is a model of `transformers` that the recipe names
    flops_per_token: float | None  # forward and backward, 6N plus attention; None: unknown
    device_name: str
    peak_flops: float | None  # FLOP/s of the device; None: unknown
    rows: int  # of the embedding
    fresh: bool  # whether the weights are random ones of ours


class Recorder:
    """The ledger, the terminal and the trackers of a run on rank 0, the device sampler on every
    rank."""

    def __init__(
        self,
        plan: StartPlan,
        ranks: Ranks,
        facts: ModelFacts,
        horizon: Horizon,
        state: TrainState,
        goodput: Goodput,
        attempt: int,
        origin: dict[str, Any],
        console: Console,
        stack: ExitStack,
    ):
        self.plan, self.run, self.ranks = plan, plan.run, ranks
        self.facts, self.state = facts, state
        self.horizon, self.goodput, self.timer = horizon, goodput, StepTimer(ranks.device, goodput)
        settings, run = plan.recipe.telemetry, plan.run
        self.started_up = False  # whether this start has done a step
        # The ends of epochs shorter than the period of `train` lines have no lines of their own.
        self.logs_epochs = horizon.samples_per_epoch >= settings.every * horizon.samples_per_step
        self.padded_tokens = 0  # tokens of this start, with padding and masked ones
        # Step, samples, tokens and padded tokens at the last `train` line.
        self.logged: tuple[int, ...] = ()
        self.evaluations: list[dict[str, Any]] = []  # the effective `eval` lines
        self._next_beat = 0.0  # of the monotonic clock
        # Ranks that share a host are other processes to each other.
        self.contention = Contention() if ranks.device.type == "cpu" and ranks.world == 1 else None
        self.ledger = Ledger(
            run.metrics_path, attempt, ranks.main, stamp=lambda: {"seconds": goodput.seconds()}
        )
        stack.callback(self.ledger.close)
        self.console = console
        env = ranks.env
        about = environment.describe_rank(ranks.rank, ranks.device, env.local_rank, env.node)
        self.placed = ranks.all_gather_object("environment", about)
        self.launch = self._write_environment(origin) if ranks.main else {}
        self.sampler = DeviceSampler(
            run.devices_dir,
            rank=ranks.rank,
            world=ranks.world,
            device=ranks.device,
            every=settings.sample_seconds,
            attempt=attempt,
            phases=goodput.seconds,
        )
        stack.callback(self.sampler.stop)
        self.trackers = Trackers(
            run.path, settings.trackers if ranks.main else [], settings.flush_seconds
        )
        stack.callback(self.trackers.close)

    def _write_environment(self, origin: dict[str, Any]) -> dict[str, list[str]]:
        """Write the ranks' environment into the run; returns the launch for the header."""
        env, ranks = self.ranks.env, self.ranks
        backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else ""
        launch = {"launcher": env.launcher, "world": env.world, "nodes": env.nodes}
        launch |= {"strategy": ranks.strategy.name, "backend": backend}
        launch |= {"versions": environment.versions(self.placed)}
        launch |= environment.describe_job(os.environ)
        environment.write_environment(self.run.path, self.placed, launch=launch, **origin)
        alone = ranks.world == 1 and "job" not in launch
        return {} if alone else environment.describe_launch(launch, self.placed)

    def started(
        self,
        batch: BatchPlan,
        threads: str,
        facts_of_data: Facts,
        model: nn.Module,
        resumed_from: str,
        notes: list[str],
    ) -> None:
        """Show the header and write the event of this start; `threads`: CPU threads, and the
        reason."""
        facts, state, plan = self.facts, self.state, self.plan
        shared: dict[str, Any] = {"world": self.ranks.world, "strategy": self.ranks.strategy.name}
        shared |= {"precision": facts.precision, "device": facts.device_name}
        groups = count_groups(model, plan.recipe.optim)
        val_samples = facts_of_data.get("val", {}).get("samples", 0)
        measured = evaluations(plan.recipe, self.horizon, val_samples)
        per_sample = facts_of_data["train"].get("tokens_per_sample", batch.context)
        notes = [*notes, *warnings(facts_of_data)]
        notes += [measured.warning] if measured and measured.warning else []
        self.console.header(
            run=str(self.run.path),
            recipe=plan.recipe.preset,
            config_hash=plan.recipe.config_hash,
            model=describe_sizes(facts.sizes),
            optimizer=f"{plan.recipe.optim.kind}: {describe_groups(groups)}",
            first_step=state.step,
            tokens_per_step=round(batch.global_batch * per_sample),
            evaluation=str(measured or ""),
            data=lines(facts_of_data, plan.recipe.model.context),
            epochs=self.horizon.steps * batch.global_batch / self.horizon.samples_per_epoch,
            threads=threads,
            launch=self.launch,
            **shared,
        )
        self.console.log(environment.describe_places(self.placed))
        for note in notes:
            self.console.warning(note)
        self._start_event(batch, facts_of_data, shared | {"optimizer_groups": groups})
        if resumed_from:
            self.console.event(f"resumed from {resumed_from}", state.step)
        if plan.changes:
            changes = {change.key: [change.old, change.new] for change in plan.changes}
            self.event("settings_changed", settings=changes)
            self.console.event(f"settings changed: {', '.join(map(str, plan.changes))}", state.step)
        if any(change.key.startswith(MEASURED_ON) for change in plan.changes):
            problem = "evaluations from here on have other items"
            self.console.warning(f"{problem}, so the best is chosen among them alone")

    def _start_event(self, batch: BatchPlan, facts_of_data: Facts, more: dict[str, Any]) -> None:
        facts, plan, branched = self.facts, self.plan, self.plan.branch_from
        resumed = plan.resuming and self.state.step
        self.event(
            "branched" if branched else "resumed" if resumed else "started",
            **more,
            parameters=facts.sizes.total,
            trained=facts.sizes.trained,
            network=facts.sizes.network or None,
            threads=torch.get_num_threads(),
            steps=self.horizon.steps,
            micro_batch=batch.micro_batch,
            accumulation=batch.accumulation,
            global_batch=batch.global_batch,
            samples_per_epoch=self.horizon.samples_per_epoch,
            data=facts_of_data,
            extended_from=plan.extends_from or None,
            branched_from=str(branched.absolute()) if branched else None,
        )

    def saved(self, outcome: SaveOutcome) -> None:
        """How a save ended, as an event and on the terminal."""
        if outcome.error:
            self.event("save_failed", outcome.step, reason=outcome.error)
            self.console.warning(
                f"the checkpoint of step {outcome.step} was not saved: {outcome.error}"
            )
        elif self.ranks.main:
            self.ledger.sync()  # as durable as the checkpoint, up to its step
            self.event(
                "checkpoint",
                outcome.step,
                path=f"checkpoints/{outcome.path.name}",
                bytes=outcome.bytes,
                write_s=round(outcome.write_s, 4),
                blocked_s=round(outcome.staged_s + outcome.waited_s, 4),
            )
            self.console.saved(outcome.path, outcome.write_s, outcome.step)
            if outcome.warning:
                self.console.warning(outcome.warning)

    def read_measured(self, step: int) -> set[str]:
        """Read the effective evaluations; returns which of `eval` and `sample` exist at `step`."""
        read = self.run.lines  # without lines of steps that are done again
        lines = decide_on_rank_0(self.ranks, "measured", lambda: read("eval") + read("sample"))
        self.evaluations = [line for line in lines if line["kind"] == "eval"]
        return {line["kind"] for line in lines if line["step"] == step}

    def evaluated(self, scores: Mapping[str, Any]) -> None:
        """An `eval` line."""
        where = {"epoch": self.epoch, "samples_trained": self.state.samples}
        line = self.ledger.write("eval", self.state.step, **scores, **where)
        self.console.eval(line)
        self.evaluations.append(line)

    def rewound(self, reason: str, first: int, stop: int) -> None:
        """After a rewind that leaves out samples `first` to `stop`: later lines replace those of
        the steps that are done again."""
        step = self.state.step
        self.evaluations = [line for line in self.evaluations if line["step"] <= step]
        self.ledger.attempt += 1
        self.sampler.attempt = self.ledger.attempt
        self.event("rewound", reason=reason, left_out=[first, stop])
        left_out = f"samples {first} to {stop} are left out"
        self.console.warning(f"{reason}: back to step {step}, {left_out}")
        self.restart_counts()

    def restart_counts(self) -> None:
        """At a start or after a rewind: speeds are measured from here on."""
        self.logged = (self.state.step, self.state.samples, self.state.tokens, self.padded_tokens)
        self.timer.read()

    def log(self, measures: dict[str, float]) -> None:
        """A `log` line with what callbacks have logged at this step, as `log.NAME`."""
        if measures:
            fields = {f"log.{name}": value for name, value in measures.items()}
            self.ledger.write("log", self.state.step, **fields)

    def event(self, event: str, step: int | None = None, **fields: Any) -> None:
        """An `event` line."""
        self.ledger.write("event", self.state.step if step is None else step, event=event, **fields)

    @property
    def scores(self) -> Scores:
        """Of `checkpoint.best`, by step."""
        return scores_by_step(self.evaluations, self.plan.recipe.checkpoint.best)

    def stops_improving(self) -> bool:
        """Whether `train.early_stop` ends the run: equal on all ranks, which have the same
        evaluations."""
        patience = self.plan.recipe.train.early_stop
        return (
            0 < patience <= without_improvement(self.evaluations, self.plan.recipe.checkpoint.best)
        )

    def finished(self, early: bool) -> None:
        """The event of the run's end; `early`: by `train.early_stop`, and why."""
        measure, scores, why = self.plan.recipe.checkpoint.best, self.scores, dict[str, Any]()
        if early:
            count, step = without_improvement(self.evaluations, measure), scores.best
            since = (
                "there was none"
                if step is None
                else f"the best was {scores[step]:.4f} at step {step:,}"
            )
            without = f"{count} evaluation{'s' * (count > 1)} without a better {measure}"
            why = {"early_stop": count, "reason": f"{without}; {since}"}
        self.event("finished", **why)
        text = f"finished early, after {why['reason']}" if early else "finished"
        self.console.event(f"{text}: {self.run.path}", self.state.step)

    @property
    def epoch(self) -> float:
        """Epochs of the training data done."""
        return self.state.samples / self.horizon.samples_per_epoch

    def stepped(self, batch: StepBatch, result: StepResult) -> None:
        """Report a completed step. Waits for the device only after the first step of a start."""
        state = self.state
        self.padded_tokens += result.padded_tokens
        self.console.tick(state.step)
        if not self.started_up:
            self.first_step()
        per_epoch, next_sample = (
            self.horizon.samples_per_epoch,
            batch.first_sample + self.horizon.samples_per_step,
        )
        if (
            self.logs_epochs
            and (epoch := next_sample // per_epoch) > batch.first_sample // per_epoch
        ):
            more = state.step < self.horizon.steps
            order = self.describe_order(epoch) if more else None
            self.event("epoch", ended=epoch, begins=epoch + 1 if more else None, order=order)
            begins = f"; epoch {epoch + 1:,} begins: {order}" if more else ""
            self.console.event(f"epoch {epoch:,} ends{begins}", state.step)

    def first_step(self) -> None:
        """Where the time from the start of the process went; with `train.compile` its first step
        counts as compiling."""
        self.started_up = True
        self.console.done()
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)
        self.goodput.enter("train")
        seconds = self.goodput.seconds()
        startup, evaluated = (
            seconds["startup"],
            seconds.get("eval", 0.0) + seconds.get("sample", 0.0),
        )
        whole = sum(seconds.values())
        first, step = (
            whole - startup - evaluated,
            "compiling and first step" if "compile" in seconds else "first step",
        )
        parts = {"start-up": startup, "evaluation": evaluated, step: first}
        self.event("first_step", startup_s=startup, first_step_s=round(first, 3))
        text = ", ".join(f"{name} {spent:.1f} s" for name, spent in parts.items() if spent)
        self.console.event(
            f"first step done {whole:.1f} s after the start: {text}", self.state.step
        )

    def enter_epoch(self) -> None:
        """At a start: which epoch begins, or continues, and in which order its samples come."""
        state, horizon = self.state, self.horizon
        if state.step == horizon.steps or not self.logs_epochs:
            return
        first = int(step_samples(state.step, horizon.samples_per_step, state.skipped)[0])
        epochs = math.ceil(
            (horizon.steps - 1) * horizon.samples_per_step / horizon.samples_per_epoch
        )
        epoch, of = first // horizon.samples_per_epoch, f" of {epochs:,}" if epochs > 1 else ""
        begins, order = "continues", self.describe_order(epoch)
        if state.step == 0 and not any(event["event"] == "epoch" for event in self.run.events):
            begins = "begins"
            self.event("epoch", begins=1, order=order)
        self.console.event(f"epoch {epoch + 1:,}{of} {begins}: {order}", state.step)

    def describe_order(self, epoch: int) -> str:
        """The order of an epoch of the training data, from 0, in words."""
        return describe_order(self.plan.recipe.data.order, self.plan.recipe.run.seed, epoch)

    def train(self, loss: float, lr: float, grad_norm: float, loss_scale: float | None) -> None:
        """A `train` line: the step's own loss over all ranks, and speeds since the last line. Waits
        for the device."""
        state, times, world, flops = (
            self.state,
            self.timer.read(),
            self.ranks.world,
            self.facts.flops_per_token,
        )
        now = (state.step, state.samples, state.tokens, self.padded_tokens)
        steps, *counts = (after - before for before, after in zip(self.logged, now, strict=True))
        seconds = max(times["step_ms"], 1e-6) / 1e3
        samples_per_s, tokens_per_s, padded_per_s = (count / steps / seconds for count in counts)
        self.logged = now
        checked = state.step == 1 and self.plan.recipe.train.startup_checks
        if checked and (text := check_first_loss(loss, self.facts.rows, self.facts.fresh)):
            self.console.warning(text)
            self.event("warning", reason=text)
        line = self.ledger.write(
            "train",
            state.step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens=state.tokens,
            samples=state.samples,
            label_tokens=state.label_tokens if state.label_tokens != state.tokens else None,
            epoch=self.epoch,
            **times,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_device=tokens_per_s / world,
            padded_tokens_per_s=padded_per_s if padded_per_s != tokens_per_s else None,
            samples_per_s=samples_per_s,
            samples_per_s_per_device=samples_per_s / world,
            steps_per_s=1 / seconds,
            mfu=mfu(tokens_per_s, flops, self.facts.peak_flops, world) if flops else None,
            loss_scale=loss_scale,
        )
        cuda = self.ranks.device.type == "cuda"
        memory = (
            torch.cuda.memory_allocated(self.ranks.device)
            if cuda
            else psutil.Process().memory_info().rss
        )
        self.console.step(line | {"gpu_mem_mb" if cuda else "rss_mb": memory / 1e6})

    @contextlib.contextmanager
    def outside(self, phase: str) -> Iterator[None]:
        """Count the time inside as `phase`, outside of steps."""
        with self.timer.phase("outside"), self.goodput.phase(phase):
            yield

    def beat(self) -> None:
        """Touch the heartbeat file where it is time; costs a clock reading otherwise."""
        now = time.monotonic()
        if self.ranks.main and now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_SECONDS
            with contextlib.suppress(OSError):
                self.run.heartbeat_path.touch()

    def poll(self) -> None:
        """Show what happened beside the steps: messages of trackers, a ledger or sampler that
        cannot write."""
        self.beat()
        self.show(self.trackers.poll())
        if self.contention and (text := self.contention.poll()):
            self.console.warning(text)
        for source in (self.ledger, self.sampler):
            if source.warning:
                self.console.warning(source.warning, own=True)
                source.warning = None

    def show(self, notes: list[Note]) -> None:
        """Show messages of the trackers."""
        for note in notes:
            (self.console.warning if note.warning else self.console.event)(note.text)

    def summary(self) -> None:
        """The run's last line on rank 0, computed from the effective ledger, so that a resume
        inflates nothing."""
        if not self.ranks.main:
            return
        state, run, measure = self.state, self.run, self.plan.recipe.checkpoint.best
        self.event("measured")  # a last stamp of the wall time
        raw, lines = list(read_lines(run.metrics_path)), run.ledger()
        means, seconds, scores = averages(lines), wall_time(raw), scores_by_step(lines, measure)
        means |= {"train_loss_mean": state.loss_sum / state.losses} if state.losses else {}
        trained = [x["loss"] for x in lines if x["kind"] == "train"]
        evaluated = [
            x["loss"] for x in lines if x["kind"] == "eval" and x["suite"] == LOSS
        ]  # NaN, too
        top = scores.best
        self.ledger.write(
            "summary",
            state.step,
            steps=self.horizon.steps,
            tokens=state.tokens,
            samples=state.samples,
            label_tokens=state.label_tokens if state.label_tokens != state.tokens else None,
            epochs=self.epoch,
            steps_per_epoch=self.horizon.samples_per_epoch / self.horizon.samples_per_step,
            final_loss=(trained or [None])[-1],
            final_eval_loss=(evaluated or [None])[-1],
            best_eval_loss=min(scores_by_step(lines, LOSS).values(), default=None),
            best_measure=measure,
            best_step=top,
            best_score=None if top is None else scores[top],
            runtime_s=seconds["total"],
            samples_per_s_whole_run=state.samples / (seconds["total"] - seconds["startup"]),
            wall_time=seconds,
            device_hours=device_hours(raw),
            world=self.ranks.world,
            parameters=self.facts.sizes.total,
            trained=self.facts.sizes.trained,
            updates_skipped=state.updates_skipped,
            attempts=self.ledger.attempt + 1,
            **means,
            **summarise_devices(run),
        )
