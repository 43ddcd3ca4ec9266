"""From a bare model to one that computes on many ranks: activation checkpointing, compile, then DDP or FSDP2.

After the backward pass of a step each parameter's gradient is the *sum over ranks* of the gradient of that rank's loss, which
is its sum over unmasked labels divided by the *global* number of them: so it is the gradient of the mean over all tokens.
DDP and FSDP2 average by themselves; here both are told to add.

Master weights and reductions are float32 (float64 with `fp64`); bf16 and fp16 are autocast in every strategy. FSDP2 also
gathers parameters in low precision. That changes nothing for the matrix of a linear layer, which autocast rounds anyway. It
rounds embeddings, and gains and biases of norms (by a relative 2^-9 in bf16): the one difference between the strategies.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from windlass.errors import UserError
from windlass.parallel.dist import Ranks
from windlass.recipe import Recipe

aten = torch.ops.aten
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
MATRIX_PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.linear.default,
}


def resolve_precision(precision: str, device: torch.device) -> str:
    """`auto` resolved: bf16 on a GPU that has it, else fp16 on a GPU, fp32 on a CPU."""
    if precision != "auto":
        return precision
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def autocast(recipe: Recipe, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context for a forward pass (training and evaluation): low precision for the operations that bear it."""
    low = LOW.get(resolve_precision(recipe.train.precision, device))
    return torch.autocast(device.type, dtype=low) if low else contextlib.nullcontext()


def parallelize(model: nn.Module, ranks: Ranks, recipe: Recipe) -> nn.Module:
    """Make `model` ready to train on `ranks` as `recipe.parallel` and `recipe.train` say.

    Parameters on the meta device come out on the ranks' device, *uninitialised*; of others rank 0's values reach every rank.
    `model.blocks()` lists the units of sharding, checkpointing and compiling; without any of these a model needs none. Returns
    the model itself (FSDP2 works in place), or on several ranks a DistributedDataParallel around it; call it for the loss.
    """
    settings, blocks = recipe.parallel, repeated_parts(model, recipe, ranks)
    checkpoint_activations(blocks, settings.activation_checkpointing)
    if recipe.train.compile:
        # With it Dynamo splits a block under DDP at the ends of buckets. `Ranks` restores it.
        torch._dynamo.config.optimize_ddp = False
        for block in blocks:
            block.forward = torch.compile(block.forward)
    on_meta = any(p.is_meta for p in model.parameters())
    if not ranks.strategy.shards_parameters:
        _move(model, ranks.device, ranks.device)
    if (
        not on_meta and ranks.world > 1
    ):  # a model that a user built may differ from process to process
        for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
            dist.broadcast(tensor.data, src=0)
    if ranks.strategy.shards_parameters:
        _shard(model, blocks, ranks, recipe)
        if on_meta:
            _move(model, torch.device("cpu") if settings.offload else ranks.device, ranks.device)
        return model
    for p in model.parameters() if ranks.strategy.shards_optimizer else ():
        p.data = p.data.contiguous()  # torch's fused optimizers take rows as consecutive numbers
    replicas = ranks.mesh.replicas
    # On one rank there is nothing to exchange, and DDP cannot repeat a step in which memory ran out.
    if replicas is None or replicas.size() == 1:
        return model
    group = replicas.get_group()
    is_new = (
        "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    )  # torch >= 2.12
    options: dict[str, Any] = {
        "process_group": group,
        "device_ids": [ranks.device] if ranks.device.type == "cuda" else None,
        "init_sync": False,  # done above
        "bucket_cap_mb": settings.bucket_mb,
        "gradient_as_bucket_view": True,
        "forward_sync_buffers"
        if is_new
        else "broadcast_buffers": False,  # no buffer of ours changes
    }
    wrapped = DistributedDataParallel(model, **options)
    # A bucket's gradients added over the ranks (DDP's own hook averages). A lambda, because DDP rejects string annotations.
    wrapped.register_comm_hook(
        None,
        lambda _, bucket: (
            dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            .get_future()
            .then(lambda f: f.value()[0])
        ),
    )
    return wrapped


def repeated_parts(model: nn.Module, recipe: Recipe, ranks: Ranks) -> list[nn.Module]:
    """`model.blocks()`; of a user's own module without it none, or UserError where they are needed."""
    if callable(blocks := getattr(model, "blocks", None)):
        return list(blocks())
    needs = [f"parallel.strategy = {ranks.strategy.name}"] * ranks.strategy.shards_parameters
    needs += (
        ["parallel.activation_checkpointing"]
        if recipe.parallel.activation_checkpointing != "none"
        else []
    )
    needs += ["train.compile"] if recipe.train.compile else []
    if needs:
        lack = (
            f"{' and '.join(needs)}: {type(model).__name__} does not say which parts of it repeat"
        )
        raise UserError(
            f"{lack}; give it a method that does, as `def blocks(self): return list(self.layers)`"
        )
    return []


def _shard(model: nn.Module, blocks: list[nn.Module], ranks: Ranks, recipe: Recipe) -> None:
    """FSDP2 over each block, over the model's `ends()` before and after them, and over the rest as one unit."""
    settings, low = (
        recipe.parallel,
        LOW.get(resolve_precision(recipe.train.precision, ranks.device)),
    )
    reduced = torch.float32 if low else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduced, cast_forward_inputs=False)
    offload = (
        CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
        if settings.offload
        else OffloadPolicy()
    )
    gather_again = not ranks.strategy.keeps_gathered
    mesh = ranks.mesh.part("dp_replicate", "dp_shard")
    shard = functools.partial(fully_shard, mesh=mesh, offload_policy=offload, mp_policy=policy)
    ends: Any = getattr(model, "ends", lambda: ([], []))
    first, last = ends()

    if low:
        # The residual stream stays in float32, and the gradients of a token's occurrences are added in float32.
        wide = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        if ranks.device.type == "cpu":  # on CUDA autocast raises norms by itself
            wide += [module for module in model.modules() if is_foreign_norm(module)]
        compute_in_float32(wide)
    for unit in ([first] if first else []) + [[block] for block in blocks]:
        shard(unit, reshard_after_forward=gather_again)
    if last:  # the backward pass begins with it
        shard(last, reshard_after_forward=False)
    shard(model, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
    units: list[Any] = [model, *first[:1], *blocks, *last[:1]]
    for i, unit in enumerate(units):
        if settings.forward_prefetch:
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + settings.forward_prefetch])
        if settings.backward_prefetch and i:
            unit.set_modules_to_backward_prefetch(
                units[max(1, i - settings.backward_prefetch) : i][::-1]
            )
    model.keeps_gathered = not gather_again  # type: ignore[assignment]  # both for `sync_gradients`
    each = settings.reduce_each_micro_batch
    model.reduces_each = ranks.strategy.reduces_each if each == "auto" else each  # type: ignore[assignment]


def is_foreign_norm(module: nn.Module) -> bool:
    """Whether a module is a norm of a model library, by its class's name and parameters; ours raises its own weights."""
    kind, vectors = type(module), [p.dim() <= 1 for p in module.parameters()]
    is_norm = "norm" in kind.__name__.lower() and bool(vectors) and all(vectors)
    return is_norm and not kind.__module__.startswith("windlass.")


def compute_in_float32(modules: list[nn.Module]) -> None:
    """Have modules raise their gathered low-precision parameters to float32 in each forward pass.

    Each class of modules gets one subclass. Dynamo guards a function that is set on a module by its identity, so that a
    function for each module would compile every block again.
    """
    subclasses: dict[type[nn.Module], type[nn.Module]] = {}
    for module in modules:
        kind = type(module)
        if kind not in subclasses:

            def forward(self: Any, *args: Any, _kind: Any = kind, **kwargs: Any) -> Any:
                wide = {
                    name: p.float()
                    for name, p in self.named_parameters()
                    if p.dtype in LOW.values()
                }
                # `functional_call` comes back here with the wide parameters in their places.
                return (
                    torch.func.functional_call(self, wide, args, kwargs)
                    if wide
                    else _kind.forward(self, *args, **kwargs)
                )

            subclasses[kind] = type(kind.__name__, (kind,), {"forward": forward})
        module.__class__ = subclasses[kind]


def _move(model: nn.Module, device: torch.device, buffer_device: torch.device) -> None:
    """Parameters and buffers to their devices, tied ones together; those on the meta device come out without values."""
    moved: dict[Tensor, Any] = {}
    for module in model.modules():
        for tensors, target in ((module._parameters, device), (module._buffers, buffer_device)):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device == target:
                    continue
                if tensor not in moved:
                    data = tensor.data
                    moved[tensor] = (
                        torch.empty_like(data, device=target) if tensor.is_meta else data.to(target)
                    )
                    if isinstance(tensor, nn.Parameter):
                        moved[tensor] = nn.Parameter(
                            moved[tensor], requires_grad=tensor.requires_grad
                        )
                tensors[name] = moved[tensor]


@contextlib.contextmanager
def sync_gradients(model: nn.Module, last: bool) -> Iterator[None]:
    """Around forward and backward of one micro-batch: reduce the gradients over the ranks after the `last` one of the step.

    Before that, DDP and FSDP2 add to this rank's own whole gradients; with `parallel.reduce_each_micro_batch` FSDP2 adds to
    shards, and between sharding groups (`hybrid_shard`) it still reduces after the last one only. ZeRO-2 (`shard_grad_op`) has its parameters gathered over the whole step.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or bool(model.reduces_each))
        model.set_requires_all_reduce(last)
        if model.keeps_gathered:
            model.set_reshard_after_backward(last)
    skip = isinstance(model, DistributedDataParallel) and not last
    with model.no_sync() if skip else contextlib.nullcontext():  # type: ignore[operator]
        yield


def checkpoint_activations(blocks: list[nn.Module], how: str) -> None:
    """Have each block drop its activations in the forward pass and compute them again in the backward pass.

    `full` recomputes the whole block; `selective` saves what matrix products and attention gave. The generators' states are
    restored for the recomputation, so that dropout draws the same masks.
    """
    contexts = functools.partial(create_selective_checkpoint_contexts, selective_policy)
    context = {"context_fn": contexts} if how == "selective" else {}

    def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)

        return run

    for block in blocks if how != "none" else ():
        block.forward = recomputed(block.forward)


def selective_policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of `selective`: save the outputs of matrix products and attention, recompute the rest."""
    if op in MATRIX_PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    if "_scaled_dot_product_" in str(op):
        names = [argument.name for argument in op._schema.arguments]
        # Attention that draws dropout itself is recomputed: if it were skipped, the generator would stand elsewhere for the
        # dropout after it, and the masks would differ from those of the forward pass.
        if not (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p"):
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def varying_shapes() -> Iterator[None]:
    """Around passes whose shapes vary, outside the training: compiled blocks run eagerly, and attention does not plan.

    A compiled block that has seen other sizes is compiled with sizes that vary from then on, for the training too.
    """
    compiler = sys.modules.get(
        "torch._dynamo"
    )  # loading it takes seconds, and without it nothing is compiled
    stance = torch.compiler.set_stance("force_eager") if compiler else contextlib.nullcontext()
    with stance, attention_without_plans():
        yield


@contextlib.contextmanager
def attention_without_plans() -> Iterator[None]:
    """Inside, attention on CUDA is flash or memory-efficient: cuDNN's takes about 0.4 s to plan for each new shape."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def unwrap(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
