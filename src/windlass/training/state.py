"""The counters of a training, the seed of a step, fp16's loss scale, and the sum of the losses."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from windlass.parallel import collectives
from windlass.parallel.dist import Ranks
from windlass.seeds import seed_of

SCALE_START = 65536.0  # the first fp16 loss scale
SCALE_GROWS_AFTER = 2000  # steps without overflow that double it, as in torch's GradScaler


def step_seed(seed: int, step: int, micro: int) -> int:
    """The seed of torch's generators for a micro-batch of a step; independent of rank and world."""
    return seed_of(f"windlass/dropout/{seed}/{step}/{micro}")


@dataclass
class TrainState:
    """The counters of a training after `step` optimizer steps.

    With the tensors they are the whole state, because data order, dropout and initialisation follow
    from the seed and these counters.
    """

    step: int = 0  # optimizer steps completed, skipped updates included
    samples: int = 0  # sequences trained on
    tokens: int = 0  # tokens trained on, without padding
    label_tokens: int = 0  # tokens that counted in the loss; masked prompts do not
    skipped: list[tuple[int, int]] = field(default_factory=list)
    """Ranges [start, stop) of global sample numbers that rewinds left out."""
    updates_skipped: int = 0  # because of non-finite steps and spikes
    skips_in_a_row: int = 0  # non-finite steps since the last good one
    loss_scale: float = 0.0  # of fp16; 0: before the first step, and in other precisions
    scale_good_steps: int = 0  # steps without an overflow since the scale last changed
    spike_window: list[float] = field(default_factory=list)
    """The last losses; empty if `train.on_spike` is `ignore`."""
    loss_sum: float = 0.0  # over all steps with a finite loss
    losses: int = 0  # the number of these steps

    def advance(self, samples: int, tokens: int, label_tokens: int) -> None:
        """Count a completed step."""
        self.step += 1
        self.samples += samples
        self.tokens += tokens
        self.label_tokens += label_tokens

    def return_to(self, checkpoint: TrainState, left_out: tuple[int, int]) -> None:
        """Go back to a checkpoint's counters, in place, and leave out a range of samples there."""
        skipped = [*self.skipped, left_out]
        vars(self).update(vars(checkpoint))
        self.skipped = skipped

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> TrainState:
        """The reverse of `to_json`; raises KeyError if a counter is missing."""
        state = TrainState(**{name: saved[name] for name in TrainState.__dataclass_fields__})
        state.skipped = [(int(start), int(stop)) for start, stop in saved["skipped"]]
        return state


class LossScaler:
    """fp16's loss scale, on the device: an overflow halves it, 2,000 steps without one double it."""

    def __init__(self, device: torch.device, state: TrainState):
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self.load(state)

    def load(self, state: TrainState) -> None:
        """Take the scale of the counters, or the initial one if they have none."""
        self.scale = self._zero + (state.loss_scale or SCALE_START)
        self.good_steps = self._zero + state.scale_good_steps

    def save(self, state: TrainState) -> None:
        """Put the scale into the counters. Waits for the device."""
        state.loss_scale, state.scale_good_steps = float(self.scale), int(self.good_steps)

    def update(self, bad: Tensor) -> None:
        """After a step; `bad` is 1.0 if it overflowed."""
        overflow, good = bad > 0, self.good_steps + 1
        grows = ~overflow & (good >= SCALE_GROWS_AFTER)
        grown = torch.where(grows, self.scale * 2.0, self.scale)
        self.scale = torch.where(overflow, self.scale * 0.5, grown)
        self.good_steps = torch.where(overflow | grows, self._zero, good)


class LossSum:
    """Adds the loss of every step to the counters, in the order of the steps.

    A step leaves its loss on the device; only `read` waits for it.
    """

    def __init__(self, state: TrainState, ranks: Ranks):
        self._state, self._ranks, self._losses = state, ranks, list[Tensor]()

    def add(self, loss: Tensor) -> None:
        """After a step, with this rank's part of its loss."""
        self._losses.append(loss.detach().to(torch.float64, copy=True))

    def read(self) -> None:
        """Bring the counters up to date; all ranks call it at the same step."""
        if not self._losses:
            return
        losses = collectives.sum_over_ranks(torch.stack(self._losses), self._ranks)
        self._losses = []
        for loss in filter(math.isfinite, losses.tolist()):
            self._state.loss_sum += loss
            self._state.losses += 1

    def reset(self) -> None:
        """Before a rewind: forget the steps that were not read."""
        self._losses = []
