"""A causal language model of `transformers` with the interface of our GPT.

Legend: B batch, T time, D model width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass import hub
from windlass.errors import UserError
from windlass.model import adapters, hf_files, hf_network
from windlass.model.attention import Documents
from windlass.model.gpt import multiplied
from windlass.model.loss import (
    ChunkLoss,
    SourceSums,
    TiedLookup,
    VocabShard,
    can_share_gradient,
    cross_entropy_of_logits,
    cross_entropy_sum,
)
from windlass.model.quantised import Linear4bit, raised
from windlass.model.sharding import assign, whole_shape
from windlass.recipe import Recipe
from windlass.recipe.network import ModelSettings
from windlass.recipe.settings import IGNORE_INDEX
from windlass.seeds import seed_of

UNLIMITED = 2**31  # the limit of a model whose configuration has none
UNKNOWN_CONTEXT = 2048  # the default context of a model without a limit, as with ALiBi
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Entries of a configuration that limit the length of a sequence."""
CACHE_NAMES = ("past_key_values", "cache_params")
"""The argument for a cache: for attention and most hybrids, for Mamba."""


class HfModel(nn.Module):
    """A model of `AutoModelForCausalLM`; `fill_weights` gives its parameters values.

    `directory` holds its configuration; the last `added` rows of the embedding are new.
    """

    model: Any

    def __init__(self, model: Any, directory: Path, settings: ModelSettings, added: int = 0):
        super().__init__()
        self.model, self.directory, self.settings, self.added = model, directory, settings, added
        self.config: Any = model.config
        text = self.config.get_text_config()
        lengths = [getattr(text, name, None) for name in CONTEXT_KEYS]
        self.limit = next((n for n in lengths if isinstance(n, int) and n > 0), UNLIMITED)
        self.context = UNKNOWN_CONTEXT if self.limit == UNLIMITED else self.limit
        self.vocab = len(model.get_input_embeddings().weight)
        self.plain = str(self.config._attn_implementation)  # attention without documents
        self.apart = hf_network.unreached(model)  # names of modules
        for name in self.apart:
            model.get_submodule(name).requires_grad_(False)
        self.head_form = hf_network.head_form(model)
        takes_rows = "inputs_embeds" in inspect.signature(model.base_model.forward).parameters
        # Gemma 3n and 4 also embed the ids of tokens for each layer.
        self._takes_rows = takes_rows and not getattr(text, "hidden_size_per_layer_input", 0)
        self.vocab_shard: VocabShard | None = None  # of the vocabulary, if ranks divide it
        self.balance = hf_network.balance_of(model)
        self.compiled_loss: ChunkLoss | None = None

    @torch.no_grad()
    def fill_weights(self, seed: int, directory: Path | None = None) -> None:
        """Give every parameter and saved buffer its value, in place.

        Weights come from the files in `directory` (None: the model's origin), or with
        `model.from_scratch` from the seed, as adapters always do. UserError if files do not fit.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if ".lora_" not in name:
                tensors[name.replace(".base_layer", "")] = parameter
                continue
            whole = torch.zeros(whole_shape(parameter))  # as LoRA: A like a linear layer, B zero
            if ".lora_A." in name or ".lora_embedding_B." in name:
                generator = torch.Generator().manual_seed(seed_of(f"windlass/hf/{seed}/{name}"))
                nn.init.kaiming_uniform_(whole, a=5**0.5, generator=generator)
            assign(parameter, whole)
        if self.settings.from_scratch:
            template = hf_network.from_directory(self.directory, self.settings)
            hf_network.add_rows(template, self.vocab)
            blocks = hf_network.find_blocks(template)
            hf_files.fill_from_seed(tensors, template, blocks, seed)
            return
        directory = directory or hf_files.weights_directory(self)
        files = hf_files.WeightFiles(directory, remote_code=self.settings.trust_remote_code)
        prefix = str(self.model.base_model_prefix)
        for path, module in self.model.named_modules():
            if isinstance(module, Linear4bit):  # one whole matrix at a time
                whole = torch.empty(module.out_features, module.in_features)
                name = f"{path.replace('.base_layer', '')}.weight"
                hf_files.fill_from_files({name: whole}, files, prefix)
                module.quantise(whole)
                continue
            for name, buffer in module.named_buffers(path, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    tensors[name.replace(".base_layer", "")] = buffer
        ends = hf_network.end_names(self.model) if self.added else []
        longer = [f"{name}.{kind}" for name in ends for kind in ("weight", "bias")]
        hf_files.fill_from_files(tensors, files, prefix, longer)

    def blocks(self) -> list[nn.Module]:
        return hf_network.find_blocks(self.model)

    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The units of sharding other than the blocks; the root keeps the head, for the loss."""
        embedding = self.model.get_input_embeddings()
        head = self.model.get_output_embeddings()
        tied = head is None or getattr(head, "weight", None) is embedding.weight
        return [] if tied else [embedding], []

    def new_cache(self, batch: int, length: int) -> HfCache:
        return HfCache(self.model)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        cache: HfCache | None = None,
        by_source: SourceSums | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Logits [B, T, V], or the summed loss; the arguments of `GPT.forward`."""
        attention = self.plain
        if documents is not None and documents.positions.device.type == "cuda":
            attention = hf_network.attention_within_documents(self.model, self.plain)
        if self.config._attn_implementation != attention:
            self.model.set_attn_implementation(attention)
        if cache is not None:
            return cache.read(tokens)
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if documents is not None:  # which `transformers` finds from the positions
            given["position_ids"] = documents.positions
        if labels is None:
            with without_reads(documents):  # padding at the end needs no mask
                return self.model(**given).logits  # type: ignore[no-any-return]
        network, head = self.model, self.model.get_output_embeddings()
        if self.head_form is not None:  # the loss has the head
            network, weight = self.model.base_model, head.weight  # whole inside the root's forward
            if self.looks_up(weight):
                ids = given.pop("input_ids")
                given["inputs_embeds"], weight = TiedLookup.apply(weight, ids)
        if self.training and self.balance:
            given["output_router_logits"] = True
        if self.training and self.settings.neftune_alpha:
            rows = given.get("inputs_embeds")
            if rows is None:
                rows = self.model.get_input_embeddings()(given.pop("input_ids"))
            bound = self.settings.neftune_alpha / math.sqrt(rows.shape[1] * rows.shape[2])
            given["inputs_embeds"] = rows + torch.empty_like(rows).uniform_(-bound, bound)
        with without_reads(documents):
            output = network(**given)
        if self.head_form is None:
            logits = output.logits.flatten(0, 1)
            loss = cross_entropy_of_logits(logits, labels.flatten(), by_source)
        else:
            scale, cap = self.head_form
            hidden = multiplied(output.last_hidden_state, scale)
            loss = cross_entropy_sum(
                hidden,
                raised(weight, hidden),
                labels,
                head.bias,
                cap=cap,
                shard=self.vocab_shard,
                by_source=by_source,
                compiled=self.compiled_loss,
            )
        return self.balanced(loss, output, labels)

    def looks_up(self, weight: Tensor) -> bool:
        """Whether this pass looks tokens up by itself: in a table that is also the head's, for one
        gradient of both uses."""
        table = self.model.get_input_embeddings()
        tied = table.weight is weight and not self.vocab_shard and self._takes_rows
        plain = type(table) is nn.Embedding and table.padding_idx is None
        hooked = table._forward_hooks or table._forward_pre_hooks
        return tied and plain and not hooked and can_share_gradient(weight)

    def balanced(self, loss: Tensor, output: Any, labels: Tensor) -> Tensor:
        """The summed loss with the gradient of the routers' balancing loss, once for each label."""
        routers = getattr(output, "router_logits", None)
        if not self.training or self.balance is None or not routers:  # no layer has experts
            return loss
        coefficient, balancing_loss = self.balance
        valid = labels != IGNORE_INDEX
        mask = valid.flip(1).cummax(1).values.flip(1)  # without padding at a row's end
        mask = mask | ~valid.any()  # a mean over no tokens would be NaN
        experts = self.model.num_experts, self.model.num_experts_per_tok
        extra = balancing_loss(routers, *experts, mask) * coefficient * valid.sum()
        return loss + (extra - extra.detach())


@contextlib.contextmanager
def without_reads(documents: Documents | None) -> Iterator[None]:
    """A pass of `transformers` that does not read positions and tokens on the host."""
    from unittest.mock import patch

    from transformers import PreTrainedModel, masking_utils

    numbers = None
    if documents is not None and documents.several:
        numbers = documents.numbers.to(documents.positions.device, non_blocking=True)
    find = patch.object(masking_utils, "find_packed_sequence_indices", lambda _: numbers)
    warn = patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None)
    with find, warn:
        yield


def wrap(model: Any, context: int) -> HfModel:
    """Wrap a loaded model of `transformers`, perhaps with adapters of `peft`, in float32."""
    kind, config = type(model).__name__, model.config
    if model.get_output_embeddings() is None or config.get_text_config().is_encoder_decoder:
        advice = "load it with AutoModelForCausalLM"
        raise UserError(f"model: {kind} is not a causal language model; {advice}")
    if getattr(model, "is_quantized", False):
        advice = "load it unquantised, or use model.lora.base=4bit in the recipe"
        raise UserError(f"model: {kind} is quantised; {advice}")
    name = str(getattr(config, "_name_or_path", "") or kind)
    settings = ModelSettings(kind="hf", name=name)
    own = HfModel(model.float(), Path(name), settings)
    if context > own.limit:
        problem = f"model.context = {context} is longer than {kind}'s limit"
        raise UserError(f"{problem}: write {own.limit}, or less")
    own.context, own.balance = context, None
    return own


class HfCache:
    """Keys and values, or states of a recurrent network; a model without them reads all tokens
    again."""

    def __init__(self, model: nn.Module):
        from transformers import DynamicCache

        accepted = inspect.signature(model.forward).parameters
        self.model: Any = model
        self.given: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.name = next((name for name in CACHE_NAMES if name in accepted), "")
        if self.name:
            self.given[self.name] = DynamicCache(config=model.config)
        self.tokens: Tensor | None = None  # read so far

    def read(self, tokens: Tensor) -> Tensor:
        if not self.name:
            tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
            self.tokens = tokens
        output = self.model(input_ids=tokens, use_cache=bool(self.name), **self.given)
        return output.logits[:, -1:]  # type: ignore[no-any-return]


def build_hf(recipe: Recipe, vocab: int, run: Path | None) -> HfModel:
    settings, name = recipe.model, recipe.model.name
    directory = hf_files.saved_origin(run, settings) if run else None
    model = open_hf(directory or hub.directory(name, settings.revision), settings, vocab)
    if settings.context > model.limit:
        limit = f"{name}'s limit of {model.limit} tokens"
        problem = f"model.context = {settings.context} is longer than {limit}"
        raise UserError(f"{problem}: write model.context={model.limit}, or less")
    if settings.neftune_alpha and not model._takes_rows:
        raise UserError(f"model.neftune_alpha: {name} takes no embedded tokens; write 0")
    if recipe.parallel.tensor > 1:
        hf_network.tensor_plan(model.model, recipe.parallel.tensor)  # raises if there is none
    model.context = settings.context
    added = recipe.data.add_tokens
    table = model.model.get_input_embeddings()
    if (added or model.added) and settings.lora.rank and not table.weight.requires_grad:
        tokens = ", ".join(added) or f"the last {model.added} tokens of the tokenizer"
        problem = f"model.lora freezes the embedding, so it would not learn {tokens}"
        names = ",".join(name.rpartition(".")[2] for name in hf_network.end_names(model.model))
        raise UserError(f"{problem}: write model.lora.modules_to_save={names}")
    return model


def open_hf(directory: Path, settings: ModelSettings, vocab: int = 0) -> HfModel:
    """The model in a directory, on the meta device, with `vocab` rows in the embedding or more."""
    model = hf_network.from_directory(directory, settings)
    added = hf_network.add_rows(model, vocab)
    if settings.lora.base == "4bit":
        whole = adapters.modules_to_save(model, settings.lora)
        blocks = nn.ModuleList(hf_network.find_blocks(model))
        linear = [name for name, part in blocks.named_modules() if type(part) is nn.Linear]
        for name in linear:
            blocks.set_submodule(name, Linear4bit(blocks.get_submodule(name)))  # type: ignore
        if not linear:
            problem = f"{settings.name} lacks linear layers to hold in 4 bits"
            raise UserError(f'model.lora.base: {problem}; write "fp32"')
        for name in whole:
            if any(isinstance(part, Linear4bit) for part in model.get_submodule(name).modules()):
                problem = f"model.lora.base = 4bit would freeze linear layers of {name}"
                advice = "leave it out, or write model.lora.base=fp32"
                raise UserError(f"model.lora.modules_to_save: {problem}: {advice}")
    if settings.lora.rank:
        adapters.add_adapters(model, settings.lora, hf_network.unreached(model))
    return HfModel(model, directory, settings, added)


LIGER = 'model.kernels = "liger"'
ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh", "relu2")
"""Liger's kernels compute these, whatever a configuration names."""


def use_liger(model: HfModel, device: torch.device, stack: ExitStack) -> None:
    """Replace the forward passes of a model's parts by Liger's, in place.

    Liger also patches the architecture's file: classes are restored at once, functions by `stack`.
    """
    if device.type != "cuda":
        raise UserError(f'{LIGER} needs a GPU: write "torch"')
    from liger_kernel.transformers import monkey_patch as liger

    kind, text = model.config.model_type, model.config.get_text_config()
    activation = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", "")
    if kind not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN or activation not in ACTIVATIONS:
        problem = f"Liger lacks kernels for {kind} with the activation {activation}"
        raise UserError(f'{LIGER}: {problem}; write "torch"')
    files = {sys.modules[type(part).__module__] for part in model.model.modules()}
    before = [(file, dict(vars(file))) for file in files]
    liger._apply_liger_kernel_to_instance(
        model=model.model, cross_entropy=False, fused_linear_cross_entropy=False
    )
    for file, names in before:
        for name, value in names.items():
            if isinstance(value, type):
                setattr(file, name, value)
            elif vars(file)[name] is not value:
                stack.callback(setattr, file, name, value)
