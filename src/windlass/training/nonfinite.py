"""Steps that went wrong (a loss or gradient that is not finite, a loss spike), and the recipe's
policies for them.

On a CPU the host looks at every step before its update. On CUDA looking would make the host wait
for the device, so there the device leaves the update out itself (`found_inf` of torch's fused
optimizers) and counts the bad steps. The host reads the counts when it logs or saves; with the
policy `stop` no update is made from a bad step until then. Every rank sees the same numbers, so all
decide alike.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

import torch
from torch import Tensor

from windlass.errors import RunFailed
from windlass.parallel import collectives
from windlass.recipe.settings import TrainSettings
from windlass.training.record import Recorder
from windlass.training.state import LossScaler

SPIKE_WINDOW, SPIKE_MIN = (
    128,
    16,
)  # losses that a spike is measured against; fewer tell nothing about their spread


class Counts(NamedTuple):
    """Bad steps since the last look: loss or gradient norm was not finite, or the update was held
    back."""

    bad: int = 0
    in_a_row: int = 0  # of the last steps; 0 where the last one was good
    longest: int = 0  # the longest run of bad steps in progress since the last look
    loss_bad: bool = False  # whether this rank's loss was among what was not finite


def decide_nonfinite(
    counts: Counts,
    bad_ranks: list[int],
    step: int,
    grad_norm: float,
    settings: TrainSettings,
    fp16: bool,
) -> tuple[str, str]:
    """`skip`, `rewind` or `stop` after bad steps up to `step`, by `train.on_nonfinite`, and why.

    `bad_ranks`: those whose loss was not finite. With fp16 an overflow of the gradient alone is an
    ordinary event: the loss scale is halved and the step skipped under every policy.
    """
    what = "gradient not finite (every rank's loss is finite)"
    if bad_ranks:
        what = f"loss not finite on rank {', '.join(map(str, bad_ranks))}"
    policy = settings.on_nonfinite if bad_ranks or not fp16 else "skip"
    if policy == "stop":
        step = (
            step if fp16 else step - counts.bad + 1
        )  # without fp16 no update was made since the first bad step
        advice = "look at its samples, lower optim.lr, or set train.on_nonfinite to skip or rewind"
        what += f" (gradient norm {grad_norm}). The update was not made: {advice}"
    return policy, f"step {step}: {what}"


def is_spike(window: list[float], loss: float, sigmas: float) -> bool:
    """Whether `loss` lies `sigmas` standard deviations above the mean of the last SPIKE_WINDOW
    losses."""
    if len(window) < SPIKE_MIN:
        return False
    spread = statistics.pstdev(window)
    return spread > 0 and loss > statistics.fmean(window) + sigmas * spread


def check_is_deferred(
    device: torch.device, optimizer: torch.optim.Optimizer, offload: bool
) -> bool:
    """Whether the device decides about the update, and the host looks later.

    Not with offloaded parameters: their optimizer is on the CPU, and torch would copy `found_inf`
    there without waiting (`non_blocking=True` in `torch/optim/adamw.py`), so that the update could
    read the flag before it is written.
    """
    return (
        device.type == "cuda"
        and not offload
        and getattr(optimizer, "_step_supports_amp_scaling", False)
    )


class BadSteps:
    """Finds bad steps on one rank, counts them on the device, and decides by the policies of the
    recipe's `train`."""

    def __init__(
        self, recorder: Recorder, settings: TrainSettings, scaler: LossScaler | None, deferred: bool
    ):
        self.recorder, self.ranks, self.state = recorder, recorder.ranks, recorder.state
        self.settings, self.scaler, self.deferred = settings, scaler, deferred
        self._hold_updates = (
            settings.on_nonfinite == "stop" and scaler is None
        )  # from the first bad step on
        self._spikes_in_a_row = 0
        self._zero = torch.zeros((), dtype=torch.float32, device=self.ranks.device)
        self.reset()

    def reset(self) -> None:
        """Take the counts from the state: at the start, and after a rewind."""
        self._bad = self._count = self._loss_bad = self._zero
        self._in_a_row = self._longest = self._zero + self.state.skips_in_a_row

    def observe(self, loss: Tensor, grad_norm: Tensor) -> tuple[Tensor, float | None]:
        """Look at a step before its update: 1.0 (on the device) where that must not be made; the
        loss if it is a spike.

        For the latter the host waits, unless `train.on_spike` is `ignore`.
        """
        loss_bad = (~torch.isfinite(loss)).float()
        self._loss_bad = torch.maximum(self._loss_bad, loss_bad)
        # The norm is the same on all ranks, a loss is not; and a loss may be infinite where its
        # gradient is finite.
        anywhere = collectives.sum_over_ranks(loss_bad.clone(), self.ranks).clamp(max=1)
        bad = torch.maximum((~torch.isfinite(grad_norm)).float(), anywhere)
        self._bad = torch.maximum(self._bad, bad) if self._hold_updates else bad
        self._count = self._count + self._bad
        self._in_a_row = (self._in_a_row + 1) * self._bad
        self._longest = torch.maximum(self._longest, self._in_a_row)
        if self.settings.on_spike == "ignore":
            return self._bad, None
        value, window = (
            float(collectives.sum_over_ranks(loss.clone(), self.ranks)),
            self.state.spike_window,
        )
        if is_spike(window, value, self.settings.spike_sigmas):
            return self._bad, value
        if math.isfinite(value):  # what is not finite is the other policy's
            window.append(value)
            del window[:-SPIKE_WINDOW]
            self._spikes_in_a_row = 0
        return self._bad, None

    def read(self) -> Counts:
        """The counts since the last call. Waits for the device."""
        tensors = [self._count, self._in_a_row, self._longest, self._loss_bad]
        bad, in_a_row, longest, loss_bad = torch.stack(tensors).tolist()
        self._count, self._loss_bad, self._longest = self._zero, self._zero, self._in_a_row
        return Counts(int(bad), int(in_a_row), int(longest), bool(loss_bad))

    def decide(self, grad_norm: Tensor, spike: float | None, look: bool) -> str:
        """Act on bad steps by the policies; returns why the run must rewind, or "". All ranks call
        it after a step.

        `look`: whether to read the counts of non-finite steps. Raises RunFailed where a policy ends
        the run.
        """
        state, settings, action, reason = self.state, self.settings, "", ""
        counts = self.read() if look else Counts(in_a_row=state.skips_in_a_row)
        state.skips_in_a_row = counts.in_a_row
        if counts.bad:
            flags = self.ranks.all_gather_object("bad steps", counts.loss_bad)
            bad_ranks, fp16 = (
                [rank for rank, bad in enumerate(flags) if bad],
                self.scaler is not None,
            )
            action, reason = decide_nonfinite(
                counts, bad_ranks, state.step, float(grad_norm), settings, fp16
            )
            if action == "skip":
                scale = float(self.scaler.scale) if self.scaler is not None else None
                more = {"count": counts.bad, "in_a_row": counts.in_a_row, "loss_scale": scale}
                self._skipped("skipped", reason, counts.bad, counts.longest, more)
        if spike is not None and action in ("", "skip"):
            action = settings.on_spike
            text = f"the loss {spike:.4f} is a spike of more than {settings.spike_sigmas:g} standard deviations"
            reason = f"step {state.step}: {text} (train.on_spike)"
            if action == "skip":
                self._spikes_in_a_row += 1
                self._skipped(
                    "spike", reason, 1, self._spikes_in_a_row, {"in_a_row": self._spikes_in_a_row}
                )
        if action == "stop":
            raise RunFailed(reason)
        return reason if action == "rewind" else ""

    def _skipped(
        self, event: str, reason: str, count: int, in_a_row: int, fields: dict[str, Any]
    ) -> None:
        self.recorder.event(event, reason=reason, **fields)
        self.state.updates_skipped += count
        if in_a_row >= self.settings.max_skips:
            advice = (
                "lower optim.lr, use bf16 or fp32, or raise train.max_skips or train.spike_sigmas"
            )
            raise RunFailed(
                f"{in_a_row} updates in a row were skipped, the last because of: {reason}; {advice}"
            )
