"""`python over_gloo.py VERB ...`: the command `windlass` with gloo for CUDA tensors, because NCCL
needs a GPU for each rank.
"""

from typing import Any

import torch
import torch.distributed as dist

from windlass.cli import main

init_process_group = dist.init_process_group


def over_gloo(backend: str, **options: Any) -> None:
    init_process_group(backend.replace("nccl", "gloo"), **options)


def through_host(library: torch.library.Library, name: str) -> None:
    """Let a functional collective take CUDA tensors: gloo reads their addresses and crashes."""
    ops = torch.ops._c10d_functional
    collective = getattr(ops, name).default

    def run(x: torch.Tensor, *how: Any) -> torch.Tensor:
        return ops.wait_tensor(collective(x.cpu(), *how)).to(x.device)

    library.impl(name, run, "CUDA")


if __name__ == "__main__":
    functional = torch.library.Library("_c10d_functional", "IMPL")
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        through_host(functional, name)
    dist.init_process_group = over_gloo
    main()
