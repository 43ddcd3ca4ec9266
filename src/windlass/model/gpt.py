"""A GPT with the choices of `ModelSettings`; GPT-2 and Llama are two of its configurations.

`forward` computes the loss itself, so that FSDP2 gathers a sharded head inside the root's forward.
It is a sum, because the step divides it once by the number of unmasked labels of all ranks.

Legend: B batch, T time (tokens of this pass), S time seen (T and the cached tokens), D model width,
H heads, K key and value heads, E = D / H width of a head, V vocabulary.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.model.attention import HALF, Documents, LayerCache, attend, dropped
from windlass.model.loss import (
    ChunkLoss,
    SourceSums,
    TiedLookup,
    VocabShard,
    can_share_gradient,
    cross_entropy_sum,
    head_logits,
)
from windlass.model.sharding import assign, whole_shape
from windlass.recipe.network import ModelSettings
from windlass.seeds import seed_of


class Norm(nn.Module):
    """LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467)."""

    def __init__(self, m: ModelSettings):
        super().__init__()
        self.rms, self.eps = m.norm == "rmsnorm", m.norm_eps
        self.weight = nn.Parameter(torch.ones(m.width))
        self.bias = nn.Parameter(torch.zeros(m.width)) if m.norm_bias and not self.rms else None

    def forward(self, x: Tensor) -> Tensor:  # [..., D]
        # FSDP2 gathers weights in half precision; no CPU kernel mixes them with a float32 stream.
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.rms:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


class RotaryEmbedding:
    """Rotary positions (arXiv 2104.09864): entries i and i + E/2 of a head turn by
    `position * theta ** (-2i / E)`.

    One pass makes it once for all blocks. It is not a module, so that no cast reaches its tables.
    """

    def __init__(self, theta: float, head_width: int, positions: Tensor, like: Tensor):
        dtype = torch.promote_types(like.dtype, torch.float32)
        half = torch.arange(0, head_width, 2, device=like.device, dtype=dtype) / head_width
        angles = positions.to(dtype).unsqueeze(-1) * theta**-half
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat([cos, cos], dim=-1).unsqueeze(-2)  # [T, 1, E] or [B, T, 1, E]
        self.sin = torch.cat([-sin, sin], dim=-1).unsqueeze(-2)

    def __call__(self, x: Tensor) -> Tensor:
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        return (x * self.cos + swapped * self.sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; neighbouring heads share a key and value head if there are fewer."""

    def __init__(self, m: ModelSettings):
        super().__init__()
        self.heads, self.kv_heads, self.head_width = m.heads, m.kv_heads_, m.width // m.heads
        self.qk_norm, self.norm_eps, self.dropout = m.qk_norm, m.norm_eps, m.dropout
        rows = (m.heads + 2 * m.kv_heads_) * self.head_width
        self.qkv = nn.Linear(m.width, rows, bias=m.attn_bias)
        self.out = nn.Linear(m.width, m.width, bias=m.attn_bias)

    def forward(self, x: Tensor, rotary: Any, cache: LayerCache | None, spans: Any) -> Tensor:
        H, K = self.heads, self.kv_heads
        qkv = self.qkv(x).unflatten(-1, (H + 2 * K, self.head_width))  # [B, T, H + 2K, E]
        if rotary or self.qk_norm:
            qk, v = qkv.split([H + K, K], dim=2)  # one operation serves queries and keys
            if self.qk_norm:
                # Autocast would raise half precision; the norm's kernels sum in float32 anyway.
                keeps = qk.dtype in HALF
                with torch.autocast(qk.device.type, enabled=False) if keeps else nullcontext():
                    qk = F.rms_norm(qk, (self.head_width,), eps=self.norm_eps)
            if rotary:
                qk = rotary(qk)
            q, k = qk.to(v.dtype).split([H, K], dim=2)
        else:
            q, k, v = qkv.split([H, K, K], dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or K, T, E]
        rate = self.dropout if self.training else 0.0
        if cache:
            k, v, mask = cache.extend(k, v)  # [B, K, S, E]
            y = attend(q, k, v, mask, mask is None and q.shape[2] > 1, rate)
        elif spans is not None:
            y = spans.attention(q, k, v, rate)
        else:
            y = attend(q, k, v, causal=True, dropout=rate)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two matrices with a non-linearity between them, or three with a gate."""

    def __init__(self, m: ModelSettings):
        super().__init__()
        self.activation = m.activation
        if m.activation == "swiglu":
            self.gate = nn.Linear(m.width, m.ff_width_, bias=m.ff_bias)
        self.up = nn.Linear(m.width, m.ff_width_, bias=m.ff_bias)
        self.down = nn.Linear(m.ff_width_, m.width, bias=m.ff_bias)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        h = self.up(x)
        match self.activation:
            case "swiglu":
                h = F.silu(self.gate(x)) * h
            case "gelu" | "gelu_tanh":
                h = F.gelu(h, approximate="tanh" if self.activation == "gelu_tanh" else "none")
            case "relu":
                h = F.relu(h)
            case "relu2":
                h = F.relu(h)
                h = h * h  # CUDA's autocast would compute `square` in float32
        return self.down(h)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, m: ModelSettings):
        super().__init__()
        self.attn_norm, self.attn = Norm(m), Attention(m)
        self.ff_norm, self.ff = Norm(m), FeedForward(m)
        self.dropout = m.dropout

    def forward(self, x: Tensor, rotary: Any, cache: LayerCache | None, spans: Any) -> Tensor:
        x = x + self.drop(self.attn(self.attn_norm(x), rotary, cache, spans), spans)
        return x + self.drop(self.ff(self.ff_norm(x)), spans)

    def drop(self, x: Tensor, spans: Any) -> Tensor:
        return dropped(x, self.dropout if self.training else 0.0)


class Head(nn.Module):
    def __init__(self, m: ModelSettings, vocab: int):
        super().__init__()
        self.weight = None if m.tie_head else nn.Parameter(torch.empty(vocab, m.width))
        self.cap = m.logit_cap
        self.compiled_loss: ChunkLoss | None = None
        self.vocab_shard: VocabShard | None = None  # of the vocabulary, if ranks divide it

    def forward(
        self, x: Tensor, labels: Tensor | None, table: Tensor | None, by_source: SourceSums | None
    ) -> Tensor:
        """Logits of hidden states [B, T, D], or their summed loss; a tied head uses `table`."""
        weight = table if self.weight is None else self.weight
        assert weight is not None
        if labels is None:
            return head_logits(x, weight, cap=self.cap)
        return cross_entropy_sum(
            x,
            weight,
            labels,
            cap=self.cap,
            shard=self.vocab_shard,
            by_source=by_source,
            compiled=self.compiled_loss,
        )


class Inputs(NamedTuple):
    tokens: Tensor  # [B, T]
    labels: Tensor | None
    positions: Tensor  # [T], or [B, T] with documents
    spans: Any  # whose method `attention` keeps documents apart; None: causal attention


class GPT(nn.Module):
    """The network with `vocab` rows in its embedding; `initialise` gives its weights values."""

    shares_gradient = True  # a tied table has one gradient for both uses

    def __init__(self, settings: ModelSettings, vocab: int):
        super().__init__()
        self.settings, self.vocab, self.context = settings, vocab, settings.context
        self.width_multiple = settings.width_multiple  # for the optimizer (muP)
        # With `_weight`, because torch imports torch._dynamo to draw values on the meta device.
        size = vocab, settings.width
        self.embedding = nn.Embedding(*size, _weight=torch.empty(size))
        if settings.position == "learned":
            size = settings.context, settings.width
            self.positions = nn.Embedding(*size, _weight=torch.empty(size))
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        if settings.final_norm:
            self.norm = Norm(settings)
        self.head = Head(settings, vocab)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        cache: list[LayerCache] | None = None,
        by_source: SourceSums | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Logits [B, T, V], or the loss.

        Args:
            tokens: [B, T], int64; T at most the context.
            labels: The tokens that follow [B, T]; -100 masks one. With labels the result is the
                sum of the cross-entropy over the unmasked ones: a scalar in float32 (float64 if the
                model is).
            cache: From `new_cache`; this pass adds its tokens. Returns the last logits [B, 1, V].
            by_source: Where to add the loss of each row's source, for a mixture.
            documents: The documents of each row; attention stays within them.
        """
        inputs = self.prepare(tokens, labels, cache[0].length if cache else 0, documents)
        x, table = self.embed(inputs)
        x = self.run_blocks(x, range(self.settings.layers), inputs, cache)
        return self.apply_head(x, inputs, table, cache, by_source)

    def prepare(
        self, tokens: Tensor, labels: Tensor | None, start: int, documents: Documents | None
    ) -> Inputs:
        """Positions and documents of tokens, before which a cache holds `start` others."""
        stop = start + tokens.shape[1]
        assert stop <= self.context, f"{stop} tokens, context {self.context}"
        if documents is None:
            return Inputs(tokens, labels, torch.arange(start, stop, device=tokens.device), None)
        rate = self.settings.dropout if self.training else 0.0
        within = documents.within(list(self.blocks), rate)
        return Inputs(tokens, labels, documents.positions, within(0, stop))

    def embed(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """The residual stream [B, T, D] before the first block, and the table of a tied head."""
        m = self.settings
        table = self.embedding.weight if m.tie_head else None
        has_loss = self.shares_gradient and inputs.labels is not None
        if has_loss and table is not None and can_share_gradient(table):
            x, table = TiedLookup.apply(table, inputs.tokens)
        else:
            x = self.embedding(inputs.tokens)
        if m.position == "learned":
            x = x + self.positions(inputs.positions)
        return self.drop(x, inputs), table

    def drop(self, x: Tensor, inputs: Inputs) -> Tensor:
        return dropped(x, self.settings.dropout if self.training else 0.0)

    def run_blocks(
        self, x: Tensor, layers: range, inputs: Inputs, cache: list[LayerCache] | None = None
    ) -> Tensor:
        m, rotary = self.settings, None
        seed = torch.initial_seed()
        if m.position == "rope":
            rotary = RotaryEmbedding(m.rope_theta, m.width // m.heads, inputs.positions, like=x)
        for i in layers:
            if m.dropout and self.training:  # a block's masks do not depend on earlier blocks
                seed_generators(x.device, seed_of(f"windlass/dropout/{seed}/block/{i}"))
            block = getattr(self.blocks, str(i))  # a stage of a pipeline lacks others
            x = block(x, rotary, cache[i] if cache else None, inputs.spans)
        return x

    def apply_head(
        self,
        x: Tensor,
        inputs: Inputs,
        table: Tensor | None,
        cache: list[LayerCache] | None = None,
        by_source: SourceSums | None = None,
    ) -> Tensor:
        m = self.settings
        x = multiplied(self.norm(x) if m.final_norm else x, 1 / m.width_multiple)  # muP
        if cache:
            x = x[:, -1:]
        return self.head(x, inputs.labels, table, by_source)  # type: ignore[no-any-return]

    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The units of sharding other than the blocks; none if the root holds a tied head."""
        if self.settings.tie_head:
            return [], []
        # A stage of a pipeline may lack the embedding, the norm or the head.
        last = [getattr(self, "norm", None), self.head]
        return list(filter(None, [self.embedding])), list(filter(None, last))

    def new_cache(self, batch: int, length: int) -> list[LayerCache]:
        assert length <= self.context, f"{length} tokens, context {self.context}"
        return [LayerCache(batch, length) for _ in range(self.settings.layers)]

    def matrix_parts(self, name: str) -> tuple[int, ...]:
        m = self.settings
        keys = m.width // m.heads * m.kv_heads_
        return (m.width, keys, keys) if name.endswith("attn.qkv.weight") else ()

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """A parameter's initial value as in GPT-2, whole, in float32 on the CPU.

        A sharded parameter takes its slice, so any world size starts from the same bits.
        """
        m = self.settings
        is_output = name.endswith(("attn.out.weight", "ff.down.weight"))
        if name.endswith("bias") or (is_output and m.zero_init_output):
            return torch.zeros(shape)
        if "norm" in name:
            return torch.ones(shape)
        std = m.init_std / math.sqrt(2 * m.layers) if is_output else m.init_std
        if name.startswith("blocks."):
            std /= math.sqrt(m.width_multiple)
        return torch.empty(shape).normal_(0.0, std, generator=generator)


def multiplied(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed torch's generators of a CPU and of `device`; `torch.manual_seed` takes 0.4 ms."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Give every parameter, whole or sharded, its initial value, in place.

    The unwrapped model has `initial_value(name, shape, generator) -> Tensor`, as `GPT`, or
    `fill_weights(seed)`, as `HfModel`.
    """
    owner: Any = model
    if hasattr(owner, "fill_weights"):
        owner.fill_weights(seed)
        return
    for name, parameter in owner.named_parameters():
        assert not parameter.is_meta, f"{name} is on the meta device: materialise it first"
        generator = torch.Generator().manual_seed(seed_of(f"windlass/init/{seed}/{name}"))
        assign(parameter, owner.initial_value(name, whole_shape(parameter), generator))
