"""What the loop does besides stepping: counting, logging, saving, evaluating, sampling, stopping, ending."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from windlass.checkpoint.retention import BEST, EMERGENCY, FINAL, LOSS, PERIODIC, best, better, scores_by_step
from windlass.data.loader import Loader
from windlass.errors import RunFailed, Stopped
from windlass.optim.schedule import factor
from windlass.parallel import collectives
from windlass.telemetry.timing import mfu
from windlass.telemetry.trackers import Note
from windlass.training.batches import Batches
from windlass.training.checks import replicas, startup_checks
from windlass.training.evaluations import evaluate_suites, generate_samples, scores
from windlass.training.ids import IdWatch
from windlass.training.policies import Judge
from windlass.training.profile import Profile
from windlass.training.saving import Saves
from windlass.training.session import Heartbeat, Session
from windlass.training.state import TrainState
from windlass.training.summary import write_summary

if TYPE_CHECKING:
    from windlass.data.loader import StepBatch
    from windlass.training.step import StepResult


SAVE_SECONDS = 5.0
"""How long a run that fails waits for what is being written."""


class Actions:
    """The loop's verbs. Each is called by every rank at the same step; rank 0 writes and speaks."""

    def __init__(self, session: Session):
        self.s = session
        self.state: TrainState = session.state
        self.recipe, self.horizon = session.recipe, session.horizon
        self.heartbeat = Heartbeat(session.run.heartbeat_path)
        self.saves = Saves(session, self.heartbeat, self.event)
        self.logged_samples = self.logged_tokens = self.padded_since_log = 0
        self.batch_end = 0
        self.result: StepResult | None = None
        self.last_loss: float | None = None
        self.scores: dict[int, float] = {}
        """Values of `checkpoint.best` by step, of the steps up to here (rank 0)."""
        self.rewinds: dict[int, int] = {}
        """How often the run went back, by the step it went back to."""
        self.judge = Judge(session, self.event)
        self.profile: Profile | None = None
        self.ids = IdWatch(session)

    # -- the beginning ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Say what is about to run; make what is due at this very step, if a kill or a stop left it undone."""
        s = self.s
        self.restore_best()
        s.console.header(s.header())
        for note in s.resume_notes:
            s.console.warning(note)
        name = "branched" if s.claim.branch_from else "resumed" if s.claim.resuming and self.state.step else "started"
        self.event(
            name, steps=self.horizon.steps, world=s.ranks.world, strategy=s.ranks.strategy, precision=s.precision,
            micro_batch=s.batch.micro_batch, accumulation=s.batch.accumulation, parameters=s.parameters,
            samples_per_epoch=self.horizon.samples_per_epoch, global_batch=s.batch.global_batch,
            device=s.device_name, branched_from=str(s.claim.branch_from.absolute()) if s.claim.branch_from else None,
            extended_from=s.claim.extends_from or None,
        )  # fmt: skip
        if self.state.step:
            s.console.event(f"resumed from {s.resumed_from}", self.state.step)
        self.logged_samples, self.logged_tokens = self.state.samples, self.state.tokens
        if self.recipe.train.startup_checks:
            startup_checks(s)
        self._stop_if_asked()
        due = self.due_evaluation() or (self.state.step == 0 and self._evaluates())
        if due and not s.agreed("evaluated", lambda: self._has_line("eval", self.state.step)):
            self.evaluate()
            self._stop_if_asked()
        if self.due_sample() and not s.agreed("sampled", lambda: self._has_line("sample", self.state.step)):
            self.sample()
            self._stop_if_asked()
        s.goodput.enter("train")
        s.timer.read()
        if s.options.profile and s.ranks.main:
            place = s.run.path / "profile" / f"trace-{s.attempt}.json"
            self.profile = Profile(s.options.profile, place, s.ranks.device.type == "cuda")

    def _stop_if_asked(self) -> None:
        """Before the first step: act on a signal that came since the start."""
        if any(self.s.ranks.all_gather_object("asked", self.s.signals.asked)):
            self.stop()

    def restore_best(self) -> None:
        """The scores in the ledger up to here, and the best of them: a save comes before its step's evaluation."""
        s, state, measure = self.s, self.state, self.recipe.checkpoint.best

        def found() -> tuple[float | None, float | None]:
            lines = [x for x in s.run.lines("eval") if x["step"] <= state.step]
            losses, self.scores = scores_by_step(lines, LOSS), scores_by_step(lines, measure)
            lowest, first = best(losses, LOSS), best(self.scores, measure)
            return None if lowest is None else losses[lowest], None if first is None else self.scores[first]

        state.best_loss, state.best_score = s.agreed("best", found)

    def _has_line(self, kind: str, step: int) -> bool:
        return any(x["step"] == step for x in self.s.run.lines(kind))

    def batches(self) -> Batches:
        """The batches from the present step on, read ahead in the background."""
        s, data = self.s, self.recipe.data
        loader = Loader(
            s.data.train, s.batch, s.ranks.rank, seed=self.recipe.run.seed, kind=data.order, device=s.ranks.device,
            prefetch=data.prefetch, first_step=self.state.step, skipped=tuple(self.state.skipped),
            length_buckets=data.length_buckets and data.format != "text",
        )  # fmt: skip
        return Batches(loader, s.timer, self._waiting)

    def _waiting(self) -> None:
        """The data are late. A process of its own may stop here; ranks that wait for each other in the step cannot."""
        s, grace = self.s, self.recipe.checkpoint.grace_seconds
        s.ranks.mark(self.state.step + 1, "data")
        self._stop_asked()
        if s.signals.asked and s.ranks.world == 1:
            self.stop()
        if s.signals.asked and s.signals.seconds_since() > grace:
            lost = self.state.step - max(self.saves.newest(), 0)
            raise RunFailed(
                f"stopped by {s.signals.name}: rank {s.ranks.rank} has waited for the data of step {self.state.step + 1} for longer "
                f"than checkpoint.grace_seconds; the last checkpoint stands and {lost} steps are lost"
            )

    # -- after each step ----------------------------------------------------------------------------------------------

    def count(self, batch: StepBatch, result: StepResult) -> None:
        """Add the step to the counters, and look at what it made of the gradients."""
        state = self.state
        state.step += 1
        state.samples += self.s.batch.global_batch
        state.tokens += result.valid_tokens
        self.padded_since_log += result.padded_tokens
        self.result, self.batch_end = result, batch.first_sample + self.s.batch.global_batch
        if state.step == 1 or state.step == self.saves.step + 1:
            self.s.ranks.set_timeout(self.s.recipe.parallel.timeout_seconds)
            self.ids.first_step_done()
        self.s.console.tick(state.step)
        if not self.s.step.deferred:
            self.judge.examine(result, self.batch_end)
        if self.s.step.spiked:
            self.judge.spiked(result, self.batch_end)
        if self.profile is not None and self.profile.step():
            self._stop_profile()

    def due_log(self) -> bool:
        """Whether the step is logged: every `telemetry.every` steps, the first and the last."""
        step = self.state.step
        return step % self.recipe.telemetry.every == 0 or step in (1, self.horizon.steps)

    def log(self, result: StepResult) -> None:
        """A `train` line: the step's own loss over all ranks; speeds since the last line. Waits for the device."""
        s, state = self.s, self.state
        if s.step.deferred:
            self.judge.examine(result, self.batch_end)
        loss = float(collectives.sum_over_ranks(result.loss, s.ranks))
        speed = s.timer.read()
        seconds = speed.get("step_ms", 0.0) / 1e3
        steps = max(1, (state.samples - self.logged_samples) // s.batch.global_batch)
        tokens = (state.tokens - self.logged_tokens) / steps
        padded, self.padded_since_log = self.padded_since_log / steps, 0
        self.logged_samples, self.logged_tokens = state.samples, state.tokens
        rate = factor(self.recipe.optim.schedule, self.horizon, state.step - 1)
        line = s.ledger.write(
            "train", state.step, loss=loss, lr=self.recipe.optim.lr * rate, grad_norm=float(result.grad_norm),
            tokens=state.tokens, samples=state.samples, epoch=state.samples / self.horizon.samples_per_epoch, **speed,
            **self._rates(tokens, padded, seconds), loss_scale=float(s.step.scale) if s.step.fp16 else None,
        )  # fmt: skip
        self.last_loss = loss
        s.console.step(line | {"mem_mb": _memory_mb(s.ranks.device)})

    def _rates(self, tokens: float, padded: float, seconds: float) -> dict[str, float | None]:
        """Speeds over all ranks and per device, from the tokens of a step (that count, and with padding) and its time."""
        if not seconds:
            return {}
        s, world = self.s, self.s.ranks.world
        flops = s.flops_per_token
        return {
            "tokens_per_s": tokens / seconds,
            "tokens_per_s_per_device": tokens / seconds / world,
            "padded_tokens_per_s": padded / seconds if padded != tokens else None,
            "samples_per_s": s.batch.global_batch / seconds,
            "samples_per_s_per_device": s.batch.global_batch / seconds / world,
            "steps_per_s": 1 / seconds,
            "mfu": mfu(tokens / seconds, flops, s.peak, world) if flops else None,
        }

    def look_around(self) -> None:
        """What happened beside the steps: committed or failed saves, words of the trackers, a sampler that gave up."""
        s = self.s
        if self.horizon.due(self.recipe.train.replica_check_every, self.state.step):
            different = replicas(s.model, s.ranks)
            if different:
                raise RunFailed(f"step {self.state.step}: {'; '.join(different)} (train.replica_check_every)")
        self.saves.report(s.saver.poll())
        if s.ranks.main:
            self.heartbeat.beat()
            if s.trackers is not None:
                self._show_notes(s.trackers.poll())
        for source in (s.ledger, s.sampler):
            if source is not None and source.warning:
                s.console.warning(source.warning)
                source.warning = None

    # -- saving -------------------------------------------------------------------------------------------------------

    def due_save(self) -> bool:
        """Whether the state is saved after this step."""
        return self.horizon.due(self.recipe.checkpoint.every, self.state.step)

    def save(self, reason: str = PERIODIC, loss: float | None = None) -> None:
        """Stage the state; it is written in the background. That of the last step is the run's end, whatever it is saved for."""
        if self.saves.step == self.state.step and reason == PERIODIC:
            return
        reason = FINAL if self.state.step == self.horizon.steps else reason
        if (
            self.s.step.deferred and self.result is not None
        ):  # counters must not run ahead of updates that were called off
            self.judge.examine(self.result, self.batch_end)
        self.saves.save(reason, loss, self.last_loss, self.scores)

    def _commit(self, reason: str) -> bool:
        """See to it that the present step is committed: what is being written is awaited, what failed is tried once more."""
        if self.saves.step == self.state.step:
            self.saves.wait()
        if any(self.s.ranks.all_gather_object("unsaved", self.saves.step != self.state.step)):
            self.save(reason)
        return self.saves.wait() and self.saves.step == self.state.step

    # -- evaluating ---------------------------------------------------------------------------------------------------

    def _evaluates(self) -> bool:
        return self.s.data.val is not None and self.recipe.eval.every not in (0, 0.0)

    def due_evaluation(self) -> bool:
        """Whether the validation loss is measured after this step."""
        last = self.state.step == self.horizon.steps
        return self._evaluates() and (last or self.horizon.due(self.recipe.eval.every, self.state.step))

    def evaluate(self) -> bool:
        """Measure the suites; the best value so far of `checkpoint.best` makes this step's checkpoint the best one.

        False where a stop signal cut it short, on all ranks: then nothing of it is written down.
        """
        s, state = self.s, self.state
        with s.timer.outside(), s.goodput.phase("eval"):
            s.ranks.mark(state.step, "evaluation")
            lines = evaluate_suites(s, poll=self._stop_asked)
        if lines is None:
            return False
        epoch = state.samples / self.horizon.samples_per_epoch
        for line in lines:
            s.console.eval(s.ledger.write("eval", state.step, **line, epoch=epoch, samples_trained=state.samples))
        measured, measure = scores(lines), self.recipe.checkpoint.best
        loss, value = measured.get(LOSS), measured.get(measure)
        if loss is not None and better(loss, state.best_loss, LOSS):
            state.best_loss = loss
        if value is not None:
            self.scores[state.step] = value
        if value is not None and better(value, state.best_score, measure):
            state.best_score = value
            if state.step and self.recipe.checkpoint.keep_best and self.saves.step != state.step:
                self.save(BEST, loss)
        return True

    def _stop_asked(self) -> bool:
        if self.s.ranks.main:
            self.heartbeat.beat()
        return self.s.signals.asked

    def due_sample(self) -> bool:
        """Whether a text is generated after this step."""
        return self.s.can_generate and self.horizon.due(self.recipe.eval.sample_every, self.state.step)

    def sample(self) -> bool:
        """Generate text from the recipe's prompt, into the ledger, a file and the terminal; False as in `evaluate`."""
        s = self.s
        with s.timer.outside(), s.goodput.phase("sample"):
            s.ranks.mark(self.state.step, "sample")
            texts = generate_samples(s, poll=self._stop_asked)
        for index, text in enumerate(texts or []):
            if s.ranks.main:
                s.ledger.write("sample", self.state.step, index=index, prompt=self.recipe.eval.prompt, text=text)
                with contextlib.suppress(OSError):
                    s.run.samples_dir.mkdir(exist_ok=True)
                    (s.run.samples_dir / f"step-{self.state.step:08d}-{index}.txt").write_text(text, encoding="utf-8")
            s.console.sample(text, self.state.step)
        return texts is not None

    # -- the end ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Save where the grace allows it, and raise Stopped: all ranks come here after the same step."""
        s, state = self.s, self.state
        told = s.ranks.all_gather_object("signalled", (s.signals.asked, s.signals.seconds_since()))
        early, since = not any(asked for asked, _ in told), max(seconds for _, seconds in told)
        reason = f"--stop-at {state.step}" if early else s.signals.name
        nothing = state.step == 0  # before step 1 there is nothing to save
        unsaved = not nothing and self.saves.step != state.step
        expected = s.agreed("grace", lambda: self.saves.expected_seconds() if unsaved else 0.0)
        left = self.recipe.checkpoint.grace_seconds - since
        if not early and expected > left:
            self.saves.wait(max(0.0, left))  # what is being written already may still be committed
            lost = state.step - max(self.saves.newest(), 0)
            self.event("preempted", reason=reason, saved=False)
            raise RunFailed(
                f"stopped by {reason} at step {state.step}: a save takes about {expected:.0f} s and only {left:.0f} s are left, "
                f"so the last checkpoint stands and {lost} steps are lost (checkpoint.grace_seconds, checkpoint.every)"
            )
        if not (nothing or self._commit(EMERGENCY)):
            raise RunFailed(f"stopped by {reason} at step {state.step}, and its checkpoint could not be saved")
        self.event("preempted", reason=reason, saved=True)
        s.ledger.sync()
        self._finish_trackers(None if early else self.recipe.checkpoint.grace_seconds - s.signals.seconds_since() - 2.0)
        done = "before step 1" if nothing else f"after step {state.step}, all saved"
        raise Stopped(f"stopped by {reason} {done}; the same command goes on from there")

    def finish(self) -> None:
        """The last checkpoint, the summary, the end of the trackers."""
        s = self.s
        s.ranks.mark(self.state.step, "end")
        if not self._commit(FINAL):
            self.event("failed", reason="the last checkpoint could not be saved")
            raise RunFailed("the last checkpoint could not be saved (see above); train again to try once more")
        self._stop_profile()
        if self.last_loss is None:  # nothing was left to do but the end
            self.last_loss = next((x["loss"] for x in reversed(s.run.lines("train"))), None)
        write_summary(s, self.last_loss)
        self.event("finished")
        s.console.event(f"finished: {s.run.path}", self.state.step)
        self._finish_trackers()

    def _finish_trackers(self, limit: float | None = None) -> None:
        """Let the trackers take the rest, for `telemetry.flush_seconds`, or `limit` where that is less."""
        if self.s.trackers is not None:
            flush = self.recipe.telemetry.flush_seconds
            self._show_notes(self.s.trackers.finish(flush if limit is None else max(0.0, min(flush, limit))))

    def _show_notes(self, notes: list[Note]) -> None:
        for note in notes:
            (self.s.console.warning if note.warning else self.s.console.event)(note.text)

    def _stop_profile(self) -> None:
        if self.profile is not None:
            self.s.console.event(self.profile.stop())
            self.profile = None

    def let_save_end(self) -> None:
        """Give a save that is being written a moment to be committed; other ranks may be gone, so no more than that."""
        with contextlib.suppress(Exception):
            self.saves.wait(SAVE_SECONDS)

    def failed(self, error: BaseException) -> None:
        """Write down that the run failed; joins nothing, waits for nothing."""
        text = (str(error) or type(error).__name__).splitlines()[0]
        with contextlib.suppress(Exception):
            self.event("failed", reason=text[:500], phase=self.s.ranks.phase)

    def event(self, name: str, step: int | None = None, **fields: Any) -> None:
        """An `event` line of the ledger."""
        self.s.ledger.write("event", self.state.step if step is None else step, event=name, **fields)


def _memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 1e6
    import psutil

    return float(psutil.Process().memory_info().rss) / 1e6
