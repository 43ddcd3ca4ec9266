"""Windlass: train and fine-tune language models on whatever hardware there is, from one file.

The public face is `Recipe`, `Run` and `train`; they are imported when first used, so that `import windlass` is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Recipe", "Run", "__version__", "train"]

if TYPE_CHECKING:
    from windlass.recipe import Recipe
    from windlass.run import Run
    from windlass.training import train


def __getattr__(name: str) -> Any:
    import importlib

    places = {"Recipe": "windlass.recipe", "Run": "windlass.run", "train": "windlass.training"}
    if name not in places:
        raise AttributeError(f"module 'windlass' has no attribute {name!r}")
    return getattr(importlib.import_module(places[name]), name)
