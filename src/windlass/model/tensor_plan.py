"""How tensor parallelism divides a model of `transformers`: the plan that its architecture declares.

The plan (`tp_plan`) names a style for modules, as "model.layers.*.mlp.up_proj": "colwise". `check`
reads it and rejects a model that `parallel.tensor` cannot divide by it, such as one with experts.
"""

from __future__ import annotations

import math
import re
from typing import Any

from torch import nn

from windlass.errors import UserError

COLUMNS = ("colwise", "colwise_gather_output")
ROWS = ("rowwise", "rowwise_split_input")
"""Styles of linear layers: with some of the outputs, with some of the inputs."""
SHARED = "replicated_with_grad_allreduce"
"""A module with whole parameters that serves this rank's heads only, as the norm of queries."""
WITHOUT_EFFECT = ("local_params", "replicate")  # on plain tensors


def check(model: Any, ranks: int) -> dict[str, str]:
    """The style of each module that this number of ranks divide.

    UserError if Windlass cannot divide the network.
    """
    plan, kind = plan_of(model), type(model).__name__
    modules, advice = dict(model.named_modules()), "use data parallelism (parallel.tensor=1)"
    if any(".lora_" in name for name, _ in model.named_parameters()):
        problem = "Windlass does not divide a model with adapters (model.lora)"
        raise UserError(f"parallel.tensor = {ranks}: {problem}: {advice}")
    if not plan:
        raise UserError(f"parallel.tensor = {ranks}: {kind} has no tp_plan: {advice}")
    for name, style in plan.items():
        linear = isinstance(modules.get(name), nn.Linear)
        if name not in modules or style not in (SHARED, *(COLUMNS + ROWS if linear else ())):
            problem = f'{kind} divides {name} by the style "{style}", which Windlass does not have'
            raise UserError(f"parallel.tensor = {ranks}: {problem}: {advice}")
    for name, is_shared in between(model, plan).items():
        if not is_shared:
            problem = f"{kind}'s tp_plan does not say how to divide {name}"
            raise UserError(f"parallel.tensor = {ranks}: {problem}: {advice}")
        plan[name] = SHARED
    for name in attention_layers(plan):
        if has_dropout(modules[name.rpartition(".")[0]]):
            problem = f"Windlass does not divide the dropout in the attention of {kind}"
            raise UserError(f"parallel.tensor = {ranks}: {problem}: {advice}")
    counts = head_counts(model, plan)
    if unfit := [count for count in counts if count % ranks]:
        fit = [n for n in range(1, ranks) if math.gcd(*counts) % n == 0]
        heads = "attention heads" if max(unfit) == max(counts) else "key and value heads"
        problem = f"{ranks} ranks do not divide the {max(unfit)} {heads} of {kind}"
        raise UserError(f"parallel.tensor: {problem}; write {max(fit)}")
    return plan


def plan_of(model: Any) -> dict[str, str]:
    """The plan of a network with the names of its modules and parameters; maybe empty."""
    plan = dict(getattr(model, "_tp_plan", None) or {})
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters()]
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    found = {name: plan.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), "") for name in names}
    for name, module in model.named_modules():
        if any(module is end for end in ends):
            found[name] = ""  # cut by vocabulary, or whole
    return {name: style for name, style in found.items() if style not in ("", *WITHOUT_EFFECT)}


def between(model: Any, plan: dict[str, str]) -> dict[str, bool]:
    """Modules without a style beside layers that are cut, and whether each rank can have all of them.

    A norm of one head's queries, and an activation with parameters, work on this rank's part. So
    their gradients are partial.
    """
    found = {}
    for owner in {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise"}:
        layer = model.get_submodule(owner)
        for name, parameter in layer.named_parameters(prefix=owner):
            module = name.rpartition(".")[0]
            if module in plan:
                continue
            is_head = parameter.numel() == getattr(layer, "head_dim", None)
            last = module.rpartition(".")[2]
            found[module] = (is_head and last in ("q_norm", "k_norm")) or last == "act_fn"
    return found


def head_counts(model: Any, plan: dict[str, str]) -> list[int]:
    """The numbers of heads, also of keys, that the ranks divide; none if they gather all heads."""
    config, counts = model.config.get_text_config(), list[int]()
    for name in attention_layers(plan):
        owner, _, last = name.rpartition(".")
        layer = model.get_submodule(owner)
        if last in ("k_proj", "v_proj") and isinstance(getattr(layer, "head_dim", None), int):
            counts.append(getattr(layer, last).out_features // layer.head_dim)
        elif isinstance(config.num_attention_heads, int):
            counts.append(config.num_attention_heads)
    return counts


def attention_layers(plan: dict[str, str]) -> list[str]:
    """The layers that give each rank its heads."""
    return [
        name
        for name, style in plan.items()
        if style == "colwise" and "att" in name.rpartition(".")[0].split(".")[-1]
    ]


def has_dropout(layer: nn.Module) -> bool:
    """Whether a module has dropout itself."""
    rates = [value for key, value in vars(layer).items() if "dropout" in key]
    rates += [child.p for child in layer.children() if isinstance(child, nn.Dropout)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
