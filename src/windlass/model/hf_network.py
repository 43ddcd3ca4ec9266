"""The network of a model of `transformers`, made from a configuration, and its parts."""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from windlass import hub
from windlass.errors import UserError, first_line, require
from windlass.fileio import read_json
from windlass.model.loss import cap_of_logits
from windlass.recipe.network import ModelSettings

ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout")  # names in configurations

BALANCING_LOSS = ["gate_logits", "num_experts", "top_k", "attention_mask"]  # its parameters


def from_directory(directory: Path, settings: ModelSettings) -> nn.Module:
    """The network of a directory's configuration, its parameters float32 on the meta device."""
    hub.detect_offline()
    what, remote = f"model.name: {settings.name}", settings.trust_remote_code
    for package in ("transformers", "accelerate"):
        require(package, what)
    adapter = read_json(directory / "adapter_config.json")
    if adapter and not (directory / "config.json").is_file():
        base = adapter.get("base_model_name_or_path")
        advice = f"write model.name={base}, and the adapter's directory as model.init_from"
        raise UserError(f"{what} is an adapter: {advice}")
    try:
        from accelerate import init_empty_weights  # peft needs it, so windlass-lm[hf] brings it
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        config = AutoConfig.from_pretrained(directory, trust_remote_code=remote)
        if getattr(config, "quantization_config", None):
            raise UserError(f"{what} is quantised: name the model that it was made from")
        with no_init_weights(), init_empty_weights(include_buffers=False):
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=remote
            )
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{what} {hub.missing_package(error)}") from None
    except Exception as error:  # of `transformers`, or of code that came with the model
        if "trust_remote_code" in str(error):
            advice = "read the code that comes with it; model.trust_remote_code=true runs it"
            raise UserError(f"{what}: {advice}") from None
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{what} gives no causal language model ({why})") from None
    model.tie_weights()  # type: ignore[operator]
    return model


def add_rows(model: Any, vocab: int) -> int:
    added = max(0, vocab - len(model.get_input_embeddings().weight))
    if added:
        model.resize_token_embeddings(vocab, mean_resizing=False)
    return added


def end_names(model: Any) -> list[str]:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if module in ends]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of `_no_split_modules`; else the longest ModuleList."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = list[nn.Module]()
    inside = {part for name in unreached(model) for part in model.get_submodule(name).modules()}
    for module in model.modules():
        # FSDP2 and torch.compile put a class of their own before the model's.
        if module not in inside and names & {cls.__name__ for cls in type(module).__mro__}:
            blocks.append(module)
            inside |= set(module.modules())
    lists = (list(module) for module in model.modules() if isinstance(module, nn.ModuleList))
    return blocks or max(lists, key=len, default=[])


def unreached(model: Any) -> list[str]:
    """The outermost modules that no text reaches, as Gemma 3's vision tower."""
    config = getattr(model, "config", None)
    if config is None or config.get_text_config(decoder=True) is config:
        return []
    text = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    reached = {id(part) for module in text if module is not None for part in module.modules()}
    outermost = list[str]()
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in outermost)
        if not inside and not any(id(part) in reached for part in module.modules()):
            outermost.append(name)
    return outermost


def head_form(model: Any) -> tuple[float, float] | None:
    """The scale and the soft cap (0: none) of the logits `cap(head(scale * last hidden state))`.

    It tries a shallow copy of the model with a small head; None if the logits are something else.
    """
    head, base = model.get_output_embeddings(), model.base_model
    name = next((name for name, module in model.named_children() if module is head), None)
    if type(head) is not nn.Linear or base is model or name is None:
        return None
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Output(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden = 10 * torch.randn(1, 3, head.in_features)
        stand_in = nn.Linear(head.in_features, 7, bias=head.bias is not None)
    network, probe = copy.copy(base), copy.copy(model)
    network.forward = lambda *_, **__: Output(last_hidden_state=hidden)
    probe._modules = {**model._modules, model.base_model_prefix: network, name: stand_in}
    try:
        with torch.no_grad():
            logits = probe(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False).logits
            cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None) or 0.0
            plain = stand_in(hidden)
            # Cohere and Granite have a scale; its last digits here are rounding errors.
            scale = 1.0 if cap or head.bias is not None else float((logits / plain).median())
            scale = float(f"{scale:.6g}")
            expected = cap_of_logits(stand_in(scale * hidden), cap)
            return (scale, cap) if torch.allclose(logits, expected, rtol=1e-5) else None
    except Exception:  # the head needs more than a hidden state, so the model makes its own logits
        return None


def attention_within_documents(model: Any, current: str) -> str:
    """The attention for rows of documents on a GPU.

    Flex attention lacks dropout. Flash attention finds documents in a single row only.
    """
    text = model.config.get_text_config()
    dropout = any(getattr(text, name, None) for name in ATTENTION_DROPOUT)
    if model._supports_flex_attn and not dropout:
        return "flex_attention"
    return "sdpa" if current.startswith("flash") else current


def balance_of(model: Any) -> tuple[float, Callable[..., Tensor]] | None:
    """The coefficient and the function of the routers' balancing loss; None without one."""
    coefficient = float(getattr(model, "router_aux_loss_coef", 0.0) or 0.0)
    function: Any = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if not coefficient or function is None:
        return None
    # Doge's has other parameters.
    fits = list(inspect.signature(function).parameters) == BALANCING_LOSS
    return (coefficient, function) if fits else None


STYLES = ("colwise", "rowwise")  # of linear layers: some of the outputs, some of the inputs
SHARED = "replicated_with_grad_allreduce"
"""A module with whole parameters that serves this rank's heads only, as the norm of queries."""
WITHOUT_EFFECT = ("local_params", "replicate")  # on plain tensors


def tensor_plan(model: Any, ranks: int) -> dict[str, str]:
    """The style of each module that `ranks` divide; UserError if they cannot divide the model."""
    kind = type(model).__name__
    # An adapted layer counts as its base; `Divider` also divides the adapter.
    modules = {n: getattr(m, "base_layer", m) for n, m in model.named_modules()}

    def reject(problem: str) -> NoReturn:
        advice = "use data parallelism (parallel.tensor=1)"
        raise UserError(f"parallel.tensor = {ranks}: {problem}: {advice}")

    # Both are cut by vocabulary, or whole.
    ends = [modules[name] for name in end_names(model)]
    names = [name for name, module in modules.items() if module not in ends]
    names += [name for name, _ in model.named_parameters()]
    patterns = getattr(model, "_tp_plan", None) or {}
    styles = {name: patterns.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), "") for name in names}
    plan = {name: style for name, style in styles.items() if style not in ("", *WITHOUT_EFFECT)}
    if not plan:
        reject(f"{kind} lacks a tp_plan")
    for name, style in plan.items():
        fits = style in STYLES if isinstance(modules.get(name), nn.Linear) else style == SHARED
        if name not in modules or not fits:
            reject(f'{kind} divides {name} by the style "{style}", which Windlass does not have')
    config, counts = model.config.get_text_config(), list[int]()
    for name in [name for name, style in plan.items() if style == "colwise"]:
        owner, _, last = name.rpartition(".")
        layer: Any = modules[owner]
        # A norm of one head's queries and an activation with parameters work on this rank's part.
        for parameter, value in layer.named_parameters(prefix=owner):
            other = re.sub(r"\.base_layer$|\.lora_.*", "", parameter.rpartition(".")[0])
            whole_head = value.numel() == getattr(layer, "head_dim", None)
            shared = ("act_fn", "q_norm", "k_norm") if whole_head else ("act_fn",)
            if other not in plan and other.rpartition(".")[2] not in shared:
                reject(f"{kind}'s tp_plan does not say how to divide {other}")
            plan.setdefault(other, SHARED)
        if "att" not in owner.split(".")[-1]:
            continue
        rates = [value for key, value in vars(layer).items() if "dropout" in key]
        rates += [child.p for child in layer.children() if isinstance(child, nn.Dropout)]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            reject(f"Windlass does not divide the dropout in the attention of {kind}")
        if last in ("k_proj", "v_proj") and isinstance(getattr(layer, "head_dim", None), int):
            counts.append(getattr(layer, last).out_features // layer.head_dim)
        elif isinstance(config.num_attention_heads, int):
            counts.append(config.num_attention_heads)
    if unfit := [count for count in counts if count % ranks]:
        fit = [n for n in range(1, ranks) if math.gcd(*counts) % n == 0]
        heads = "attention heads" if max(unfit) == max(counts) else "key and value heads"
        problem = f"{ranks} ranks do not divide the {max(unfit)} {heads} of {kind}"
        raise UserError(f"parallel.tensor: {problem}; write {max(fit)}")
    return plan
