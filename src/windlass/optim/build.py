"""From the recipe's `[optim]` to an optimizer over a model's parameters, each in one group."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from windlass.errors import UserError, did_you_mean, first_line, plural
from windlass.model.sharding import blocks_of, cut_of, whole_shape, with_cut
from windlass.optim.adamw import new_state
from windlass.optim.muon import MuonAdamW
from windlass.optim.shard import ShardedOptimizer, own_rows, placement
from windlass.recipe.settings import OptimSettings


def library_optimizer(settings: OptimSettings) -> type[Any] | None:
    """The class in `torch.optim` or `pytorch_optimizer`; None for ours. UserError for `options`
    that it does not take."""
    library, _, name = settings.kind.rpartition(".")
    if not library:
        return None
    optimizer: type[Any] = getattr(importlib.import_module(library), name)
    parameters = inspect.signature(optimizer).parameters.values()
    taken = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
    taken -= {"params", "lr", "weight_decay"}
    for option in settings.options:
        if option not in taken:
            instead = did_you_mean(option, taken)
            raise UserError(f"optim.options: {settings.kind} takes no {option}; {instead}")
    try:  # the class checks the values
        optimizer([nn.Parameter(torch.ones(1))], lr=settings.lr, **settings.options)
    except Exception as error:  # a library may raise anything
        text = first_line(error)
        raise UserError(f"optim.options: {settings.kind} rejects them: {text}") from None
    return optimizer


ParameterGroup = dict[str, Any]
"""`name`, `params`, `base_lr`, `lr`, `weight_decay`, and `muon` if the optimizer is Muon."""


def build_optimizer(
    model: nn.Module,
    settings: OptimSettings,
    device_type: str,
    replicas: DeviceMesh | None = None,
    shard_state: bool = False,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """The optimizer of a recipe, for a parallelized and unwrapped model; `set_lr` sets its rate.

    `device_type` is the device that computes, also if parameters are offloaded. The `replicas`
    hold equal plain parameters: with `muon` they share the work, and with `shard_state` divide the
    optimizer state. `seed`: for the rounding of bf16 weights and 8-bit state.
    """
    groups = make_groups(model, settings)
    if not groups:
        problem = "every parameter of your model is frozen"
        raise UserError(f"{problem}: set requires_grad of some to True")
    library = library_optimizer(settings)
    mesh, rows = replicas if shard_state else None, dict[nn.Parameter, nn.Parameter]()
    names = {p: name for name, p in model.named_parameters()}
    for g in groups:
        if library is None:
            g["names"] = [names[p] for p in g["params"]]
        if mesh is not None:
            fused_on_cpu = device_type == "cpu" and (not library or settings.options.get("fused"))
            any_row = not fused_on_cpu or g.get("muon", False)  # see LINE_BYTES
            for p in g["params"]:
                part = own_rows(p, mesh, placement(p, mesh, any_row))
                rows[p] = with_cut(nn.Parameter(part), cut_of(p))
            g["params"] = [rows[p] for p in g["params"]]
    if library is None:
        optimizer: torch.optim.Optimizer = MuonAdamW(
            groups,
            momentum=settings.muon_momentum,
            betas=settings.betas,
            # muP: all gradients shrink as the width grows (arXiv 2203.03466, B.3).
            eps=settings.eps / getattr(model, "width_multiple", 1.0),
            eight_bit=settings.kind == "adamw8bit",
            seed=seed,
            device_type=device_type,
            group=replicas.get_group() if replicas is not None else None,
        )
        # The state is created now: if memory runs out, no update has changed a parameter yet.
        for g in optimizer.param_groups:
            for p in g["params"]:
                optimizer.state[p] = new_state(p.detach(), g)
    else:
        optimizer = library(groups, lr=settings.lr, **settings.options)
    return ShardedOptimizer(rows, optimizer, mesh) if mesh is not None and rows else optimizer


def make_groups(model: Any, settings: OptimSettings) -> list[ParameterGroup]:
    """Groups `decay`, `no_decay`; with Muon `muon.decay` (the blocks' matrices), `adamw.decay`, ...

    AdamW updates embeddings, positions, the head, biases and norms, which are not linear maps
    between hidden spaces. `matrix_parts(name)` of a model has the rows of each matrix stacked in a
    parameter, because queries, keys and values are orthogonalised separately. Muon's author advises
    both.

    With muP, `hidden.decay` has the blocks' matrices with AdamW's learning rate / `width_multiple`
    (arXiv 2203.03466, table 8). Its weight decay times this, so that a step shrinks weights equally
    at any width (arXiv 2405.13698). Muon's update has the right size at any width (arXiv
    2310.17813), because its spectral norm does not depend on it: its groups stay.
    """
    multiple, is_muon = getattr(model, "width_multiple", 1.0), settings.kind == "muon"
    inside, decay = set[nn.Parameter](), settings.weight_decay
    if is_muon or multiple != 1:
        for block in blocks_of(model) or ():  # `parallelize` rejects a model without blocks
            inside |= {p for p in block.parameters() if p.ndim == 2}
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for p in names if p in inside]
    rest = [p for p in names if p not in inside]
    # The prefix of the groups' names, their parameters, peak learning rate and weight decay.
    sets = [("", rest, settings.lr, decay)]
    sets += [("hidden.", matrices, settings.lr / multiple, decay * multiple)]
    if is_muon:
        sets = [("muon.", matrices, settings.muon_lr, decay), ("adamw.", rest, settings.lr, decay)]
    groups = list[ParameterGroup]()
    for prefix, parameters, lr, some_decay in sets:
        everything = settings.decay_on == "all"  # else matrices, by their dimensions in the whole
        decayed = [p for p in parameters if everything or p.ndim >= 2]
        others = [p for p in parameters if not everything and p.ndim < 2]
        for kind, params, own in (("decay", decayed, some_decay), ("no_decay", others, 0.0)):
            group = {"name": prefix + kind, "params": params, "base_lr": lr, "lr": lr}
            groups += [group | {"weight_decay": own}] if params else []
    split = getattr(model, "matrix_parts", lambda name: ())
    for g in groups if is_muon else ():
        g["muon"] = g["name"].startswith("muon.")
        if g["muon"]:
            g["parts"] = [tuple(split(names[p])) or (whole_shape(p)[0],) for p in g["params"]]
    return groups


def count_groups(groups: list[ParameterGroup]) -> list[dict[str, Any]]:
    """The tensors and parameters of each group, with its peak learning rate and weight decay."""
    counted = []
    for g in groups:
        counts = {"tensors": len(g["params"]), "parameters": sum(p.numel() for p in g["params"])}
        peaks = {"lr": g["base_lr"], "weight_decay": g["weight_decay"]}
        counted.append({"name": g["name"]} | peaks | counts)
    return counted


def describe_groups(groups: list[dict[str, Any]]) -> str:
    """As text: decay: 26 tensors with 10,740,096 parameters; no_decay: 13 tensors with 4,992 ..."""
    differ = len({g["lr"] for g in groups}) > 1
    return "; ".join(
        f"{g['name']}: {plural(g['tensors'], 'tensor')} with {g['parameters']:,} parameters"
        + f", lr {g['lr']:.3g}" * differ
        for g in groups
    )
