"""A causal language model of `transformers` with the interface of our GPT.

Unusual: parameters begin on the meta device while buffers, which hold tables, are real. `hf_files`
fills the weights later, perhaps into shards. Legend: B batch, T time, D model width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass import hub
from windlass.errors import UserError, first_line, require
from windlass.model import adapters, hf_files, hf_tensor
from windlass.model.block import multiplied
from windlass.model.documents import Documents, edges_of
from windlass.model.frozen import raised
from windlass.model.loss import (
    PLAIN,
    Piece,
    SourceSums,
    Tail,
    cap_of_logits,
    cross_entropy_of_logits,
    cross_entropy_sum,
)
from windlass.model.quantised import Linear4bit, quantise_linear
from windlass.model.share import WHOLE, Cut, Share
from windlass.model.tied import look_up, one_gradient
from windlass.recipe import Recipe
from windlass.recipe.network import CONTEXT_KEYS, ModelSettings

UNLIMITED = 2**31  # the limit of a model whose configuration has none
UNKNOWN_CONTEXT = 2048  # the default context of a model without a limit, as with ALiBi
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout")  # names in configurations
CACHE_NAMES = ("past_key_values", "cache_params")
"""The argument for a cache: for attention and most hybrids, for Mamba."""


class HfModel(nn.Module):
    """A model of `AutoModelForCausalLM`; `fill_weights` gives its parameters values.

    `directory` holds its configuration and weights; `settings` is a recipe's `[model]`. The last
    `added` rows of the embedding are new.
    """

    def __init__(self, model: nn.Module, directory: Path, settings: ModelSettings, added: int = 0):
        super().__init__()
        self.added = added
        self.model, self.directory, self.settings = model, directory, settings
        self.config: Any = model.config
        text = self.config.get_text_config()
        lengths = [getattr(text, name, None) for name in CONTEXT_KEYS]
        self.limit = next((n for n in lengths if isinstance(n, int) and n > 0), UNLIMITED)
        self.context = UNKNOWN_CONTEXT if self.limit == UNLIMITED else self.limit
        self.vocab = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        bos = getattr(text, "bos_token_id", None)
        # The first token of a text; None for a model that has not learned one.
        self.bos = bos if isinstance(bos, int) and not settings.from_scratch else None
        self.plain = str(self.config._attn_implementation)  # attention without documents
        self.apart = unreached(model)  # names of modules
        for name in self.apart:
            model.get_submodule(name).requires_grad_(False)
        self.head_form = head_form(model)
        body: Any = model.base_model
        self._takes_rows = "inputs_embeds" in inspect.signature(body.forward).parameters
        self.share, self.cuts, self.partial = WHOLE, dict[str, Cut](), set[str]()
        self.piece: Piece | None = None  # of the vocabulary
        self.objective = PLAIN  # of the training
        self.loss_tail: Tail | None = None  # compiled

    @torch.no_grad()
    def fill_weights(
        self, seed: int, directory: Path | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        """Give every parameter and saved buffer its value, in place.

        Weights come from the files in `directory` (None: the model's origin), or with
        `model.from_scratch` from the seed and their names; the ranks of `group` share this work.
        Adapters always follow from the seed.
        UserError if the files do not fit or are pickled.
        """
        self._fill(seed, directory, group)
        adapters.fill_magnitudes(self.model)

    def _fill(self, seed: int, directory: Path | None, group: dist.ProcessGroup | None) -> None:
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                adapters.fill_adapter(name, parameter, seed)
            else:
                tensors[name.replace(".base_layer", "")] = parameter
        if self.settings.from_scratch:
            template = from_directory(self.directory, self.settings)
            add_rows(template, self.vocab)
            hf_files.fill_from_seed(tensors, template, find_blocks(template), seed, group)
            return
        directory = directory or hf_files.weights_directory(self)
        prefix, remote = str(self.model.base_model_prefix), self.settings.trust_remote_code
        for path, module in self.model.named_modules():
            if isinstance(module, Linear4bit):  # one whole matrix at a time
                whole = torch.empty(module.out_features, module.in_features)
                name = f"{path.replace('.base_layer', '')}.weight"
                hf_files.fill_from_files({name: whole}, directory, prefix, remote)
                module.quantise(whole)
                continue
            for name, buffer in module.named_buffers(path, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    tensors[name.replace(".base_layer", "")] = buffer
        ends = end_names(self.model) if self.added else []
        longer = [f"{name}.{kind}" for name in ends for kind in ("weight", "bias")]
        hf_files.fill_from_files(tensors, directory, prefix, remote, longer)

    def keep_apart(self, documents: Documents | None) -> dict[str, Any]:
        """The arguments for rows of documents, which `transformers` finds from the positions.

        Flash attention would look at a single row only, so it gets the edges. On a GPU flex
        attention takes the place of others, until a pass without documents.
        """
        on_gpu = documents is not None and documents.positions.device.type == "cuda"
        wanted = attention_within_documents(self.model, self.settings) if on_gpu else self.plain
        if self.config._attn_implementation != wanted:
            self.model.set_attn_implementation(wanted)  # type: ignore[operator]
        if documents is None:
            return {}
        given: dict[str, Any] = {"position_ids": documents.positions}
        if wanted.startswith("flash"):
            length = documents.positions.shape[1]
            edges = edges_of(documents.spans(0, length).keys, documents.positions.device)
            given |= {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
            given |= {"max_length_q": length, "max_length_k": length}
        return given

    def blocks(self) -> list[nn.Module]:
        """The units of sharding, activation checkpointing and compilation, in order."""
        return find_blocks(self.model)

    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The units of sharding beside the blocks; the root keeps the head, for the loss."""
        model: Any = self.model
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = head is None or getattr(head, "weight", None) is embedding.weight
        return [] if tied else [embedding], []

    def divide(self, share: Share) -> None:
        """Keep this rank's part of each parameter, and compute only it."""
        self.share, self.piece = share, hf_tensor.divide(self, share)

    def cut(self, name: str) -> Cut | None:
        """Which part of a parameter this rank holds; None: all of it."""
        return self.cuts.get(name)

    def new_cache(self, batch: int, length: int) -> HfCache:
        """An empty cache of keys, values and states, which grows with use."""
        return HfCache(self.model)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        cache: HfCache | None = None,
        by_source: SourceSums | None = None,
        documents: Documents | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V], or the summed loss; the arguments of `GPT.forward`.

        Padding is at the end, where no unmasked token attends to it.
        """
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        given |= self.keep_apart(documents)
        if cache is not None:
            return cache.read(tokens)
        objective = self.objective if self.training else PLAIN
        if self.head_form is None or (labels is None and places is None):
            with without_reads(documents):
                logits: Tensor = self.model(**given).logits
            if labels is None:
                return logits if places is None else logits.flatten(0, 1)[places]
            own = logits.flatten(0, 1), labels.flatten(), objective, by_source
            return cross_entropy_of_logits(*own)
        scale, cap = self.head_form
        # Inside the root's forward a sharded head is whole.
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        weight = head.weight
        tied = labels is not None and not self.piece and self._looks_up(weight)
        if tied and one_gradient(weight):
            given["inputs_embeds"], weight = look_up(weight, given.pop("input_ids"))
        with without_reads(documents):
            hidden = multiplied(self.model.base_model(**given).last_hidden_state, scale)
        if labels is None:
            return cap_of_logits(head(hidden.flatten(0, 1)[places]), cap)
        weight = raised(weight, hidden)
        if self.piece:
            hidden = self.share.enter(hidden)
        how: Any = {"cap": cap, "piece": self.piece, "objective": objective}
        how |= {"by_source": by_source, "tail": self.loss_tail}
        return cross_entropy_sum(hidden, weight, labels, head.bias, **how)

    def _looks_up(self, weight: Tensor) -> bool:
        """Whether the head's matrix is the embedding's, and the embedding only looks rows up."""
        table: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        plain = type(table) is nn.Embedding and table.padding_idx is None
        plain = plain and not table._forward_hooks and not table._forward_pre_hooks
        return plain and table.weight is weight and self._takes_rows


@contextlib.contextmanager
def without_reads(documents: Documents | None) -> Iterator[None]:
    """A pass of `transformers` in which the host does not wait for the device.

    It would look for documents in the positions, and for padding in the tokens.
    """
    from unittest.mock import patch

    from transformers import PreTrainedModel, masking_utils

    numbers = None
    if documents is not None and documents.several:
        numbers = documents.numbers.to(documents.positions.device, non_blocking=True)
    find = patch.object(masking_utils, "find_packed_sequence_indices", lambda _: numbers)
    warn = patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None)
    with find, warn:
        yield


def attention_within_documents(model: Any, settings: ModelSettings) -> str:
    """The implementation of attention for rows of documents on a GPU.

    Flex attention has no dropout. Without it there is a mask [B, 1, T, T], as in our GPT.
    """
    current = str(model.config._attn_implementation)
    text = model.config.get_text_config()
    dropout = any(getattr(text, name, None) for name in ATTENTION_DROPOUT)
    flex = settings.attention == "auto" and model._supports_flex_attn and not dropout
    return "flex_attention" if flex and not current.startswith("fl") else current


def wrap(model: Any, context: int) -> HfModel:
    """Wrap a loaded model of `transformers`, perhaps with adapters of `peft`, in float32.

    Raises UserError if it is not a causal language model, or its limit is under `context`.
    """
    kind, config = type(model).__name__, model.config
    if model.get_output_embeddings() is None or config.get_text_config().is_encoder_decoder:
        advice = "load it with AutoModelForCausalLM"
        raise UserError(f"model: {kind} is not a causal language model; {advice}")
    if getattr(model, "is_quantized", False):
        advice = "load it unquantised, or use model.lora.base=4bit in the recipe"
        raise UserError(f"model: {kind} is quantised; {advice}")
    name = str(getattr(config, "_name_or_path", "") or kind)
    own = HfModel(model.float(), Path(name), ModelSettings(kind="hf", name=name))
    if context > own.limit:
        problem = f"model.context = {context} is longer than {kind}'s limit"
        raise UserError(f"{problem}: write {own.limit}, or less")
    own.context = context
    return own


class HfCache:
    """The cache of one batch of texts: keys and values, or states of a recurrent network.

    Some architectures ignore a cache. They read all tokens again in each pass.
    """

    def __init__(self, model: nn.Module):
        from transformers import DynamicCache

        accepted = inspect.signature(model.forward).parameters
        self.model: Any = model
        self.name = next((name for name in CACHE_NAMES if name in accepted), "")
        self.cache: Any = DynamicCache(config=model.config) if self.name else None
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.tokens: Tensor | None = None

    def read(self, tokens: Tensor) -> Tensor:
        """Logits [B, 1, V] of the last of the tokens [B, T], which follow the cached tokens."""
        first = self.tokens is None
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
        if not first and tokens.shape[1] > 1 and getattr(self.model, "_is_stateful", False):
            self.cache = None  # recurrent networks continue from their state by one token at a time
        cached = self.cache is not None
        if not cached and len(self.tokens[0]) > tokens.shape[1]:
            what = f"{type(self.model).__name__} keeps no cache of these tokens"
            warnings.warn(f"{what}: each new token reads all tokens again", stacklevel=2)
        given = {self.name: self.cache, **self.last_only} if cached else self.last_only
        ids = tokens if cached else self.tokens
        logits: Tensor = self.model(input_ids=ids, use_cache=cached, **given).logits
        if cached and first and not is_filled(self.cache, tokens.shape[1]):
            self.cache = None
        return logits[:, -1:]


def is_filled(cache: Any, length: int) -> bool:
    """Whether every layer of a cache holds the keys or the states of `length` tokens."""
    layers = [layer for layer in cache.layers if type(layer).__name__ != "DummyLayer"]
    for layer in layers:
        states, has_keys = getattr(layer, "has_previous_state", {}), hasattr(layer, "keys")
        if not (states or has_keys) or not all(states.values()):
            return False
        if has_keys and not (layer.is_initialized and layer.get_seq_length() == length):
            return False
    return bool(layers)


def build_hf(recipe: Recipe, vocab: int, run: Path | None) -> HfModel:
    """The model of a recipe, with parameters on the meta device; arguments as in `build_model`.

    Raises UserError if it is not a causal language model, or its context or embedding is too short.
    """
    settings, name = recipe.model, recipe.model.name
    directory = hf_files.saved_origin(run, settings) if run else None
    model = open_hf(directory or hub.directory(name, settings.revision), settings, vocab)
    if settings.context > model.limit:
        limit = f"{name}'s limit of {model.limit} tokens"
        problem = f"model.context = {settings.context} is longer than {limit}"
        raise UserError(f"{problem}: write model.context={model.limit}, or less")
    if recipe.parallel.tensor > 1:
        hf_tensor.check(model.model, recipe.parallel.tensor)
    model.context = settings.context
    added = recipe.data.add_tokens
    table: Any = model.model.get_input_embeddings()  # type: ignore[operator]
    if (added or model.added) and settings.lora.rank and not table.weight.requires_grad:
        tokens = ", ".join(added) or f"the last {model.added} tokens of the tokenizer"
        problem = f"model.lora freezes the embedding, so it would not learn {tokens}"
        names = ",".join(name.rpartition(".")[2] for name in end_names(model.model))
        raise UserError(f"{problem}: write model.lora.modules_to_save={names}")
    return model


def open_hf(directory: Path, settings: ModelSettings, vocab: int = 0) -> HfModel:
    """The model in a directory with its own context, its parameters on the meta device.

    The embedding has at least `vocab` rows.
    """
    model = from_directory(directory, settings)
    added = add_rows(model, vocab)
    if settings.lora.base == "4bit" and not quantise_linear(find_blocks(model)):
        problem = f"{settings.name} has no linear layers to hold in 4 bits"
        raise UserError(f'model.lora.base: {problem}; write "fp32"')
    if settings.lora.rank:
        adapters.add_adapters(model, settings.lora, unreached(model))
    return HfModel(model, directory, settings, added)


def add_rows(model: Any, vocab: int) -> int:
    """Give the embedding and the head rows for `vocab` tokens; returns how many are new."""
    added = max(0, vocab - len(model.get_input_embeddings().weight))
    if added:
        model.resize_token_embeddings(vocab, mean_resizing=False)
    return added


def from_directory(directory: Path, settings: ModelSettings) -> nn.Module:
    """The network of a directory's configuration, its parameters float32 on the meta device."""
    hub.prepare()
    what, remote = f"model.name: {settings.name}", settings.trust_remote_code
    for package in ("transformers", "accelerate"):
        require(package, what)
    how = {} if settings.attention == "auto" else {"attn_implementation": settings.attention}
    if settings.attention == "flash_attention_2":
        require("flash_attn", 'model.attention = "flash_attention_2"')
    try:
        from accelerate import init_empty_weights  # peft needs it, so windlass-lm[hf] brings it
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        config = AutoConfig.from_pretrained(directory, trust_remote_code=remote)
        if getattr(config, "quantization_config", None):
            raise UserError(f"{what} is quantised: name the model that it was made from")
        with no_init_weights(), init_empty_weights(include_buffers=False):
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=remote, **how
            )
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{what} {hub.missing_package(error)}") from None
    except Exception as error:  # of `transformers`, or of code that came with the model
        if how and "ttention" in str(error):
            name = f'model.attention = "{settings.attention}"'
            problem = f"{name} does not work for {settings.name} here: {first_line(error)}"
            raise UserError(f"{problem}; write auto") from None
        if "trust_remote_code" in str(error):
            advice = "read the code that comes with it; model.trust_remote_code=true runs it"
            raise UserError(f"{what}: {advice}") from None
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{what} gives no causal language model ({why})") from None
    model.tie_weights()  # type: ignore[operator]
    return model


def end_names(model: Any) -> list[str]:
    """The names of the embedding and the head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if module in ends]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of the classes in `_no_split_modules`; else the longest ModuleList."""
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
    """The outermost modules that only images or sounds reach, as Gemma 3's vision tower."""
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
    """The scale and the soft cap (0: none) of the logits `cap(head(scale * last hidden state))`;
    None if they are something else.

    It tries a shallow copy of the model with a fixed hidden state and a small head.
    """
    head, base = model.get_output_embeddings(), model.base_model
    name = next((name for name, module in model.named_children() if module is head), None)
    if type(head) is not nn.Linear or base is model or name is None:
        return None
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Output(BaseModelOutputWithPast):
        """The output of a network without cross-attentions and routers."""

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
