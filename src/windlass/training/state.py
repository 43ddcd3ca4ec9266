"""All that must survive a kill, besides the weights and the optimizer's moments: a few counters.

Data order, dropout and initialisation are pure functions of the seed and these numbers, so there is no generator and no
loader position to save.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class TrainState:
    """Where a training stands after `step` completed optimizer steps."""

    step: int = 0
    """Optimizer steps completed, skipped updates included."""
    samples: int = 0
    """Sequences trained on."""
    tokens: int = 0
    """Tokens trained on that counted in the loss: padding and masked prompts are not among them."""
    best_loss: float | None = None
    """Lowest validation loss so far."""
    best_score: float | None = None
    """The best value so far of the measure `checkpoint.best`."""
    skipped: list[tuple[int, int]] = field(default_factory=list)
    """Ranges [start, stop) of global sample numbers that were left out after a rewind."""
    updates_skipped: int = 0
    """Updates that were skipped because of a non-finite gradient or a spike, in all."""
    skips_in_a_row: int = 0
    """Those since the last update that was made."""
    loss_scale: float = 1.0
    """The fp16 loss scale (1 in other precisions)."""
    scale_good_steps: int = 0
    """Steps without an overflow since the scale last changed."""
    spike_window: list[float] = field(default_factory=list)
    """The last losses, against which a spike is measured (kept only where `train.on_spike` asks for it)."""

    def to_json(self) -> dict[str, Any]:
        """The counters as JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> TrainState:
        """The reverse of `to_json`; raises KeyError where a counter is missing, so that none is forgotten in silence.

        Checkpoints of before `checkpoint.best` have no `best_score`; a resume reads it from the ledger in any case.
        """
        names = TrainState.__dataclass_fields__
        state = TrainState(**{name: saved[name] for name in names if name != "best_score"})
        state.best_score = saved.get("best_score")
        state.skipped = [(int(start), int(stop)) for start, stop in saved["skipped"]]
        return state
