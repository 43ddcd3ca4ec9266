"""Training: from a recipe to a run. `train` is imported when first used, because it needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["train"]

if TYPE_CHECKING:
    from windlass.training.setup import train


def __getattr__(name: str) -> Any:
    if name != "train":
        raise AttributeError(f"module 'windlass.training' has no attribute {name!r}")
    from windlass.training.setup import train

    return train
