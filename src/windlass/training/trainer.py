"""The loop of a training: forward, backward, clip, update, log; save, evaluate and stop when it is time.

- Everything random is a pure function of `(seed, step, micro-batch)`: a resume needs counters and no generator states.
- The loss is a sum over the step's unmasked labels on all ranks, divided once by their global number: world size,
  accumulation and padding change nothing but rounding.
- What one rank knows (a stop signal, failed saves), all act on after the same step: the flags travel over the gloo
  group while the step computes (`max_async`). After an exception no collective is called: other ranks may be gone.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from windlass import processes
from windlass.checkpoint.retention import BEST, EMERGENCY, FINAL, PERIODIC
from windlass.checkpoint.save import SaveOutcome, Saver
from windlass.checkpoint.state_dict import State, gather_state
from windlass.data.chat import stop_tokens
from windlass.data.loader import Loader, StepBatch
from windlass.data.prepare import Data
from windlass.errors import RunFailed, Stopped, UserError, first_line
from windlass.estimate.milestones import measures_all
from windlass.evaluation.generate import Sampling, generate, prompt_ids, text_after
from windlass.evaluation.suites import Suites, write_predictions
from windlass.optim.build import set_lr
from windlass.optim.schedule import lr_multiplier
from windlass.parallel import collectives
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import autocast, sync_gradients, unwrap
from windlass.recipe import BatchPlan, Horizon, Recipe
from windlass.recipe.settings import LOSS_SUITE
from windlass.training import memory
from windlass.training.callbacks import Callbacks, StepResult
from windlass.training.checks import startup_checks
from windlass.training.nonfinite import BadSteps
from windlass.training.record import ModelFacts, Recorder
from windlass.training.rewind import Rewinder
from windlass.training.start import decide_on_rank_0
from windlass.training.state import LossScaler, TrainState, step_seed
from windlass.training.stop import StopSignals

DATA_WAIT_SECONDS = 0.5  # how long the data may be late before the loop looks at signals
FAILING_SAVE_SECONDS = 5.0  # how long a run that fails waits for a checkpoint that is being written
TRACKER_RESERVE_SECONDS = (
    2.0  # left of the grace after a signal when the trackers must have finished
)


@dataclass(kw_only=True)
class Trainer:
    """A training on one rank. Each method is called by every rank at the same step."""

    recipe: Recipe
    stop: StopSignals
    ranks: Ranks
    data: Data
    batch: BatchPlan
    horizon: Horizon
    model: nn.Module  # parallelized; call it for the loss
    facts: ModelFacts
    optimizer: Optimizer
    parameters: list[nn.Parameter]  # those that are trained
    scaler: LossScaler | None  # with fp16
    state: TrainState
    bad_steps: BadSteps
    saver: Saver
    meta: dict[str, Any]  # of every checkpoint: hashes of recipe and data, optimizer, precision
    rewinder: Rewinder
    suites: Suites  # of evaluation
    recorder: Recorder
    callbacks: Callbacks
    stop_at: int
    ends_early: bool = False  # by `train.early_stop`: no step is to follow

    def run(self) -> None:
        """Train to the last step and write the summary; raises Stopped where a signal ends it before."""
        try:
            self.begin()
            if 0 < self.stop_at <= self.state.step < self.horizon.steps:
                self.stop_run()
            elif self.loop_within_memory():
                self.finish()
        except BaseException as error:
            with contextlib.suppress(Exception):  # no collective in here
                if isinstance(
                    error, RunFailed
                ):  # decided by this rank itself: what is being written is good
                    self.wait_for_saves(FAILING_SAVE_SECONDS)
                if not isinstance(error, Stopped | UserError):
                    self.recorder.event(
                        "failed", reason=first_line(error), phase=self.ranks.status.phase
                    )
            raise

    def begin(self) -> None:
        """Check the model; evaluate and sample where that is due at this step and a stop or kill has left it undone."""
        recorder, step = self.recorder, self.state.step
        self.stop.step = lambda: self.state.step
        run = recorder.run  # its effective ledger has no lines of steps that are done again
        lines = decide_on_rank_0(
            self.ranks, "measured", lambda: run.lines("eval") + run.lines("sample")
        )
        recorder.evaluations = [line for line in lines if line["kind"] == "eval"]
        done = {line["kind"] for line in lines if line["step"] == step}
        if self.recipe.train.startup_checks:
            startup_checks(self.model, self.facts.ties, self.facts.precision, self.ranks)
        self.ends_early = recorder.stops_improving()
        if self.evaluation_due() and (self.ends_early or "eval" not in done):
            self.evaluate()
        if self.sample_due() and "sample" not in done:
            self.sample()
        recorder.enter_epoch()
        size = f"{self.batch.accumulation} x {self.batch.micro_batch} x {self.batch.context:,} tokens on each rank"
        recorder.console.begin(
            f"{'compiling, and ' * self.recipe.train.compile}the first step: {size}"
        )
        recorder.goodput.enter("compile" if self.recipe.train.compile else "train")
        recorder.restart_counts()

    def loop_within_memory(self) -> bool:
        """The loop; again with smaller micro-batches where memory runs out in its first step and we chose their size."""
        while True:
            try:
                return self.loop()
            except torch.OutOfMemoryError:
                self.batch = memory.smaller_micro_batch(self.batch, self.recorder)
            memory.prepare_retry(self.batch, self.optimizer, self.recorder, self.suites)

    def loop(self) -> bool:
        """Step, log, save, evaluate; whether that came to its end, and was not stopped as asked."""
        state, horizon, recipe, ranks, recorder = (
            self.state,
            self.horizon,
            self.recipe,
            self.ranks,
            self.recorder,
        )
        first_step, loader = state.step + 1, self.open_loader()
        try:
            while state.step < horizon.steps and not self.ends_early:
                recorder.log(self.callbacks.logged)
                batch = self.next_batch(loader)
                self.stop.training = True  # from here on a signal saves before it ends the process
                own = [self.stop.requested, self.saver.failures, bool(self.callbacks.asked)]
                flags = collectives.max_async(own, ranks)
                lr_factor = lr_multiplier(recipe.optim.schedule, horizon, state.step)
                result = self.step(batch, lr_factor)
                stop_requested, failed_saves, asked = flags.wait()
                recorder.stepped(batch, result)
                if (
                    state.step == first_step
                ):  # it compiled and filled caches; a collective of a later step is quicker
                    ranks.set_timeout(recipe.parallel.timeout_seconds)
                    self.saver.reserve(self.tensors())

                last = state.step == horizon.steps
                log_due = last or state.step == 1 or state.step % recipe.telemetry.every == 0
                often = recipe.checkpoint.every, recipe.checkpoint.keep_every
                save_due = any(horizon.due(every, state.step) for every in often)
                evaluation_due = self.evaluation_due()
                stopping = bool(stop_requested) or (
                    not last and (bool(asked) or state.step == self.stop_at)
                )
                # What is logged, saved or measured must be finite; on a CPU every step is looked at.
                look = (
                    not self.bad_steps.deferred or log_due or save_due or evaluation_due or stopping
                )
                if rewind_reason := self.bad_steps.decide(result.grad_norm, result.spike, look):
                    loader.close(None)
                    self.wait_for_saves()
                    self.rewinder.rewind(
                        rewind_reason, batch.first_sample + self.batch.global_batch
                    )
                    loader = self.open_loader()
                    continue

                if log_due or self.callbacks.on_step is not None:
                    collectives.sum_over_ranks(result.loss, ranks)  # in place
                self.callbacks.stepped(state.step, self.model, result, ranks)
                if log_due:  # waits for the device
                    scale = float(self.scaler.scale) if self.scaler is not None else None
                    recorder.train(
                        float(result.loss),
                        recipe.optim.lr * lr_factor,
                        float(result.grad_norm),
                        scale,
                    )
                if save_due and self.saver.newest != state.step:
                    self.save()
                complete = not evaluation_due or self.evaluate()
                if complete and self.sample_due():
                    complete = self.sample()
                self.report(self.saver.poll())
                recorder.poll()
                if failed_saves >= recipe.checkpoint.max_failed_saves and not last:
                    raise RunFailed(
                        f"{failed_saves} saves in a row failed (see above; checkpoint.max_failed_saves)"
                    )
                # A signal may cut an evaluation or a sample short: the next start makes it up, at this very step.
                if stopping or not complete:
                    return self.stop_run()
        finally:
            loader.close()
        return True

    def step(self, batch: StepBatch, lr_factor: float) -> StepResult:
        """One optimizer step on this rank's micro-batches: forward, backward, clip, update."""
        ranks, timer, precision = self.ranks, self.recorder.timer, self.facts.precision
        scale = self.scaler.scale if self.scaler is not None else None
        positions = sum(micro.batch.tokens.numel() for micro in batch.micro)
        # The counts travel over the ranks during the first forward pass.
        counts = collectives.sum_async([batch.valid_tokens, batch.real_tokens, positions], ranks)
        loss = torch.zeros(
            (), dtype=torch.float64 if precision == "fp64" else torch.float32, device=ranks.device
        )

        for micro in batch.micro:
            if self.facts.dropout:
                torch.manual_seed(step_seed(self.recipe.run.seed, batch.step, micro.k))
            with sync_gradients(self.model, ranks.strategy, micro is batch.micro[-1]):
                ranks.mark(batch.step, "forward")
                with timer.phase("forward"), autocast(self.recipe, ranks.device):
                    loss_sum = self.model(micro.batch.tokens, micro.batch.labels)  # [B, T]
                share = loss_sum / max(1, counts.wait()[0])
                ranks.mark(batch.step, "backward")
                with timer.phase("backward"):
                    (share if scale is None else share * scale).backward()
            loss += share.detach()

        ranks.mark(batch.step, "optimizer")
        with timer.phase("optimizer"):
            grad_norm = collectives.global_grad_norm(self.parameters, ranks)
            grad_norm = grad_norm if scale is None else grad_norm / scale
            bad, spike = self.bad_steps.observe(loss, grad_norm)
            if self.bad_steps.deferred:
                self.optimizer.found_inf = bad  # type: ignore[attr-defined] # where it is 1, the device does not update
            if spike is None and (self.bad_steps.deferred or not bool(bad)):
                # One pass over the gradients clips them and divides out the loss scale.
                limit = self.recipe.train.grad_clip or math.inf
                multiplier = torch.clamp(limit / (grad_norm + 1e-6), max=1.0) / (
                    1.0 if scale is None else scale
                )
                if (
                    ranks.device.type != "cpu" or float(multiplier) != 1.0
                ):  # on CUDA the host does not wait to see
                    collectives.scale_gradients(self.parameters, multiplier)
                set_lr(self.optimizer, lr_factor)
                self.optimizer.step()
            if self.scaler is not None:
                self.scaler.update(bad)
            self.optimizer.zero_grad(set_to_none=True)
        labels, tokens, padded = map(int, counts.wait())
        ranks.mark(batch.step, "step")  # what follows an update: counting, logging
        return StepResult(loss, grad_norm.detach(), tokens, labels, padded, spike)

    def open_loader(self) -> Loader:
        """The batches from the present step on, read ahead in the background."""
        data = self.recipe.data
        return Loader(
            self.data.train,
            self.batch,
            self.ranks.mesh.data_rank,
            seed=self.recipe.run.seed,
            kind=data.order,
            device=self.ranks.device,
            prefetch=data.prefetch,
            first_step=self.state.step,
            skipped=tuple(self.state.skipped),
            length_buckets=data.length_buckets and data.format != "text",
        )

    def next_batch(self, loader: Loader) -> StepBatch:
        """The next batch. While it is late, a process of its own may stop; ranks that wait for each other cannot."""
        while True:
            with self.recorder.timer.phase("data"):
                batch = loader.poll(DATA_WAIT_SECONDS)
            if batch is not None:
                return batch
            step = self.state.step
            if self.ranks.status.phase != "data":
                self.ranks.mark(step + 1, "data")
            if self.poll_stop() and self.ranks.world == 1:
                self.stop_run()
            if self.stop.seconds_since() > self.recipe.checkpoint.grace_seconds:
                self.wait_for_saves(FAILING_SAVE_SECONDS)  # what is being written is not lost
                lost = f"{step - self.saver.committed} steps are lost (checkpoint.grace_seconds)"
                late = f"rank {self.ranks.rank} has no data for step {step + 1}"
                raise RunFailed(f"stopped by {self.stop.name}: {late}; {lost}")

    def poll_stop(self) -> bool:
        """Whether this rank was asked to stop; asked between the passes of an evaluation, and while data are late."""
        self.recorder.beat()
        if (status := self.ranks.status).phase != "data":
            self.ranks.mark(status.step, status.phase)  # it makes progress
        return self.stop.requested

    def evaluation_due(self) -> bool:
        """Whether the suites are measured at this step: before the first and after the last, and by `eval.every`."""
        step, every = self.state.step, self.recipe.eval.every
        ends = step in (0, self.horizon.steps)
        return (
            bool(self.suites.names)
            and every not in (0, 0.0)
            and (ends or self.horizon.due(every, step))
        )

    def evaluate(self, suites: Sequence[str] = ()) -> bool:
        """Measure the suites (by default all) and save the best model so far; False where a stop cut it short: nothing is written."""
        step, recorder, settings, measured = (
            self.state.step,
            self.recorder,
            self.recipe.checkpoint,
            [],
        )
        with recorder.outside("eval"):
            self.ranks.mark(step, "evaluation")
            last = step == self.horizon.steps or self.ends_early
            whole = last and measures_all(self.recipe, self.horizon, len(self.data.val or ()))
            for suite in suites or self.suites.names:
                progress = partial(recorder.console.progress, f"evaluating {suite}")
                result = self.suites.measure(suite, self.model, self.poll_stop, whole, progress)
                if result is None:
                    return False
                numbers, predictions = result
                measured.append({"suite": suite, **numbers})
                if predictions and self.ranks.main:
                    try:
                        write_predictions(recorder.run.path / "eval", step, predictions)
                    except OSError as error:  # the scores are in the ledger
                        recorder.console.warning(
                            f"{suite}: the predictions were not written: {error}"
                        )
        where = {"epoch": recorder.epoch, "samples_trained": self.state.samples}
        for fields in measured:
            line = recorder.ledger.write("eval", step, **fields, **where)
            recorder.console.eval(line)
            recorder.evaluations.append(line)
        if (
            step
            and settings.keep_best
            and self.saver.newest != step
            and recorder.scores.best == step
        ):
            self.save(BEST)
        self.callbacks.evaluated(step, self.model, measured, self.ranks)
        if last or not recorder.stops_improving():
            return True
        self.ends_early = (
            True  # so this was the last evaluation: the loss once more, with all validation data
        )
        samples = len(self.data.val or ())
        bounded = 0 < self.recipe.eval.batches * self.batch.global_batch < samples
        more = bounded and measures_all(self.recipe, self.horizon, samples)
        return not more or LOSS_SUITE not in self.recipe.eval.suites or self.evaluate([LOSS_SUITE])

    def sample_due(self) -> bool:
        """Whether a text is generated at this step; a user's own model or tokenizer may not be able to."""
        able = hasattr(unwrap(self.model), "new_cache") and hasattr(self.data.tokenizer, "encode")
        return able and self.horizon.due(self.recipe.eval.sample_every, self.state.step)

    def sample(self) -> bool:
        """Texts from the recipe's prompt, equal on every rank and world size; False as in `evaluate`."""
        settings, tokenizer, recorder, step = (
            self.recipe.eval,
            self.data.tokenizer,
            self.recorder,
            self.state.step,
        )
        prompt = prompt_ids(self.model, tokenizer, settings.prompt)
        sampling = Sampling(
            max_tokens=settings.sample_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            seed=self.recipe.run.seed,
            stop=stop_tokens(tokenizer, self.data.template),
        )
        with recorder.outside("sample"):
            self.ranks.mark(step, "sample")
            generated = generate(
                self.model,
                [prompt] * settings.sample_count,
                sampling,
                self.ranks,
                vocab=tokenizer.vocab,
                autocast=partial(autocast, self.recipe, self.ranks.device),
                poll=self.poll_stop,
            )
        for index, ids in enumerate(generated or []):
            text = settings.prompt + text_after(tokenizer, prompt if settings.prompt else [], ids)
            recorder.ledger.write("sample", step, index=index, prompt=settings.prompt, text=text)
            recorder.console.sample(text, step)
        return generated is not None

    def tensors(self) -> State:
        """This rank's share of model and optimizer."""
        return gather_state(self.model, self.optimizer, self.ranks.rank, self.ranks.world)

    def save(self, reason: str = PERIODIC) -> None:
        """Copy the state to the host, for a checkpoint that is written in the background."""
        state, recorder = self.state, self.recorder
        reason = FINAL if state.step == self.horizon.steps else reason  # is never deleted
        with recorder.outside("save"):
            self.ranks.mark(state.step, "save")
            recorder.losses.read()
            if self.scaler is not None:
                self.scaler.save(state)
            else:
                state.loss_scale, state.scale_good_steps = 0.0, 0
            meta = self.meta | {"reason": reason, "micro_batch": self.batch.micro_batch}
            counters, scores = state.to_json(), recorder.scores
            self.saver.save(state.step, self.tensors(), counters, meta, scores, recorder.beat)

    def wait_for_saves(self, timeout: float | None = None) -> bool:
        """Wait, at most `timeout` seconds, until nothing is being written; whether every save was committed."""
        with self.recorder.outside("save"):
            committed = self.report(self.saver.wait(timeout, self.recorder.beat))
        return committed and not self.saver.busy

    def commit(self, reason: str) -> bool:
        """Have the present step committed: wait for a save in progress, and repeat one that failed."""
        step = self.state.step
        if self.saver.newest == step:
            self.wait_for_saves()
        if any(self.ranks.all_gather_object("unsaved", self.saver.newest != step)):
            self.save(reason)
        return self.wait_for_saves() and self.saver.newest == step

    def report(self, outcomes: list[SaveOutcome]) -> bool:
        """Report saves that have ended; whether all of them were committed."""
        for outcome in outcomes:
            self.recorder.saved(outcome)
            if not outcome.error and self.ranks.main:
                self.callbacks.saved(outcome.step, self.model, outcome.path)
        return not any(outcome.error for outcome in outcomes)

    def stop_run(self) -> bool:
        """Save where the grace allows it; raise Stopped after a signal, else return False. All ranks come here at the same step."""
        step, recorder, grace = (
            self.state.step,
            self.recorder,
            self.recipe.checkpoint.grace_seconds,
        )
        own = [self.stop.requested, self.stop.seconds_since(), self.callbacks.asked]
        signals = self.ranks.all_gather_object("signals", own)
        signalled, since = (
            any(requested for requested, *_ in signals),
            max(seconds for _, seconds, _ in signals),
        )
        asked = next(
            (why for *_, why in signals if why), "request"
        )  # of a callback, or of `stop_at`
        reason = self.stop.name if signalled else asked
        left, end = grace - since, time.monotonic() + grace - since
        needed = self.ranks.broadcast_object("needed", self.saver.expected_seconds(step))
        if signalled and needed > left:
            self.wait_for_saves(max(0.0, left))  # what is being written may still be committed
            recorder.event("preempted", reason=reason, saved=False)
            why = f"a save takes about {needed:.0f} s and only {left:.0f} s are left (checkpoint.grace_seconds)"
            lost = f"{step - self.saver.committed} steps are lost (checkpoint.every)"
            raise RunFailed(f"stopped by {reason} at step {step}: {why}; {lost}")
        if not self.commit(EMERGENCY):
            raise RunFailed(
                f"stopped by {reason} at step {step}, and its checkpoint could not be saved"
            )
        recorder.log(self.callbacks.logged)
        recorder.event("preempted" if signalled else "stopped", reason=reason, saved=True)
        recorder.ledger.sync()
        flush = self.recipe.telemetry.flush_seconds
        flush = (
            min(flush, max(0.0, end - time.monotonic() - TRACKER_RESERVE_SECONDS))
            if signalled
            else flush
        )
        recorder.show(recorder.trackers.finish(flush))
        text = f"stopped by {reason} after step {step}, all saved; start it again to continue"
        if signalled:
            self.ranks.mark(step, processes.STOPPED)  # a launcher reads it
            raise Stopped(text)
        recorder.console.event(text)
        return False

    def finish(self) -> None:
        """The last checkpoint, the summary, the end of the trackers."""
        step, recorder = self.state.step, self.recorder
        self.ranks.mark(step, "end")
        if not self.commit(FINAL):
            raise RunFailed(
                "the last checkpoint could not be saved (see above); train again to try once more"
            )
        recorder.log(self.callbacks.logged)
        recorder.sampler.stop()
        self.ranks.all_gather_object("summary", step)  # every rank's samples are written
        recorder.summary()
        recorder.finished(self.ends_early)
        recorder.show(recorder.trackers.finish(self.recipe.telemetry.flush_seconds))
