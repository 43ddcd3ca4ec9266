"""Collectives inside a forward pass, with their backward passes.

They are torch's functional collectives, which `torch.compile` traces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from windlass.model.share import Peers

collective = torch.ops._c10d_functional


def gather(x: Tensor, dim: int, peers: Peers) -> Tensor:
    """The parts of all ranks, along a dimension."""
    parts = collective.all_gather_into_tensor(x.contiguous(), peers.size, peers.group)
    parts = collective.wait_tensor(parts)
    return parts if dim == 0 else torch.cat(parts.chunk(peers.size), dim)


def scatter(x: Tensor, dim: int, peers: Peers) -> Tensor:
    """This rank's part, along a dimension, of the sum over the ranks."""
    x = x.contiguous() if dim == 0 else torch.cat(x.chunk(peers.size, dim))
    part = collective.reduce_scatter_tensor(x, "sum", peers.size, peers.group)
    return collective.wait_tensor(part)  # type: ignore[no-any-return]


def exchange(x: Tensor, peers: Peers) -> Tensor:
    """Part i of the first dimension goes to rank i, and part j comes from rank j."""
    each = [1] * peers.size
    parts = collective.all_to_all_single(x.contiguous(), each, each, peers.group)
    return collective.wait_tensor(parts)  # type: ignore[no-any-return]


class Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, peers: Peers) -> Tensor:
        ctx.how = dim, peers
        return gather(x, dim, peers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return scatter(grad, *ctx.how), None, None


class Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, peers: Peers) -> Tensor:
        ctx.how = dim, peers
        return scatter(x, dim, peers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, *ctx.how), None, None


class Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return exchange(x, peers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return exchange(grad, ctx.peers), None


class Copy(Function):
    """The same tensor; the backward pass adds up the gradients of the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.peers.add_up(grad), None


class Sum(Function):
    """The sum over the ranks, whose gradient every rank has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        return peers.add_up(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None
