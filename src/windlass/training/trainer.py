"""The loop of a training on one rank: forward, backward, clip, update, log.

The loss is a sum over the step's unmasked labels on all ranks, divided once by their global number.
No collective is called after an exception, because other ranks may be gone."""

from __future__ import annotations

import contextlib
import gc
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from windlass.checkpoint.choose import BEST, FINAL
from windlass.data.batch import Samples
from windlass.data.loader import Loader, MicroBatch, StepBatch
from windlass.data.mixture import Mixture
from windlass.errors import RunFailed, Stopped, UserError, first_line
from windlass.model.attention import documents_of
from windlass.model.gpt import seed_generators
from windlass.model.modes import scalar_loss
from windlass.optim.average import Average
from windlass.optim.schedule import lr_multiplier, set_lr
from windlass.parallel import collectives
from windlass.parallel.parallelize import autocast, check_reduced, owned_parameters, sync_gradients
from windlass.parallel.pipeline import StagedGPT
from windlass.processes import keep_freed_memory
from windlass.recipe import BatchPlan
from windlass.seeds import seed_of
from windlass.training.bad_steps import (
    BadSteps,
    check_is_deferred,
    out_of_memory,
    ran_out_of_memory,
)
from windlass.training.callbacks import Callbacks
from windlass.training.record import Recorder
from windlass.training.saver import Saver
from windlass.training.state import LossScaler, StepResult, set_divisor, share_buffers
from windlass.training.stop import StopSignals

DATA_WAIT_SECONDS = 0.5  # the loop looks at signals this often while data is late
# If another rank may be gone, wait this long for a save, or twice the last save's time if longer.
FAILING_SAVE_SECONDS = 5.0
MAX_FAILED_SAVES = 3  # in a row; the run would have nothing to resume from


@dataclass(kw_only=True)
class Trainer:
    """A training on one rank, set up in `rank.py`. Every rank calls a method at the same step."""

    samples: Samples
    mixture: Mixture | None  # of the samples; None: they are from one source
    batch: BatchPlan
    compiled: bool

    # The state: all of it is in a checkpoint.
    model: nn.Module  # divided among the ranks, and wrapped
    optimizer: Optimizer
    average: Average
    scaler: LossScaler

    callbacks: Callbacks
    recorder: Recorder
    saver: Saver
    evaluator: Any  # `Evaluator`, whose suites are not part of the loop
    stop: StopSignals
    stop_at: int = 0  # the step after which to stop; 0: the last

    def __post_init__(self) -> None:
        recorder = self.recorder
        self.recipe, self.ranks = recorder.recipe, recorder.ranks
        self.state, self.horizon = recorder.state, recorder.horizon
        device, offload = self.ranks.device, self.recipe.parallel.offload
        deferred = check_is_deferred(device, self.optimizer, offload)
        self.bad_steps = BadSteps(self.recorder, self.recipe.train, self.scaler, deferred)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.owned_parameters = owned_parameters(self.model)

    def run(self) -> None:
        """Train to the last step and write the summary; raises Stopped if a signal ends it."""
        try:
            self.begin()
            if 0 < self.stop_at <= self.state.step < self.horizon.steps:
                self.saver.stop_run(self.stop)
            elif self.loop():
                self.finish()
        except BaseException as raised:
            error = raised
            if ran_out_of_memory(raised):  # in a step or an evaluation
                error = out_of_memory(self.recorder, self.batch)
            with contextlib.suppress(Exception):  # no collective in here; `on_save` may fail, too
                if isinstance(error, Exception):  # a save in progress is good
                    others_live = self.ranks.world == 1 or isinstance(error, UserError)
                    limit = max(FAILING_SAVE_SECONDS, 2 * (self.saver.last_seconds or 0.0))
                    self.saver.finish(None if others_live else limit)
            if not isinstance(error, Stopped):
                phase = self.ranks.status.phase
                self.recorder.emit("failed", reason=first_line(error), phase=phase)
            if error is not raised:
                raise error from None
            raise

    def begin(self) -> None:
        """Do the evaluation and sample that an interruption skipped at this step."""
        recorder, batch = self.recorder, self.batch
        done = recorder.read_measured()
        if self.evaluator.due and "eval" not in done:
            self.evaluate()
        if self.evaluator.sample_due and "sample" not in done:
            self.evaluator.sample()
        size = f"{batch.accumulation} x {batch.micro_batch} x {batch.context:,} tokens on each rank"
        compiling = "compiling, and " if self.compiled else ""
        recorder.console.begin(f"{compiling}the first step: {size}")
        recorder.goodput.enter("compile" if self.compiled else "train")
        recorder.timer.read()  # the first `train` line has times from here on

    def loop(self) -> bool:  # noqa: PLR0915 (the algorithm in one piece)
        """Step, log, save, evaluate; False if a stop was asked for before the end."""
        state, horizon, recipe = self.state, self.horizon, self.recipe
        ranks, recorder, evaluator = self.ranks, self.recorder, self.evaluator
        first_step = state.step + 1
        loader = Loader(
            self.samples,
            self.batch,
            ranks.mesh.data_rank,
            seed=recipe.run.seed,
            kind=recipe.data.order,
            device=ranks.device,
            first_step=state.step,
            length_buckets=recipe.data.length_buckets and recipe.data.ragged_,
            mixture=self.mixture,
        )
        if not gc.isenabled():  # `windlass train` has turned it off
            gc.freeze()  # imported modules stay, so a collection need not look at them
            gc.enable()
        try:
            while state.step < horizon.steps:
                recorder.write_logged()
                batch = self.next_batch(loader)
                self.stop.hold()  # from here on a signal saves before it ends the process
                # All ranks act on these after the same step; gloo exchanges them meanwhile.
                callback_stops = bool(self.callbacks.stop_reason)
                flags = collectives.max_async(
                    [self.stop.requested, self.saver.failures, callback_stops], ranks.mesh
                )
                multiplier = lr_multiplier(recipe.optim.schedule, horizon, state.step)
                recorder.profile.begin(state.step + 1)
                result = self.step(batch, multiplier)
                stop_requested, failed_saves, stop_asked = flags.wait()
                state.step += 1
                state.samples += horizon.samples_per_step
                state.tokens += result.tokens
                state.label_tokens += result.label_tokens
                recorder.stepped(result)
                if state.step == first_step:  # later collectives need not wait for compilation
                    ranks.set_timeout(recipe.parallel.timeout_seconds)
                    if ranks.device.type == "cpu":
                        keep_freed_memory(every_size=True)

                last = state.step == horizon.steps
                log_due = last or state.step == 1 or state.step % recipe.telemetry.every == 0
                periods = recipe.checkpoint.every, recipe.checkpoint.keep_every
                save_due = any(horizon.due(every, state.step) for every in periods)
                evaluation_due = evaluator.due
                asked = bool(stop_asked) or state.step == self.stop_at
                stopping = bool(stop_requested) or (asked and not last)
                measured = evaluation_due or evaluator.sample_due
                # Whatever is logged, saved or measured must be finite; a CPU checks every step.
                due = log_due or save_due or measured or stopping
                share_buffers(self.model, ranks.mesh)
                if due or not self.bad_steps.deferred:
                    self.bad_steps.decide()
                lr = recipe.optim.lr * multiplier
                self.callbacks.stepped(lr, batch, result)
                if log_due:
                    recorder.train(result, lr, self.scaler.scale, self.mixture)
                if save_due and self.saver.newest != state.step:
                    self.saver.save()
                complete = not evaluation_due or self.evaluate()
                if complete and evaluator.sample_due:
                    complete = evaluator.sample()
                self.saver.report(self.saver.poll())
                recorder.poll()
                if failed_saves >= MAX_FAILED_SAVES and not last:
                    raise RunFailed(f"{failed_saves} saves in a row failed (see above)")
                # If a signal interrupted the evaluation, the next start repeats it at this step.
                if stopping or not complete:
                    return self.saver.stop_run(self.stop)
        finally:
            loader.close()
        return True

    def step(self, batch: StepBatch, lr_multiplier: float) -> StepResult:
        """One optimizer step on this rank's micro-batches: forward, backward, clip, update."""
        ranks, timer, seed = self.ranks, self.recorder.timer, self.recipe.run.seed
        scale = self.scaler.scale
        positions = sum(micro.batch.tokens.numel() for micro in batch.micro)
        # The counts travel over the ranks during the first forward pass. Ranks of `cp` share rows.
        rows = [batch.valid_tokens, batch.unpadded_tokens, positions]
        counts = collectives.sum_async([ranks.mesh.counts_rows * n for n in rows], ranks.mesh)
        dtype = torch.float64 if self.recipe.train.precision == "fp64" else torch.float32
        own_loss = torch.zeros((), dtype=dtype, device=ranks.device)
        staged = isinstance(self.model, StagedGPT)
        has_loss = not staged or self.model.pipeline.is_last

        def forward(micro: MicroBatch, **stage: Any) -> torch.Tensor:
            # Equal on any number of ranks. Nobody knows whether a user's module draws numbers.
            name = f"windlass/dropout/{seed}/{batch.step}/{micro.index}"
            seed_generators(ranks.device, seed_of(name))
            ranks.mark(batch.step, "forward")
            stage |= documents_of(micro.batch, self.model)
            with timer.phase("forward"):
                with autocast(self.recipe, ranks.device):
                    result = self.model(micro.batch.tokens, micro.batch.labels, **stage)  # [B, T]
                if not has_loss:  # hidden states for the next stage
                    return result  # type: ignore[no-any-return]
                result = scalar_loss(result) / max(1, counts.wait()[0])
            own_loss.add_(result.detach())
            return result if scale is None else result * scale

        def backward(result: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
            ranks.mark(batch.step, "backward")
            with timer.phase("backward"):
                result.backward(gradient)

        sync = partial(sync_gradients, self.model, ranks.strategy)
        if isinstance(self.model, StagedGPT):
            self.model.pipeline.train(self.model, batch.micro, forward, backward, sync)
        else:
            for micro in batch.micro:
                with sync(micro is batch.micro[-1]):
                    backward(forward(micro))

        ranks.mark(batch.step, "optimizer")
        with timer.phase("optimizer"):
            loss, grad_norm = self.update(batch.step, own_loss, lr_multiplier)
        labels, tokens, padded = map(int, counts.wait())
        ranks.mark(batch.step, "step")
        return StepResult(loss, grad_norm, tokens, labels, padded)

    def update(
        self, step: int, own_loss: torch.Tensor, lr_multiplier: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip and update, unless the step is bad; returns the loss over all ranks, of which this
        one has a part, and the gradient norm."""
        check_reduced(self.model)
        ranks, clip = self.ranks, self.recipe.train.grad_clip
        scale = self.scaler.scale
        collectives.sum_over_tensor_ranks(self.parameters, ranks.mesh)
        grad_norm, loss = collectives.norm_and_loss(self.owned_parameters, own_loss, ranks.mesh)
        grad_norm = grad_norm if scale is None else grad_norm / scale
        bad = self.bad_steps.observe(own_loss, loss, grad_norm)
        if self.bad_steps.deferred:  # the device makes no update if it is 1
            self.optimizer.found_inf = bad  # type: ignore[attr-defined]
        self.saver.finish_staging()
        if self.bad_steps.deferred or not bool(bad):
            # The update itself divides the gradients, to clip them and by the loss scale.
            divisor = torch.clamp((grad_norm + 1e-6) / (clip or math.inf), min=1.0)
            divisor = divisor if scale is None else divisor * scale
            # On CUDA the host does not wait for the value.
            needed = ranks.device.type != "cpu" or float(divisor) != 1.0
            if not set_divisor(self.optimizer, divisor if needed else None):
                collectives.scale_gradients(self.parameters, 1 / divisor)
            set_lr(self.optimizer, lr_multiplier, step)
            self.optimizer.step()
            self.average.update(bad)
        self.scaler.update(bad)
        self.optimizer.zero_grad(set_to_none=True)
        return loss, grad_norm

    def next_batch(self, loader: Loader) -> StepBatch:
        """The next batch. While it is late, a single rank may stop; several wait for each other."""
        while True:
            with self.recorder.timer.phase("data"):
                batch = loader.poll(DATA_WAIT_SECONDS)
            if batch is not None:
                return batch
            if self.ranks.status.phase != "data":  # the mark has the time since which it is late
                self.ranks.mark(self.state.step + 1, "data")
            self.recorder.beat()
            if self.stop.requested and self.ranks.world == 1:
                self.bad_steps.decide()
                self.saver.stop_run(self.stop)

    def evaluate(self) -> bool:
        """Measure the suites, and save the model if it is the best so far; False, with nothing
        written, if a stop interrupted it."""
        step, recorder = self.state.step, self.recorder
        self.saver.finish_staging()  # an evaluation of averaged weights exchanges them
        scores = self.evaluator.measure()
        if scores is None:
            return False
        unsaved = step and self.recipe.checkpoint.keep_best and self.saver.newest != step
        if unsaved and recorder.scores.best_step == step:
            self.saver.save(BEST)
            self.saver.finish_staging()  # a callback may change what it gets
        self.callbacks.evaluated(scores)
        return True

    def finish(self) -> None:
        """The last checkpoint, the summary, the end of the trackers."""
        step, recorder = self.state.step, self.recorder
        self.ranks.mark(step, "end")
        if not self.saver.commit(FINAL):
            raise RunFailed("the last checkpoint could not be saved (see above); train again")
        recorder.write_logged()
        recorder.sampler.stop()
        self.ranks.all_gather_object("summary", step)  # every rank's samples are written
        recorder.summary()
        recorder.emit("finished", f"finished: {recorder.run.path}")
        recorder.show(recorder.trackers.finish())
