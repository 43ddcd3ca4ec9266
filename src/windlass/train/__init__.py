"""The training: state, step, loop, guard. `train` is imported when first used, because it needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["train"]

if TYPE_CHECKING:
    from windlass.train.loop import train


def __getattr__(name: str) -> Any:
    if name != "train":
        raise AttributeError(f"module 'windlass.train' has no attribute {name!r}")
    from windlass.train.loop import train

    return train
