"""`python over_gloo.py VERB ...`: the command `windlass` with gloo for CUDA tensors, because NCCL
needs a GPU for each rank.
"""

from typing import Any

import torch.distributed as dist

from windlass.cli import main

init_process_group = dist.init_process_group


def over_gloo(backend: str, **options: Any) -> None:
    init_process_group(backend.replace("nccl", "gloo"), **options)


if __name__ == "__main__":
    dist.init_process_group = over_gloo
    main()
