"""A run's saves, as its loop sees them: staged, written in the background, told when they ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from windlass.checkpoint.load import latest_step
from windlass.checkpoint.reshard import gather_state
from windlass.errors import RunFailed
from windlass.training.start import hash_without_steps

if TYPE_CHECKING:
    from windlass.checkpoint.save import Outcome
    from windlass.training.session import Heartbeat, Session


class Saves:
    """What was saved, and what is being saved. Each method is called by every rank at the same step."""

    def __init__(self, session: Session, heartbeat: Heartbeat, event: Callable[..., None]):
        self.s, self.state, self.heartbeat, self.event = session, session.state, heartbeat, event
        self.step = session.state.step if session.resumed_from else -1
        """The newest step that is saved, or is being saved; -1: none, or the last one failed."""
        self.last_error = ""

    def save(self, reason: str, loss: float | None, train_loss: float | None, scores: Mapping[int, float]) -> None:
        """Stage the state; it is written in the background. `scores` are those of `checkpoint.best` by step.

        Raises RunFailed on every rank where `checkpoint.max_failed_saves` saves in a row have failed.
        """
        s, state = self.s, self.state
        with s.timer.outside(), s.goodput.phase("save"):
            s.ranks.mark(state.step, "save")
            outcomes = s.saver.wait(None, self.heartbeat.beat)
            self.report(outcomes)
            if s.saver.failures >= s.recipe.checkpoint.max_failed_saves:
                raise RunFailed(
                    f"{s.saver.failures} saves in a row have failed (checkpoint.max_failed_saves), and the run is not to go "
                    f"on unsaved; the last one: {self.last_error}"
                )
            s.step.save(state)
            meta = {
                "reason": reason, "loss": loss, "recipe": s.recipe.config_hash, "data": s.data.fingerprint,
                "strategy": s.ranks.strategy, "train_loss": train_loss, "samples": state.samples,
                "tokens": state.tokens, "parameters": s.parameters, "line": hash_without_steps(s.recipe),
                "optimizer": s.recipe.optim.kind,
            }  # fmt: skip
            s.saver.save(
                state.step, gather_state(s.model, s.optimizer, s.ranks.rank, s.ranks.world), state.to_json(), meta,
                scores, while_waiting=self.heartbeat.beat,
            )  # fmt: skip
        self.step = state.step

    def report(self, outcomes: list[Outcome]) -> bool:
        """Write down how saves ended; whether all of them were committed."""
        s = self.s
        for outcome in outcomes:
            if outcome.error:
                self.step = -1 if outcome.step == self.step else self.step
                self.last_error = outcome.error
                self.event("save_failed", step=outcome.step, reason=outcome.error)
                s.console.warning(f"the checkpoint of step {outcome.step} was not saved: {outcome.error}")
            elif s.ranks.main:
                s.ledger.sync()
                self.event(
                    "checkpoint", step=outcome.step, path=f"checkpoints/{outcome.path.name}", bytes=outcome.bytes,
                    write_s=round(outcome.write_s, 4), blocked_s=round(outcome.staged_s + outcome.waited_s, 4),
                )  # fmt: skip
                s.console.event(f"saved {outcome.path} in {outcome.write_s:.2f} s", outcome.step)
                if outcome.warning:
                    s.console.warning(outcome.warning)
        return not any(outcome.error for outcome in outcomes)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for what is being written, for so many seconds at most; whether all of it was committed."""
        with self.s.timer.outside(), self.s.goodput.phase("save"):
            good = self.report(self.s.saver.wait(timeout, self.heartbeat.beat))
        return good and not self.s.saver.busy

    def expected_seconds(self) -> float:
        """How long a save that is begun now may take: as the last one did, and what is being written comes first."""
        events = (e for e in reversed(self.s.run.events) if e["event"] == "checkpoint")
        before = next((float(e.get("write_s") or 0.0) for e in events), 0.0)  # of an earlier start
        return (self.s.saver.last_seconds or before) + self.s.saver.remaining_seconds()

    def newest(self) -> int:
        """The newest committed step that a restart would go on from; -1 where there is none."""
        return latest_step(self.s.run.path)
