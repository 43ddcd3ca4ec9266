"""Windlass: train and fine-tune language models on CPUs and NVIDIA GPUs, from one file.

`dir(windlass)` is the public API: a function for every verb, the nouns `Recipe`, `Run` and `Study`,
their results and errors. Python imports each at its first use, so `import windlass` costs nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.data.prepare import Data, prepare
    from windlass.errors import RunFailed, Stopped, UserError
    from windlass.estimate.plan import Plan, plan
    from windlass.evaluation.suites import evaluate
    from windlass.evaluation.text import generate, sample
    from windlass.interop.export import export
    from windlass.recipe import Recipe
    from windlass.reports.write import Report, report
    from windlass.run import Run
    from windlass.study.scale import scale
    from windlass.study.study import Study
    from windlass.study.sweep import sweep
    from windlass.telemetry.trackers import replay as track
    from windlass.training.api import train
    from windlass.training.callbacks import Callback, Suite
    from windlass.verification import verify

__version__ = "0.1.0"

_MODULES = {
    "Callback": "training.callbacks",
    "Data": "data.prepare",
    "Plan": "estimate.plan",
    "Recipe": "recipe",
    "Report": "reports.write",
    "Run": "run",
    "RunFailed": "errors",
    "Stopped": "errors",
    "Study": "study.study",
    "Suite": "training.callbacks",
    "UserError": "errors",
    "evaluate": "evaluation.suites",
    "export": "interop.export",
    "generate": "evaluation.text",
    "plan": "estimate.plan",
    "prepare": "data.prepare",
    "report": "reports.write",
    "sample": "evaluation.text",
    "scale": "study.scale",
    "sweep": "study.sweep",
    "track": "telemetry.trackers:replay",
    "train": "training.api",
    "verify": "verification",
}
__all__ = [
    "Callback",
    "Data",
    "Plan",
    "Recipe",
    "Report",
    "Run",
    "RunFailed",
    "Stopped",
    "Study",
    "Suite",
    "UserError",
    "__version__",
    "evaluate",
    "export",
    "generate",
    "plan",
    "prepare",
    "report",
    "sample",
    "scale",
    "sweep",
    "track",
    "train",
    "verify",
]

# cuBLAS reads it once, at the first matrix product of the process; `train.deterministic` needs it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module 'windlass' has no attribute {name!r}")
    module, _, attribute = _MODULES[name].partition(":")
    return getattr(importlib.import_module(f"windlass.{module}"), attribute or name)


def __dir__() -> list[str]:
    return __all__
