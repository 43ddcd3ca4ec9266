"""Windlass: train and fine-tune language models on CPUs and NVIDIA GPUs, from one file.

`dir(windlass)` is the public API: a function for every verb, the nouns `Recipe`, `Run` and `Study`,
their results and errors. Python imports each at its first use, so `import windlass` costs nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.data.open import Data
    from windlass.data.prepare import prepare
    from windlass.errors import RunFailed, Stopped, UserError
    from windlass.estimate.plan import Plan, plan
    from windlass.evaluation.api import evaluate, generate, sample
    from windlass.evaluation.source import load_model
    from windlass.interop.export import export
    from windlass.recipe import Recipe
    from windlass.reports.write import Report, report
    from windlass.run import Run
    from windlass.study.ladder import ladder
    from windlass.study.scale import scale
    from windlass.study.study import Study
    from windlass.study.sweep import sweep
    from windlass.telemetry.trackers import track
    from windlass.training.api import train
    from windlass.training.callbacks import Callback, Suite
    from windlass.verification import verify

__version__ = "0.1.0"

__all__ = ["Callback", "Data", "Plan", "Recipe", "Report", "Run", "RunFailed", "Stopped", "Study"]
__all__ += ["Suite", "UserError", "__version__", "evaluate", "export", "generate", "ladder"]
__all__ += ["load_model", "plan", "prepare", "report", "sample", "scale", "sweep", "track"]
__all__ += ["train", "verify"]

_NAMES = {
    "data.open": "Data",
    "data.prepare": "prepare",
    "errors": "RunFailed Stopped UserError",
    "estimate.plan": "Plan plan",
    "evaluation.source": "load_model",
    "evaluation.api": "evaluate generate sample",
    "interop.export": "export",
    "recipe": "Recipe",
    "reports.write": "Report report",
    "run": "Run",
    "study.ladder": "ladder",
    "study.sweep": "sweep",
    "study.scale": "scale",
    "study.study": "Study",
    "telemetry.trackers": "track",
    "training.api": "train",
    "training.callbacks": "Callback Suite",
    "verification": "verify",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

# cuBLAS reads it once, at the first matrix product of the process; `train.deterministic` needs it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module 'windlass' lacks the attribute {name!r}")
    return getattr(importlib.import_module(f"windlass.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
