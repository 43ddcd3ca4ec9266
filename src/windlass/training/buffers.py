"""Buffers that change in training, such as the statistics of BatchNorm: rank 0's values count.

The ranks see different samples, so their buffers would differ. After each step the first data rank
sends the buffers that change to the others. Its value is always valid, but a mean of counters or
codes is not. Windlass does not send non-persistent buffers, because it does not save them either.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.model.quantised import Linear4bit
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import unwrap


class Buffers:
    """The persistent buffers of a model. Every rank calls each method at the same step."""

    def __init__(self, model: nn.Module, ranks: Ranks):
        self.ranks, self.changing = ranks, list[str]()  # known after the first step
        self.owners = {
            f"{prefix}.{name}".removeprefix("."): (module, name)
            for prefix, module in unwrap(model).named_modules()
            if ranks.mesh.loss_ranks is not None and not isinstance(module, Linear4bit)
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }
        self.before = {name: tensor.clone() for name, tensor in self.read(self.owners)}

    def find_changing(self) -> None:
        """After the first step: find the buffers that it has changed on any rank."""
        if self.before:
            own = [n for n, tensor in self.read(self.owners) if not tensor.equal(self.before[n])]
            every = set().union(*self.ranks.all_gather_object("buffers", own))
            self.changing, self.before = [name for name in self.owners if name in every], {}

    def share(self, every: bool) -> None:
        """Take the first data rank's values of the buffers that change, or of `every` one.

        A buffer may change later than in the first step, so a save and an evaluation need all.
        """
        # A view of bytes must begin at a multiple of its type's size.
        tensors = sorted(
            (tensor for _, tensor in self.read(self.owners if every else self.changing)),
            key=lambda tensor: -tensor.element_size(),
        )
        if not tensors:
            return
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
        mesh = self.ranks.mesh
        group = mesh.loss_ranks if flat.device.type == "cpu" else mesh.loss_group
        dist.broadcast(flat, group=group, group_src=0)
        for tensor, part in zip(tensors, flat.split([t.nbytes for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.dtype).view_as(tensor))

    def read(self, names: Iterable[str]) -> list[tuple[str, Tensor]]:
        """The present tensors by name; a module may replace its buffers."""
        owners = ((name, *self.owners[name]) for name in names)
        return [(name, module._buffers[own].detach()) for name, module, own in owners]
