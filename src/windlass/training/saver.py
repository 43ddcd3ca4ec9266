"""The saves of a training: their content, commits and reports, and the save before a stop."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from windlass.checkpoint.choose import EMERGENCY, FINAL, PERIODIC
from windlass.checkpoint.commit import Save
from windlass.checkpoint.format import Base, Checkpoint
from windlass.checkpoint.save import Writer
from windlass.checkpoint.state_dict import gather_shard
from windlass.errors import RunFailed, Stopped, plural
from windlass.launch import rank_status
from windlass.launch.rank_status import job_grace, report_saved
from windlass.optim.average import Average
from windlass.recipe import Horizon
from windlass.telemetry.trackers import FLUSH_SECONDS
from windlass.training.callbacks import Callbacks
from windlass.training.record import Recorder
from windlass.training.state import LossScaler
from windlass.training.stop import StopSignals, event_of

TRACKER_RESERVE_SECONDS = 2.0  # of the grace after a signal, after the trackers have finished


class Saver(Writer):
    """Saves the state of a training. Every rank calls each method at the same step."""

    def __init__(
        self,
        recorder: Recorder,
        callbacks: Callbacks,  # with model and optimizer
        scaler: LossScaler,
        average: Average,
        *,
        meta: dict[str, Any],  # in every checkpoint, with its reason
        base: Base | None,  # of weights that no checkpoint has
        checkpoint: Checkpoint | None,  # the state comes from it
        attempt: str,  # the name of this start
        horizons: Sequence[Horizon],  # two for an extended run, for `keep_every`
        is_own: bool,  # the module is the user's, whose forward pass may change weights
    ):
        recipe, ranks = recorder.recipe, recorder.ranks
        super().__init__(
            recorder.run.checkpoints_dir,
            ranks.rank,
            ranks.world,
            attempt=attempt,
            settings=recipe.checkpoint,
            horizons=horizons,
            base=base,
            damaged={c.serial for c in checkpoint.passed_over} if checkpoint else (),
            while_waiting=recorder.beat,
        )
        self.recorder, self.callbacks, self.state = recorder, callbacks, recorder.state
        self.grace, self.ranks = recipe.checkpoint.grace_seconds, ranks
        self.scaler, self.average, self.meta, self.is_own = scaler, average, meta, is_own
        if checkpoint is not None:
            self.newest = self.committed = self.state.step

    def save(self, reason: str = PERIODIC) -> None:
        """Begin to save; before the state changes, `finish_staging` is called."""
        state, recorder = self.state, self.recorder
        recorder.ledger.check()
        reason = FINAL if state.step == recorder.horizon.steps else reason  # is never deleted
        with recorder.outside("save"):
            self.ranks.mark(state.step, "save")
            recorder.read_losses()
            self.scaler.save(state)
            state.averaged = int(self.average.count)
            shard = gather_shard(
                self.callbacks.model,
                self.callbacks.optimizer,
                self.ranks,
                self.average.tensors,
                self.base.weights if self.base else (),
            )
            meta = self.meta | {"reason": reason}
            self.write(state.step, shard, asdict(state), meta, recorder.scores)
            if self.is_own:
                self.finish_staging()

    def finish(self, timeout: float | None = None) -> None:
        """Wait, at most `timeout` seconds, for the saves."""
        with self.recorder.outside("save"):
            self.report(self.wait(timeout))

    def commit(self, reason: str) -> bool:
        """Commit the present step, unless a save of it is in progress or done."""
        step = self.state.step
        if any(self.ranks.all_gather_object("unsaved", self.newest != step)):
            self.save(reason)
        self.finish()
        return self.newest == step  # an earlier save may have failed

    def report(self, saves: list[Save]) -> None:
        recorder = self.recorder
        for save in saves:
            step = save.step
            if save.error:
                text = f"the checkpoint of step {step} was not saved: {save.error}"
                recorder.emit("save_failed", text, step=step, warning=True, reason=save.error)
            elif self.ranks.main:
                recorder.ledger.sync()  # as durable as the checkpoint, up to its step
                recorder.emit(
                    "checkpoint",
                    step=step,
                    path=f"checkpoints/{save.path.name}",
                    bytes=save.total_bytes,
                    write_s=round(save.write_s, 4),
                    blocked_s=round(save.staged_s + save.waited_s, 4),
                )
                recorder.console.saved(save.path, save.write_s, step)
                if save.warning:
                    recorder.console.warning(save.warning)
                report_saved(save.write_s + save.staged_s)  # to a batch job
                self.finish_staging()  # a callback may change what it gets
                self.callbacks.saved(step, save.path)

    def stop_run(self, stop: StopSignals) -> bool:
        """Save within the grace; raise Stopped after a signal, else return False.

        If the grace is too short, a restart resumes from the newest checkpoint; without one the run
        has failed. After the grace, outside a batch job, nothing has killed the run, so it saves.
        """
        step, recorder = self.state.step, self.recorder
        since = time.monotonic() - stop.received_at if stop.requested else 0.0
        signal = [stop.name, since, self.callbacks.stop_reason]
        names, seconds, asked = zip(*self.ranks.all_gather_object("signals", signal), strict=True)
        signalled = any(names)
        # Without a signal a callback or `stop_at` has asked.
        reason = next(filter(None, (*names, *asked)), "request")
        # The seconds of a save: as long as the last one, after a save in progress.
        needed = 0.0
        if self.newest != step:
            needed = last = self.last_seconds or 0.0
            if self.busy:
                needed += max(0.0, last - (time.monotonic() - self.began))
        # From a signal to the end of the run: the setting's, or more in a batch job.
        needed, in_job = self.ranks.broadcast_object("needed", (needed, job_grace()))
        left = max(self.grace, in_job) - max(seconds)
        # After Ctrl-C nobody kills the run, unless torchrun does.
        by_hand = {*names} <= {"", "SIGINT"} and self.ranks.env.launcher in ("none", "windlass")
        if not in_job and (by_hand or left < 0):
            left = math.inf
        end = time.monotonic() + left
        if signalled and needed > left:
            self.finish(max(0.0, left))  # a save in progress may still be committed
            recorder.emit(event_of(reason), reason=reason, saved=False)
            newest = self.ranks.broadcast_object("newest", self.committed)
            lost = f"{plural(step - newest, 'step')} lost (checkpoint.every)"
            text = (
                f"stopped by {reason} at step {step}: a save takes about {needed:.0f} s and only "
                f"{max(0.0, left):.0f} s are left (checkpoint.grace_seconds); {lost}"
            )
            if not newest:
                raise RunFailed(text)
            self.ranks.mark(step, rank_status.STOPPED)  # for a launcher
            raise Stopped(f"{text}; start it again to continue from step {newest}")
        if not self.commit(EMERGENCY):
            raise RunFailed(f"stopped by {reason} at step {step}, but could not be saved")
        recorder.write_logged()
        recorder.emit(event_of(reason) if signalled else "stopped", reason=reason, saved=True)
        recorder.ledger.sync()
        flush = FLUSH_SECONDS
        if signalled:
            flush = min(flush, max(0.0, end - time.monotonic() - TRACKER_RESERVE_SECONDS))
        recorder.show(recorder.trackers.finish(flush))
        text = f"stopped by {reason} after step {step}, all saved; start it again to continue"
        if signalled:
            self.ranks.mark(step, rank_status.STOPPED)  # for a launcher
            raise Stopped(text)
        recorder.console.event(text)
        return False
