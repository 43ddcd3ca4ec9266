"""The checkpoints of a run as its loop sees them: begun, written in the background, reported when they ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from windlass.checkpoint.load import latest_step
from windlass.checkpoint.reshard import gather_state
from windlass.checkpoint.retention import FINAL, PERIODIC

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from windlass.checkpoint.save import Outcome, Saver
    from windlass.parallel.dist import Ranks
    from windlass.training.measure import Measurements
    from windlass.training.nonfinite import LossScaler
    from windlass.training.record import Recorder
    from windlass.training.state import TrainState


@dataclass
class Saves:
    """What is saved and what is being saved. Each method is called by every rank at the same step."""

    saver: Saver
    ranks: Ranks
    model: nn.Module
    optimizer: Optimizer
    state: TrainState
    scaler: LossScaler | None
    recorder: Recorder
    measurements: Measurements
    meta: dict[str, Any]
    """What every checkpoint says beside its tensors: hashes of recipe and data, optimizer, micro-batch."""
    step: int
    """The newest step that is saved, or is being saved; -1: none, or the last save failed."""
    failed_in_a_row: int = 0

    def save(self, reason: str = PERIODIC) -> None:
        """Copy the state to the host; it is written in the background."""
        recorder, state = self.recorder, self.state
        reason = FINAL if state.step == recorder.horizon.steps else reason  # kept for good, whatever it is saved for
        with recorder.timer.outside(), recorder.goodput.phase("save"):
            self.ranks.mark(state.step, "save")
            if self.scaler is not None:
                self.scaler.save(state)
            meta = self.meta | {
                "reason": reason, "train_loss": recorder.last_loss, "samples": state.samples,
                "tokens": state.tokens,
            }  # fmt: skip
            tensors = gather_state(self.model, self.optimizer, self.ranks.rank, self.ranks.world)
            scores = self.measurements.scores
            self.saver.save(state.step, tensors, state.to_json(), meta, scores, while_waiting=recorder.beat)
        self.step = state.step

    def poll(self) -> None:
        """Report what ended since the last call; never waits."""
        self._report(self.saver.poll())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for what is being written, at most so many seconds; whether all of it is committed."""
        recorder = self.recorder
        with recorder.timer.outside(), recorder.goodput.phase("save"):
            good = self._report(self.saver.wait(timeout, recorder.beat))
        return good and not self.saver.busy

    def commit(self, reason: str) -> bool:
        """See to it that the present step is committed: a save in progress is awaited, one that failed is tried once more."""
        if self.step == self.state.step:
            self.wait()
        if any(self.ranks.all_gather_object("unsaved", self.step != self.state.step)):
            self.save(reason)
        return self.wait() and self.step == self.state.step

    def _report(self, outcomes: list[Outcome]) -> bool:
        recorder = self.recorder
        for outcome in outcomes:
            if outcome.error:
                self.failed_in_a_row += 1
                self.step = -1 if outcome.step == self.step else self.step
                recorder.event("save_failed", outcome.step, reason=outcome.error)
                recorder.console.warning(f"the checkpoint of step {outcome.step} was not saved: {outcome.error}")
                continue
            self.failed_in_a_row = 0
            if self.ranks.main:
                recorder.ledger.sync()  # the lines up to a committed step must survive what the checkpoint survives
                recorder.event(
                    "checkpoint", outcome.step, path=f"checkpoints/{outcome.path.name}", bytes=outcome.bytes,
                    write_s=round(outcome.write_s, 4), blocked_s=round(outcome.staged_s + outcome.waited_s, 4),
                )  # fmt: skip
                recorder.console.event(f"saved {outcome.path} in {outcome.write_s:.2f} s", outcome.step)
                if outcome.warning:
                    recorder.console.warning(outcome.warning)
        return not any(outcome.error for outcome in outcomes)

    def expected_seconds(self) -> float:
        """How long a save that begins now may take: as long as the last one, after the rest of one that is being written."""
        events = (e for e in reversed(self.recorder.run.events) if e["event"] == "checkpoint")
        earlier = next((float(e.get("write_s") or 0.0) for e in events), 0.0)  # an earlier start of the run measured it
        return (self.saver.last_seconds or earlier) + self.saver.remaining_seconds()

    def newest(self) -> int:
        """The newest committed step that a restart would resume from; 0 where there is none."""
        return max(latest_step(self.recorder.run.path), 0)
