"""Which optimizers of a library continue bit for bit after a resume, with their defaults.

python benchmarks/library_optimizers.py [pytorch_optimizer|torch.optim]
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time

import torch

from windlass.errors import UserError
from windlass.optim.build import library_optimizer
from windlass.recipe.settings import OptimSettings


def main(library: str) -> None:
    for name, one in sorted(vars(importlib.import_module(library)).items()):
        if inspect.isclass(one) and issubclass(one, torch.optim.Optimizer):
            start = time.perf_counter()
            try:
                library_optimizer(OptimSettings(kind=f"{library}.{name}"))
                result = "yes"
            except UserError as error:
                result = str(error)
            print(f"{name:20} {time.perf_counter() - start:6.2f} s  {result}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["pytorch_optimizer"])
