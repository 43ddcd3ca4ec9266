"""From a bare model to one that computes on many ranks: activation checkpointing, compile, DDP or FSDP2, in this order.

What every strategy promises: after the backward pass of a step each parameter's gradient is the *sum over ranks* of the
gradient of that rank's loss. A rank's loss is its sum over valid tokens divided by the *global* number of valid tokens of
the step, so the sum is the gradient of the mean over all tokens, whatever the world, the accumulation and the padding.
DDP and FSDP2 average by themselves; here both are told to add.

Precision. The master weights and the reduction of gradients are float32 (float64 with `fp64`). bf16 and fp16 are autocast
in *every* strategy, so that all choose the same precision for each operation. FSDP2 in addition gathers the parameters of
the blocks in the low precision, which halves its traffic and changes nothing for a matrix, which autocast would round to the
same values; the gains and biases of the blocks' norms, which autocast would keep, are rounded too: the one difference between
the strategies (a relative 2^-9 of a gain). Embedding, final norm and head are gathered in float32.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from windlass.parallel import gloo
from windlass.parallel.dist import SHARDED, Ranks
from windlass.parallel.recompute import checkpoint_activations
from windlass.recipe import Recipe

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
NO_BUFFERS = "forward_sync_buffers"  # its name until torch 2.12: broadcast_buffers
if NO_BUFFERS not in inspect.signature(DistributedDataParallel.__init__).parameters:
    NO_BUFFERS = "broadcast_buffers"
WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def resolve_precision(precision: str, device: torch.device) -> str:
    """`auto` resolved: bf16 on a GPU that has it, else fp16 on a GPU, fp32 on a CPU."""
    if precision != "auto":
        return precision
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def parallelize(model: nn.Module, ranks: Ranks, recipe: Recipe) -> nn.Module:
    """Make `model` ready to train on `ranks` as `recipe.parallel` and `recipe.train` say.

    The model's parameters are on the meta device (they come out on the ranks' device, *uninitialised*: fill them in place
    afterwards) or hold values (rank 0's reach every rank). Names stay clean: see `named_parameters`. `model.blocks()` lists
    the units of sharding, checkpointing and compiling.

    Returns:
        The model itself (FSDP2 works in place) or a DistributedDataParallel around it; call it for the loss.
    """
    settings, blocks = recipe.parallel, list(model.blocks())  # type: ignore[operator]
    checkpoint_activations(blocks, settings.activation_checkpointing)
    if recipe.train.compile:
        for block in blocks:
            block.forward = _compiled(block.forward)
    on_meta = any(p.is_meta for p in model.parameters())
    if ranks.strategy in SHARDED:
        if not on_meta:
            _same_everywhere(model, ranks)
        _shard(model, blocks, ranks, recipe)
        if on_meta:
            _move(model, torch.device("cpu") if settings.offload else ranks.device, empty=True, buffers=ranks.device)
        return model
    _move(model, ranks.device, empty=on_meta)
    if ranks.strategy == "single":
        return model
    if not on_meta:
        _same_everywhere(model, ranks)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        **{NO_BUFFERS: False},  # no buffer of ours changes
        init_sync=False,  # done above, also where the world is one
        bucket_cap_mb=settings.bucket_mb,  # type: ignore[arg-type]
        gradient_as_bucket_view=True,
    )
    wrapped.register_comm_hook(None, _add)
    return wrapped


_plainly: list[None] = []


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    fast = torch.compile(forward)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (forward if _plainly else fast)(*args, **kwargs)

    return run


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, blocks run as they are written: with a cache that grows, each new length could have them compiled again."""
    _plainly.append(None)
    try:
        yield
    finally:
        _plainly.pop()


def _add(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A bucket's gradients added over the ranks (DDP's own reduction would average)."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


_add.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}  # DDP checks them, as types


def _shard(model: nn.Module, blocks: list[nn.Module], ranks: Ranks, recipe: Recipe) -> None:
    """FSDP2 over each block, then over the rest as one unit."""
    settings, low = recipe.parallel, LOW.get(resolve_precision(recipe.train.precision, ranks.device))
    reduced = torch.float32 if low else None
    in_blocks = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduced, cast_forward_inputs=False)
    in_root = MixedPrecisionPolicy(reduce_dtype=reduced, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if settings.offload else OffloadPolicy()
    gather_again = ranks.strategy != "shard_grad_op"
    for block in blocks:
        if low:
            _norms_in_float32(block)
        fully_shard(
            block, mesh=ranks.mesh, reshard_after_forward=gather_again, mp_policy=in_blocks, offload_policy=offload
        )
    fully_shard(model, mesh=ranks.mesh, reshard_after_forward=False, mp_policy=in_root, offload_policy=offload)
    gather, reduce = gloo.AllGather(), gloo.ReduceScatter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
            if ranks.device.type == "cpu":
                module.set_custom_all_gather(gather)  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
    model.keeps_gathered = not gather_again  # type: ignore[assignment]
    _prefetch([model, *blocks], settings.forward_prefetch, settings.backward_prefetch)


def _norms_in_float32(block: nn.Module) -> None:
    """Have each norm take its gathered gain and bias up to float32, as autocast does on CUDA but not on a CPU."""

    def layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, norm.normalized_shape, _up(norm.weight), _up(norm.bias), norm.eps)

    def rms_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, norm.normalized_shape, _up(norm.weight), norm.eps)

    for module in block.modules():
        for kind, forward in ((nn.LayerNorm, layer_norm), (nn.RMSNorm, rms_norm)):
            if type(module).forward is kind.forward:
                module.forward = functools.partial(forward, module)
                break
        else:
            if is_norm(module):
                module.forward = functools.partial(_raised, module, module.forward)


def is_norm(module: nn.Module) -> bool:
    """Whether a module of somebody's own is a normalisation: by its class's name, and its vectors as its only parameters."""
    parameters = [p for p in module.parameters() if p is not None]
    return "norm" in type(module).__name__.lower() and bool(parameters) and all(p.dim() <= 1 for p in parameters)


def _raised(norm: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A norm's own forward pass, with float32 in the place of what was gathered in a low precision."""
    low = {name: p.float() for name, p in norm.named_parameters() if p.dtype in LOW.values()}
    return torch.func.functional_call(norm, low, args, kwargs) if low else forward(*args, **kwargs)


def _up(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _prefetch(units: list[nn.Module], forward: int, backward: int) -> None:
    for i, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + forward])  # type: ignore[operator]
        if backward and i:
            unit.set_modules_to_backward_prefetch(units[max(1, i - backward) : i][::-1])  # type: ignore[operator]


def _move(model: nn.Module, device: torch.device, empty: bool, buffers: torch.device | None = None) -> None:
    """Parameters and buffers to a device, with (`empty`) or without leaving their values behind; ties stay ties."""
    done: dict[Tensor, Any] = {}

    def moved(tensor: Tensor, target: torch.device) -> Tensor:
        return torch.empty_like(tensor, device=target) if empty and tensor.is_meta else tensor.to(target)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device != device:
                if parameter not in done:
                    done[parameter] = nn.Parameter(moved(parameter.data, device), requires_grad=parameter.requires_grad)
                module._parameters[name] = done[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != (buffers or device):
                module._buffers[name] = done.setdefault(buffer, moved(buffer, buffers or device))


@torch.no_grad()
def _same_everywhere(model: nn.Module, ranks: Ranks) -> None:
    """Rank 0's values on all ranks: a model that a user made may differ from process to process."""
    if ranks.world > 1:
        for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
            dist.broadcast(tensor.data, src=0)


def autocast(recipe: Recipe, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context for a forward pass (training and evaluation): low precision for the operations that bear it."""
    low = LOW.get(resolve_precision(recipe.train.precision, device))
    return torch.autocast(device.type, dtype=low) if low else contextlib.nullcontext()


@contextlib.contextmanager
def sync_gradients(model: nn.Module, on: bool) -> Iterator[None]:
    """Around forward and backward of one micro-batch: reduce the gradients over the ranks after it (`on`, the last of the
    step), or keep adding to this rank's own. Between the micro-batches FSDP2 then holds whole gradients.

    ZeRO-2 (`shard_grad_op`) keeps its parameters gathered over the whole step.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)
        if model.keeps_gathered:
            model.set_reshard_after_backward(on)
        yield
    elif isinstance(model, DistributedDataParallel) and not on:
        with model.no_sync():
            yield
    else:
        yield


def unwrap(model: nn.Module) -> nn.Module:
    """The bare model inside."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def clean_name(name: str) -> str:
    """A parameter's or module's name without what wrappers put into it."""
    for prefix in WRAPPERS[1:]:
        name = name.replace(prefix, "")
    return name


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once (a tied one under its first name), under its name in the bare model."""
    for name, parameter in unwrap(model).named_parameters():
        yield clean_name(name), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Likewise the buffers."""
    for name, buffer in unwrap(model).named_buffers():
        yield clean_name(name), buffer
