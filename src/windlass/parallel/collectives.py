"""The collectives of a step: inside the model, of counts and flags, and of gradients.

Pipelines exchange messages as well (`pipeline.py`); DDP and FSDP2 reduce gradients by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from windlass.model.sharding import Peers, collective, local_part
from windlass.parallel.mesh import Mesh

AT_ONCE = 2**16  # elements of a gradient whose squares torch adds up alone (on a CPU)
CHUNK = 4096  # elements of a larger one whose squares are added in its own precision

# -- Inside the model: torch's functional collectives, which `torch.compile` traces.


def gather(x: Tensor, dim: int, peers: Peers) -> Tensor:
    """The parts of all ranks, along a dimension."""
    parts = collective.all_gather_into_tensor(x.contiguous(), peers.size, peers.group)
    parts = collective.wait_tensor(parts)
    return parts if dim == 0 else torch.cat(parts.chunk(peers.size), dim)


def scatter(x: Tensor, dim: int, peers: Peers) -> Tensor:
    """This rank's part, along a dimension, of the sum over all ranks."""
    x = x.contiguous() if dim == 0 else torch.cat(x.chunk(peers.size, dim))
    part = collective.reduce_scatter_tensor(x, "sum", peers.size, peers.group)
    return collective.wait_tensor(part)  # type: ignore[no-any-return]


def exchange(x: Tensor, peers: Peers) -> Tensor:
    """Part i of the first dimension goes to rank i, and part j comes from rank j."""
    each = [1] * peers.size
    parts = collective.all_to_all_single(x.contiguous(), each, each, peers.group)
    return collective.wait_tensor(parts)  # type: ignore[no-any-return]


def add_up(x: Tensor, peers: Peers) -> Tensor:
    return peers.add_up(x)


def same(x: Tensor, peers: Peers) -> Tensor:
    return x.view_as(x)


def differentiable(forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Any:
    """`forward(x, *how)` with the gradient `backward(grad, *how)`; call its method `apply`."""
    there, back = forward, backward

    class Collective(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
            ctx.how = how
            return there(x, *how)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return back(grad, *ctx.how), *(None for _ in ctx.how)

    return Collective


Gather, Scatter = differentiable(gather, scatter), differentiable(scatter, gather)
Exchange = differentiable(exchange, exchange)
Copy, Sum = differentiable(same, add_up), differentiable(add_up, same)


# -- Counts and flags, reduced over gloo while the step computes.


class Pending:
    """A reduction over all ranks in progress, in int64 if all numbers are ints, else in float64."""

    def __init__(self, numbers: Sequence[float], mesh: Mesh, op: Any, copies: int = 1):
        """`copies`: how many ranks have each number, which then counts once in a sum."""
        exact = all(isinstance(number, int) for number in numbers)
        self._numbers = torch.tensor(numbers, dtype=torch.int64 if exact else torch.float64)
        self._copies = copies if mesh.all_ranks else 1
        self._work = None
        if mesh.all_ranks:
            self._work = dist.all_reduce(self._numbers, op, mesh.all_ranks, async_op=True)

    def wait(self) -> list[float]:
        if self._work is not None:
            self._work.wait()
            self._work = None  # gloo's second wait would not end
        numbers, copies = self._numbers.tolist(), self._copies
        return [n // copies if isinstance(n, int) else n / copies for n in numbers]


def sum_async(numbers: Sequence[float], mesh: Mesh) -> Pending:
    """Begin to add up numbers over the ranks that see different tokens; the others have equal ones."""
    return Pending(numbers, mesh, dist.ReduceOp.SUM, mesh.sizes.tp * mesh.sizes.pp)


def max_async(flags: Sequence[int], mesh: Mesh) -> Pending:
    """Begin to take the largest of each flag over all ranks, so that they act together."""
    return Pending(flags, mesh, dist.ReduceOp.MAX)


# -- Gradients, reduced in place on their device.


def sum_together(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    sums = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [s.view_as(t) for s, t in zip(sums, tensors, strict=True)])


def sum_over_tensor_ranks(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Add up the gradients of parameters that `tp` does not cut, after the backward pass.

    Its ranks have seen other tokens of the stream, or other heads (norms of queries).
    """
    if mesh.tp is None:
        return
    partial = (p for p in dict.fromkeys(parameters) if hasattr(p, "has_partial_gradient"))
    for grads in _by_kind(p.grad for p in partial if p.grad is not None).values():
        sum_together(grads, mesh.tp)


def norm_and_loss(
    parameters: Iterable[nn.Parameter], loss: Tensor, mesh: Mesh
) -> tuple[Tensor, Tensor]:
    """The 2-norm of the whole gradient, and the loss over all ranks, in one collective.

    The norm is float32, or float64 like the model. The host does not wait. Every rank divides the
    squares of its pieces by the number of ranks that hold them; ranks of `tp` have equal losses.
    """
    double = False
    kinds: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
    for p in dict.fromkeys(parameters):
        if (grad := p.grad) is not None:
            pieces = math.prod(group.size() for group in mesh.cutting_groups(p))
            holders = mesh.sizes.world // mesh.sizes.pp // pieces
            kinds.setdefault((holders, grad.device, grad.dtype), []).append(local_part(grad))
            double = double or p.dtype == torch.float64
    total = torch.zeros((), dtype=torch.float64, device=loss.device)
    for (holders, device, dtype), grads in kinds.items():
        wide = torch.promote_types(dtype, torch.float32)
        # On a CPU torch's norm over 38 million float32 elements is wrong by 0.27 %, with chunks by
        # 2e-9.
        most = AT_ONCE if device.type == "cpu" else math.inf
        norms, rests = list[Tensor](), [g for g in grads if 0 < g.numel() <= most]
        for g in (g.reshape(-1) for g in grads if g.numel() > most):
            chunked = g.numel() // CHUNK * CHUNK
            chunks = g[:chunked].view(-1, CHUNK)
            norms.append(torch.linalg.vector_norm(chunks, dim=1, dtype=wide))
            if chunked < g.numel():
                rests.append(g[chunked:])
        if rests:
            norms.append(torch.stack(torch._foreach_norm(rests, 2, dtype=wide)))
        if norms:
            squares = torch.cat(norms).double().square().sum()
            total += squares.to(total.device, non_blocking=True) / holders
    if mesh.all_ranks is not None:
        both = torch.stack([total, loss.double() / mesh.sizes.tp])
        dist.all_reduce(both, group=mesh.all_ranks if both.is_cpu else dist.group.WORLD)
        total, loss = both[0], both[1].to(loss.dtype)
    return total.sqrt().to(torch.float64 if double else torch.float32), loss


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply gradients by a scalar tensor, in place; the host waits only for offloaded ones."""
    every = (p.grad for p in dict.fromkeys(parameters) if p.grad is not None)
    for (device, dtype), grads in _by_kind(every).items():
        torch._foreach_mul_(grads, factor.detach().to(device, dtype))


def _by_kind(grads: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.device, grad.dtype), []).append(local_part(grad))
    return kinds
