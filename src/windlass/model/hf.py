"""A causal language model of `transformers`, speaking our protocol: tokens and labels in, the summed loss out.

Legend: B batch, T time, D model width, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass import hub
from windlass.errors import RunFailed, UserError, first_line
from windlass.model.loss import cross_entropy_sum
from windlass.recipe import Recipe
from windlass.recipe.settings import LoraSettings, ModelSettings

UNLIMITED = 2**31
"""The limit of a model whose configuration has none."""
UNKNOWN_CONTEXT = 2048
"""The window of a model whose configuration has no limit (ALiBi, for one), where the recipe does not set it."""


class HfModel(nn.Module):
    """A model of `transformers`. Its parameters have no values until `fill_weights` gave them some.

    Args:
        model: What `AutoModelForCausalLM` made.
        context: Tokens in its window.
        directory: Where its configuration and weights lie.
        settings: The section `[model]` of a recipe.
    """

    def __init__(self, model: nn.Module, context: int, directory: Path, settings: ModelSettings):
        super().__init__()
        self.model, self.context, self.directory, self.settings = model, context, directory, settings
        self.limit = longest_context(model.config) or UNLIMITED
        self.vocab = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self._plain_head = has_plain_head(model)
        accepted = inspect.signature(model.forward).parameters  # type: ignore[arg-type]
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @property
    def config(self) -> Any:
        """The configuration of `transformers`."""
        return self.model.config

    def fill_weights(self, seed: int, directory: Path | None = None) -> None:
        """Give every parameter and saved buffer its value: the file's, or with `model.from_scratch` one that the seed and its
        name determine.

        Args:
            seed: `run.seed`.
            directory: Where the files lie; None: where the model came from.
        """
        from windlass.model.hf_files import fill

        fill(self, seed, directory)

    def to_empty_parameters(self, device: str | torch.device) -> HfModel:
        """Give parameters on the meta device storage; unlike `to_empty`, buffers keep their values, and ties stay ties."""
        made: dict[int, nn.Parameter] = {}
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    empty = torch.empty_like(parameter, device=device)
                    module._parameters[name] = made.setdefault(
                        id(parameter), nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    )
        return self.to(device)

    def blocks(self) -> list[nn.Module]:
        """The units of sharding, activation checkpointing and compiling, in order."""
        return find_blocks(self.model)

    def new_cache(self, batch: int, length: int) -> Memory:
        """An empty cache of keys, values and states; it grows as it is used."""
        return new_memory(self.model)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, cache: Memory | None = None) -> Tensor:
        """Logits, or the summed loss.

        Args:
            tokens: [B, T]. Padding, if any, is at the end, where no counted token sees it.
            labels: The token after each [B, T], -100 where it does not count.
            cache: What `new_cache` gave, to go on from earlier passes.

        Returns:
            With labels a scalar: the sum of the cross-entropy over what counts, in float32 (float64 for a float64 model).
            Without: logits [B, T, V]; with a cache [B, 1, V], those of the last token.

        Raises:
            RunFailed: Code that came with the model fails.
        """
        try:
            return self._pass(tokens, labels, cache)
        except (TypeError, AttributeError, NameError, ImportError, LookupError) as error:
            if not type(self.model).__module__.startswith("transformers_modules"):
                raise
            raise RunFailed(
                f"model.name: {self.settings.name}: the code that comes with it fails ({type(error).__name__}: "
                f"{first_line(error)})"
            ) from error

    def _pass(self, tokens: Tensor, labels: Tensor | None, cache: Memory | None) -> Tensor:
        if cache is not None:
            return cache.read(self.model, tokens, **self._last_only)
        if labels is None or not self._plain_head:
            logits = self.model(input_ids=tokens, use_cache=False).logits
            return logits if labels is None else _loss_of_logits(logits, labels)
        # The loss is made inside the root's forward, where a sharded head is whole.
        hidden = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        return cross_entropy_sum(hidden, head.weight, labels, head.bias)


def _loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return nn.functional.cross_entropy(logits.flatten(0, 1).to(wide), labels.flatten(), reduction="sum")


def build_hf(
    recipe: Recipe,
    vocab: int = 0,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.float32,
    run: Path | None = None,
) -> HfModel:
    """The model of a recipe, its buffers filled and its parameters without values yet: on the meta device, or just empty.

    Args:
        recipe: Its section `[model]` is read.
        vocab: The tokenizer's vocabulary.
        device: Where the parameters live.
        dtype: Of the parameters, whatever the file's: the master weights.
        run: A run directory; where it keeps the model's configuration, that one counts.

    Raises:
        UserError: The model cannot be had, is no causal language model, its context is shorter than `model.context`, or its
            embedding has fewer rows than the tokenizer has tokens.
    """
    settings = recipe.model
    from windlass.model import hf_files

    directory = hf_files.saved_origin(run, settings) if run else None
    model = open_hf(directory or hub.directory(settings.name, settings.revision), settings, dtype)
    longest = longest_context(model.config)
    if longest and settings.context > longest:
        raise UserError(
            f"model.context = {settings.context} is longer than the {longest} tokens that {settings.name} was made for"
        )
    model.context = settings.context
    if model.vocab < vocab:
        raise UserError(
            f"{settings.name} has {model.vocab:,} token embeddings, and data.tokenizer {vocab:,} tokens: they do not belong "
            f'together; write data.tokenizer = "hf:{settings.name}"'
        )
    return model if torch.device(device).type == "meta" else model.to_empty_parameters(device)


def open_hf(directory: Path, settings: ModelSettings | None = None, dtype: torch.dtype = torch.float32) -> HfModel:
    """The model in a directory with its own context, its parameters on the meta device."""
    settings = settings or ModelSettings(kind="hf", name=str(directory))
    model = from_directory(directory, settings, dtype)
    if settings.lora.rank:
        add_lora(model, settings.lora)
    return HfModel(model, longest_context(model.config) or UNKNOWN_CONTEXT, directory, settings)


def from_directory(directory: Path, settings: ModelSettings, dtype: torch.dtype) -> nn.Module:
    """The network that a directory's configuration describes: parameters on the meta device, buffers as they should be."""
    hub.prepare()
    with hub.explained(f"model.name: {settings.name}"):
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights
    remote = settings.trust_remote_code
    with _told(settings):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=remote)
        if how := getattr(config, "quantization_config", None):
            kind = how.get("quant_method", "") if isinstance(how, dict) else getattr(how, "quant_method", "")
            raise UserError(
                f"model.name: {settings.name} is quantised ({getattr(kind, 'value', kind) or 'quantization_config'}), and its "
                "weights cannot be trained or read here: name the model that it was made from"
            )
        with no_init_weights(), parameters_on_meta():
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=remote)
    model.tie_weights()  # type: ignore[operator]
    return model


@contextmanager
def _told(settings: ModelSettings) -> Iterator[None]:
    """Turn whatever building a model raises, in `transformers` or in code that came with the model, into one sentence."""
    what = f"model.name: {settings.name}"
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{what} {hub.missing_package(error)}") from None
    except Exception as error:
        first = first_line(error)
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{what} comes with code of its own: look through it, and set model.trust_remote_code=true to run it"
            ) from None
        if isinstance(error, OSError | ValueError | KeyError):
            raise UserError(f"{what} is no causal language model of transformers: {first}") from None
        whose = "the code that comes with it fails" if settings.trust_remote_code else "its configuration fails"
        raise UserError(f"{what} cannot be built: {whose} ({type(error).__name__}: {first})") from None


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, parameters that modules register have no storage; buffers, which hold tables, are made as usual."""
    register = nn.Module.register_parameter

    def without_storage(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = without_storage  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def longest_context(config: Any) -> int:
    """The longest sequence that a configuration allows; 0 where it has no limit."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the classes in `_no_split_modules`, without those inside one another; else the longest ModuleList."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        for child in module.children():
            # FSDP2 and torch.compile put a class of their own before the model's.
            if names & {cls.__name__ for cls in type(child).__mro__}:
                found.append(child)
            else:
                search(child)

    search(model)
    if not found:
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
        found = list(max(lists, key=lambda modules: sum(1 for _ in modules))) if lists else []
    return found


def has_plain_head(model: Any) -> bool:
    """Whether the logits are the output embedding's product with the last hidden state, and nothing else is done to them.

    Tried out with a stand-in for the network and a small stand-in for the head: scaled, capped or shifted logits show.
    """
    head = model.get_output_embeddings()
    base = model.base_model
    if type(head) is not nn.Linear or base is model:
        return False
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Output(BaseModelOutputWithPast):
        """Whatever else a network may give (cross-attentions, routers), this one has none of it."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden = 10 * torch.randn(1, 3, head.in_features)
        stand_in = nn.Linear(head.in_features, 7, bias=head.bias is not None)
    real = base.forward
    try:
        base.forward = lambda *_, **__: Output(last_hidden_state=hidden)
        model.set_output_embeddings(stand_in)
        with torch.no_grad():
            logits = model(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False).logits
            return torch.equal(logits, stand_in(hidden))
    except Exception:  # a network that needs more than a hidden state: its own forward makes the logits
        return False
    finally:
        base.forward = real
        base.__dict__.pop("forward", None)
        model.set_output_embeddings(head)


def add_lora(model: nn.Module, lora: LoraSettings) -> None:
    """Put low-rank adapters beside the layers named; they alone are trained."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError("model.lora needs the package peft: install windlass[hf]") from None
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets or None,
        # GPT-2's layers keep their matrices transposed.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    try:
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise UserError(
            f"model.lora.targets: {str(error).strip().splitlines()[0]} This model's layers are named {_linear_names(model)}"
        ) from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to a low-rank adapter, by its name."""
    return ".lora_" in name


def _linear_names(model: nn.Module) -> str:
    kinds = ("Linear", "Conv1D")
    names = {name.rsplit(".", 1)[-1] for name, m in model.named_modules() if type(m).__name__ in kinds}
    return ", ".join(sorted(names))


CACHE_NAMES = ("past_key_values", "cache_params")
"""Under which name a network takes a cache of `transformers`: attention and most hybrids, Mamba."""


class Memory:
    """The cache of one batch of texts, and their tokens so far [B, T]."""

    def __init__(self, cache: Any, name: str):
        self.cache, self.name = cache, name
        self.tokens: Tensor | None = None

    def read(self, model: Any, tokens: Tensor, **how: Any) -> Tensor:
        """Logits [B, 1, V] of the last of the tokens [B, T], which follow those read before."""
        first = self.tokens is None
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
        if not first and tokens.shape[1] > 1 and getattr(model, "_is_stateful", False):
            self.cache = None  # recurrent networks go on from their state by one token at a time
        if self.cache is None:
            logits: Tensor = model(input_ids=self.tokens, use_cache=False, **how).logits
            return logits[:, -1:]
        logits = model(input_ids=tokens, **{self.name: self.cache}, use_cache=True, **how).logits
        if first and not is_filled(self.cache, tokens.shape[1]):
            self.cache = None
        return logits[:, -1:]


def new_memory(model: nn.Module) -> Memory:
    """An empty memory for a model of `transformers`; without a cache where its forward pass takes none by name."""
    from transformers import DynamicCache

    accepted = inspect.signature(model.forward).parameters
    name = next((name for name in CACHE_NAMES if name in accepted), "")
    return Memory(DynamicCache(config=model.config) if name else None, name)


def is_filled(cache: Any, length: int) -> bool:
    """Whether a cache holds what follows from reading `length` tokens: every layer's keys or states."""
    kinds = [layer for layer in cache.layers if type(layer).__name__ != "DummyLayer"]
    return bool(kinds) and all(_layer_is_filled(layer, length) for layer in kinds)


def _layer_is_filled(layer: Any, length: int) -> bool:
    states = getattr(layer, "has_previous_state", None)
    keys = hasattr(layer, "keys")
    if states is None and not keys:
        return False
    if states is not None and not all(states.values()):
        return False
    return not keys or bool(layer.is_initialized and layer.get_seq_length() == length)
