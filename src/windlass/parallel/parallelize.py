"""A model for a device and ranks: its division, activation checkpointing, compile, DDP or FSDP2.

Gradients are *summed* over ranks, because a rank's loss is its sum over the *global* number of
unmasked labels. FSDP2 also gathers embeddings and norms in low precision; no other strategy does.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint as recompute

from windlass.errors import UserError
from windlass.model.attention import HALF
from windlass.model.gpt import GPT
from windlass.model.loss import chunk_loss
from windlass.model.quantised import Bf16Embedding, use_float8
from windlass.model.sharding import (
    Cut,
    Peers,
    add_mixin,
    blocks_of,
    is_fsdp,
    materialise,
    unwrap,
    with_cut,
)
from windlass.model.size import unit_blocks
from windlass.parallel.mesh import Mesh
from windlass.parallel.pipeline import keep_stages, stage_of
from windlass.parallel.ranks import Ranks
from windlass.parallel.tensor import divide_gpt, divide_hf
from windlass.recipe import Recipe
from windlass.recipe.settings import ParallelSettings
from windlass.recipe.strategies import Strategy

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16}
"""The precision of autocast and of gathered parameters."""


def parallelize(model: nn.Module, ranks: Ranks, recipe: Recipe) -> nn.Module:
    """Make `model` ready to train on `ranks`; returns it, or a DistributedDataParallel around it.

    Parameters on the meta device get storage, *uninitialised*; others get rank 0's values.
    """
    on_meta = any(p.is_meta for p in model.parameters())
    if not on_meta and ranks.world > 1:  # a user's model may differ from process to process
        for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
            dist.broadcast(tensor.data, src=0)
    precision = resolve_precision(recipe.train.precision, ranks.device)
    cuts, partial = divide(model, ranks.mesh)
    if ranks.mesh.pp is not None:
        keep_stages(model, ranks.mesh, ranks.device, recipe)
    blocks = repeated_parts(model, recipe, ranks)
    if recipe.train.precision == "float8":
        use_float8(blocks, ranks.device)
    checkpoint_activations(blocks, recipe.parallel.activation_checkpointing)
    if recipe.train.compile is True:
        # Dynamo would split a block under DDP at the ends of buckets.
        torch._dynamo.config.optimize_ddp = False
        # Rows of varying length have the same graph in the first step of a start as in any other.
        compiled = functools.partial(torch.compile, dynamic=recipe.data.ragged_ or None)
        for block in blocks:
            block.forward = compiled(block.forward)
        for head in (m for m in model.modules() if hasattr(m, "compiled_loss")):
            head.compiled_loss = compiled(chunk_loss)
    sharded = ranks.strategy.shards_parameters
    low = LOW.get(precision)
    if low and (sharded or recipe.train.master == "bf16"):
        raise_tables_and_norms(model, ranks.device)
    if sharded:
        shard(model, blocks, ranks, recipe.parallel, low)
    if on_meta or not sharded:
        offload = sharded and recipe.parallel.offload
        materialise(model, torch.device("cpu") if offload else ranks.device, ranks.device)
    for name, parameter in model.named_parameters():
        with_cut(parameter, cuts.get(name))
        if name in partial:
            parameter.has_partial_gradient = True  # type: ignore[attr-defined]
    if sharded:
        return model
    if ranks.strategy.shards_optimizer:
        for p in model.parameters():
            p.data = p.data.contiguous()  # the fused optimizers update rows as consecutive numbers
    replicas = ranks.mesh.replicas
    # One rank has nothing to exchange. A pipeline adds up gradients itself.
    if replicas is None or replicas.size() == 1 or ranks.mesh.pp is not None:
        return model
    return replicate(model, replicas.get_group(), ranks.device, recipe)


def divide(model: nn.Module, mesh: Mesh) -> tuple[dict[str, Cut], set[str]]:
    """Keep this rank's part of the matrices of a recipe's model; returns the cuts of parameters by
    name, and the names of parameters with partial gradients."""
    if mesh.sizes.tp * mesh.sizes.cp == 1:
        return {}, set()
    tensor, context = (
        Peers(group.group_name, dist.get_rank(group), group.size()) if group else None
        for group in (mesh.tp, mesh.cp)
    )
    if isinstance(model, GPT):
        return divide_gpt(model, tensor, context)
    assert tensor is not None and context is None  # the recipe rejects others for transformers
    return divide_hf(model, tensor)


def repeated_parts(model: nn.Module, recipe: Recipe, ranks: Ranks) -> list[nn.Module]:
    """Its blocks; none if a user's module does not name them, or UserError if they are needed."""
    if (blocks := blocks_of(model)) is not None:
        return blocks
    needs = {
        f"parallel.strategy = {ranks.strategy.name}": ranks.strategy.shards_parameters,
        "parallel.activation_checkpointing": recipe.parallel.activation_checkpointing != "none",
        "train.compile": recipe.train.compile is True,
        'train.precision = "float8"': recipe.train.precision == "float8",
        'optim.kind = "muon"': recipe.optim.kind == "muon",
    }
    if settings := " and ".join(setting for setting, needed in needs.items() if needed):
        raise UserError(
            f"{settings}: {type(model).__name__} does not say which parts repeat; "
            "give it a method that does, as `def blocks(self): return list(self.layers)`"
        )
    return []


def shard(
    model: nn.Module,
    blocks: list[nn.Module],
    ranks: Ranks,
    settings: ParallelSettings,
    low: torch.dtype | None,
) -> None:
    """FSDP2 over blocks, the model's `ends()`, and the rest; it gathers in the precision `low`.

    Small blocks of a model that runs them in order (it has `ends`) share a unit.
    """
    from torch.distributed import fsdp

    pinned = ranks.device.type == "cuda"
    shard_unit = functools.partial(
        fsdp.fully_shard,
        mesh=ranks.mesh.part("dp_replicate", "dp_shard"),
        offload_policy=fsdp.CPUOffloadPolicy(pinned) if settings.offload else fsdp.OffloadPolicy(),
        mp_policy=fsdp.MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
        ),
    )
    first, last = model.ends() if hasattr(model, "ends") else ([], [])  # type: ignore[operator]
    in_order = hasattr(model, "ends") and ranks.mesh.pp is None
    numbers = sum(p.numel() for block in blocks for p in block.parameters())
    each = unit_blocks(len(blocks), numbers) if in_order else 1
    units = [blocks[i : i + each] for i in range(0, len(blocks), each)]
    if first:
        units.insert(0, first)
    keeps = ranks.strategy.keeps_gathered
    for unit in units:
        # The backward pass begins with the last one, unless a pipeline waits.
        used_next = in_order and unit is units[-1]
        shard_unit(unit, reshard_after_forward=not (keeps or used_next))
    if last:
        shard_unit(last, reshard_after_forward=False)
    shard_unit(model, reshard_after_forward=False)
    for module in model.modules():
        if is_fsdp(module):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo lacks a scaled sum
    heads: list[Any] = [model, *(unit[0] for unit in units), *last[:1]]
    ahead, back = settings.forward_prefetch, settings.backward_prefetch
    for i, unit in enumerate(heads):
        if ahead:
            unit.set_modules_to_forward_prefetch(heads[i + 1 : i + 1 + ahead])
        if back and i:
            unit.set_modules_to_backward_prefetch(heads[max(1, i - back) : i][::-1])


def replicate(
    model: nn.Module, group: dist.ProcessGroup, device: torch.device, recipe: Recipe
) -> DistributedDataParallel:
    # `training.state.share_buffers` does that after each step. torch < 2.12 has another name.
    arguments = inspect.signature(DistributedDataParallel.__init__).parameters
    has_new_name = "forward_sync_buffers" in arguments
    sync_buffers = "forward_sync_buffers" if has_new_name else "broadcast_buffers"
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=group,
        init_sync=False,  # `parallelize` has sent rank 0's values
        bucket_cap_mb=recipe.parallel.bucket_mb,
        find_unused_parameters=recipe.parallel.find_unused_parameters,
        gradient_as_bucket_view=True,
        **{sync_buffers: False},
    )

    def add(_, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
        reduced = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return reduced.get_future().then(lambda future: future.value()[0])

    wrapped.register_comm_hook(None, add)
    if not wrapped.find_unused_parameters:  # else DDP keeps its first buckets
        # DDP would cut its buckets in the first step. The place of a number in a bucket decides in
        # which order three ranks or more add it, so a resume would round differently.
        trained = [p for p in wrapped.parameters() if p.requires_grad]
        wrapped.reducer.prepare_for_forward()
        wrapped.reducer.prepare_for_backward([])
        torch.stack([0.0 * p.sum() for p in trained]).sum().backward()
        wrapped.zero_grad(set_to_none=True)  # the next forward pass cuts them
    return wrapped


def check_reduced(model: nn.Module) -> None:
    """UserError if DDP still waits for a gradient; it would raise only after a wrong update."""
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters:
        return
    try:
        model.reducer._rebuild_buckets()  # `replicate` has had them cut, so it only checks
    except RuntimeError as error:
        if not (match := re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))):
            raise
        names = [name for name, p in model.module.named_parameters() if p.requires_grad]
        unused = [names[int(number)] for number in match[1].split()]
        raise UserError(
            f"this step's loss does not use {', '.join(unused[:4])} ({len(unused)} in all), so DDP "
            "cannot add up gradients: set requires_grad_(False) if no step does, else "
            "parallel.find_unused_parameters=true"
        ) from None


@contextlib.contextmanager
def sync_gradients(model: nn.Module, strategy: Strategy, last: bool) -> Iterator[None]:
    """Context of a micro-batch's passes: reduces gradients after the step's `last` one.

    If the strategy `reduces_each`, FSDP2 adds to shards before that.
    """
    if is_fsdp(model):
        model.set_requires_gradient_sync(last or strategy.reduces_each)
        model.set_requires_all_reduce(last)
        if strategy.keeps_gathered:
            model.set_reshard_after_backward(last)
    skip = isinstance(model, DistributedDataParallel) and not last
    with model.no_sync() if skip else contextlib.nullcontext():  # type: ignore[operator]
        yield


aten, collective = torch.ops.aten, torch.ops._c10d_functional
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm")
SAVED = {getattr(aten, name).default for name in PRODUCTS}
# Sums over the ranks of `tp`; the gathered inputs would be larger.
SAVED |= {getattr(collective, name).default for name in ("reduce_scatter_tensor", "all_reduce")}
ATTENTION = ("_scaled_dot_product_", "_varlen_attn.")  # in the names of operations


def checkpoint_activations(blocks: list[nn.Module], how: str) -> None:
    """Have each block drop its activations and compute them again in the backward pass."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> recompute.CheckpointPolicy:
        if op in SAVED:
            return recompute.CheckpointPolicy.MUST_SAVE
        if any(name in str(op) for name in ATTENTION):
            names = [argument.name for argument in op._schema.arguments]
            # Attention with dropout is recomputed. Otherwise the generator would be in another
            # state for the dropout after it.
            if not (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p"):
                return recompute.CheckpointPolicy.MUST_SAVE
        return recompute.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(recompute.create_selective_checkpoint_contexts, policy)
    context = {"context_fn": contexts} if how == "selective" else {}

    def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return recompute.checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)

        return run

    for block in blocks if how != "none" else ():
        block.forward = recomputed(block.forward)


@contextlib.contextmanager
def varying_shapes() -> Iterator[None]:
    """Context of passes of varying shapes: compiled blocks run eagerly, attention without plans."""
    # Importing Dynamo takes seconds; if nobody has, nothing is compiled.
    compiler = sys.modules.get("torch._dynamo")
    stance = torch.compiler.set_stance("force_eager") if compiler else contextlib.nullcontext()
    with stance, attention_without_plans():
        yield


@contextlib.contextmanager
def attention_without_plans() -> Iterator[None]:
    """Without cuDNN's attention, which takes about 0.4 s to plan for each new shape."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def owned_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters that count in the gradient norm; a table on two stages counts once."""
    stage = stage_of(model)
    copies = stage.copies if stage else ()
    named = unwrap(model).named_parameters()
    return [p for name, p in named if p.requires_grad and name not in copies]


def resolve_precision(precision: str, device: torch.device) -> str:
    """`auto` resolved: bf16 on a GPU that has it, else fp16 on a GPU, fp32 on a CPU."""
    if precision != "auto":
        return precision
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def autocast(recipe: Recipe, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    low = LOW.get(resolve_precision(recipe.train.precision, device))
    return torch.autocast(device.type, dtype=low) if low else contextlib.nullcontext()


def raise_tables_and_norms(model: nn.Module, device: torch.device) -> None:
    """Have embeddings and norms compute in float32 although their parameters have low precision."""
    for module in list(model.modules()):
        kind, vectors = type(module), [p.dim() <= 1 for p in module.parameters()]
        is_norm = "norm" in kind.__name__.lower() and bool(vectors) and all(vectors)
        # Our norms raise their own weights; on CUDA autocast raises all.
        is_foreign = is_norm and not kind.__module__.startswith("windlass.")
        is_table = isinstance(module, nn.Embedding) and not isinstance(module, Bf16Embedding)
        if is_table or (is_foreign and device.type == "cpu"):
            add_mixin(module, InFloat32)


class InFloat32(nn.Module):
    """Mixin of a module that raises its gathered low-precision parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parameters = self.named_parameters()
        wide = {name: p.float() for name, p in parameters if p.dtype in HALF}
        if not wide:
            return super().forward(*args, **kwargs)
        # It comes back here with the wide parameters in their places.
        return torch.func.functional_call(self, wide, args, kwargs)
