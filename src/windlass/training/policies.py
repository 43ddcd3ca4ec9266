"""What a step that went wrong means: not finite, or a spike. Every rank sees the same numbers, so all do the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.errors import RunFailed
from windlass.parallel import collectives
from windlass.training.guard import SPIKE_WINDOW, is_spike

if TYPE_CHECKING:
    from windlass.training.session import Session
    from windlass.training.step import StepResult


@dataclass
class Rewind(Exception):
    """Go back to the last checkpoint and leave out the samples up to here."""

    reason: str
    stop_sample: int
    """The first global sample after those to leave out."""


class Judge:
    """Acts on bad steps as `train.on_nonfinite` and `train.on_spike` say, and counts them."""

    def __init__(self, session: Session, event: Callable[..., None]):
        self.s, self.state, self.recipe, self.event = session, session.state, session.recipe, event
        self.spikes_in_a_row = 0
        if self.recipe.train.on_spike != "ignore":
            session.step.is_spike = self._is_spike

    def examine(self, result: StepResult, batch_end: int) -> None:
        """Act on non-finite steps since the last look. Every rank sees the same gradient norm, so all do the same."""
        bad, loss_bad = self.s.step.trouble()
        state, settings = self.state, self.recipe.train
        if not bad:
            state.skips_in_a_row = 0
            return
        ranks = self.s.ranks.all_gather_object("non-finite", loss_bad)
        where = [str(rank) for rank, flag in enumerate(ranks) if flag]
        first = state.step - bad + 1 if self.s.step.latch else state.step
        what = (
            f"loss not finite on rank {', '.join(where)}"
            if where
            else "gradient not finite (every rank's loss is finite)"
        )
        if settings.on_nonfinite == "rewind" and (where or not self.s.step.fp16):
            raise Rewind(f"step {first}: {what}", batch_end)
        if settings.on_nonfinite == "stop" and (where or not self.s.step.fp16):
            raise RunFailed(
                f"step {first}: {what} (gradient norm {float(result.grad_norm)}). The update was not made. Look at the samples "
                "of this step, lower optim.lr, or set train.on_nonfinite to skip or rewind"
            )
        state.updates_skipped += bad
        state.skips_in_a_row += bad
        self.event(
            "skipped", reason=what, count=bad, in_a_row=state.skips_in_a_row, loss_scale=float(self.s.step.scale)
        )
        if state.skips_in_a_row >= settings.max_skips:
            raise RunFailed(
                f"step {state.step}: {state.skips_in_a_row} updates in a row were skipped, the last because of: {what}; "
                "lower optim.lr, use bf16 or fp32, or raise train.max_skips"
            )

    def _is_spike(self, loss: float) -> bool:
        """Whether a step's loss is a spike; if not, it joins those that the next one is measured against."""
        window = self.state.spike_window
        if is_spike(window, loss, self.recipe.train.spike_sigmas):
            return True
        if math.isfinite(loss):  # what is not finite is told by the other policy, and is no measure
            window.append(loss)
            del window[:-SPIKE_WINDOW]
            self.spikes_in_a_row = 0
        return False

    def spiked(self, result: StepResult, batch_end: int) -> None:
        """The policy for a loss spike; every rank saw the same loss. The update was not made."""
        policy, step = self.recipe.train.on_spike, self.state.step
        loss = float(collectives.sum_over_ranks(result.loss.clone(), self.s.ranks))
        reason = (
            f"step {step}: the loss {loss:.4f} is a spike of more than {self.recipe.train.spike_sigmas:g} deviations"
        )
        if policy == "stop":
            raise RunFailed(f"{reason}; the update was not made (train.on_spike)")
        if policy == "rewind":
            raise Rewind(reason, batch_end)
        self.state.updates_skipped += 1
        self.spikes_in_a_row += 1
        self.event("spike", reason=reason, in_a_row=self.spikes_in_a_row)
        if self.spikes_in_a_row >= self.recipe.train.max_skips:
            raise RunFailed(
                f"{reason}, the {self.spikes_in_a_row}th in a row: this is no spike but where the loss is now. Lower optim.lr, or "
                "raise train.spike_sigmas or train.max_skips"
            )
