"""The part of the model that one rank holds, and its FLOPs for a token."""

from __future__ import annotations

from windlass.estimate.layout import Layout, layout_of
from windlass.model.size import (
    CountedSizes,
    block_matrices,
    count,
    moment_bytes,
    stage_layers,
    unit_blocks,
)
from windlass.recipe import Recipe
from windlass.recipe.network import ModelSettings
from windlass.run import Line


class Rank:
    """The part of our GPT that the fullest rank of a pipeline stage holds.

    Each element of a matrix is on one rank of `tensor`. These ranks replicate norms, learned
    positions and the biases of the output projections.
    """

    def __init__(self, model: ModelSettings, vocab: int, layout: Layout, stage: int, layers: int):
        self.model, self.vocab, self.layout = model, vocab, layout
        self.stage, self.layers = stage, layers
        t, context, micro_batch = layout.tensor, layout.context, layout.micro_batch
        # The first stage has the embedding, the last one the head.
        self.first, self.last = stage == 0, stage == layout.pipeline - 1
        self.tied = model.tie_head and self.first and self.last  # two stages have a tensor each
        self.head_width, self.heads = model.width // model.heads, model.heads // t
        self.kv_heads = model.kv_heads_ // t
        # The widths of all queries, and of all keys or values.
        self.queries, self.keys = self.heads * self.head_width, self.kv_heads * self.head_width
        # The ranks of `context` exchange heads; otherwise they gather keys and values.
        self.by_heads = self.kv_heads % context == 0
        # Tokens of a micro-batch with padding: in attention and feed-forward layers, and in the
        # residual stream. Without `by_heads` a rank has an early and a late part of a sequence.
        parts = 1 if context == 1 else context * (1 if self.by_heads else 2)
        each = -(-model.context // parts) * parts // context
        self.tokens = micro_batch * each
        self.stream_tokens = micro_batch * -(-each // t)

        # Entries of a block's matrices, and of the embedding's or the head's matrix.
        self.matrices = block_matrices(model) // t
        self.table = -(-vocab // t) * model.width
        self.sizes = count(model, vocab)
        self.undivided = self.sizes.block  # of a block on all ranks of `tensor` together
        ups = 2 if model.activation == "swiglu" else 1
        keys = self.head_width * model.kv_heads_
        biases = model.attn_bias * (model.width + 2 * keys) + model.ff_bias * ups * model.ff_width_
        whole = self.undivided - block_matrices(model) - biases  # of a block, replicated
        cut = (self.undivided - whole) // t
        self.block = cut + whole
        # Blocks of one unit of FSDP2.
        self.unit_blocks = unit_blocks(layers, layers * self.block) if layout.pipeline == 1 else 1
        ends = self.first * self.sizes.positions + self.last * self.sizes.norm
        self.replicated = ends + layers * whole  # parameters that the ranks of `tensor` replicate
        tables = (self.first + self.last * (not self.tied)) * self.table
        self.total = tables + layers * cut + self.replicated

    def moments(self, optimizer: str, master: int) -> int:
        """The bytes of the optimizer's moments, of weights of `master` bytes."""
        matrices = self.layers * self.matrices
        if optimizer != "adamw8bit":
            return master * (2 * self.total - matrices * (optimizer == "muon"))
        model, tables = self.model, 1 if self.tied else self.first + self.last
        down = self.layers * model.width * model.ff_width_ // self.layout.tensor
        others = matrices - down + tables * self.table + self.first * self.sizes.positions
        rest = 2 * master * (self.total - down - others)
        eight_bit = down * moment_bytes(optimizer, master, model.ff_width_)
        eight_bit += others * moment_bytes(optimizer, master, model.width)
        return rest + round(eight_bit)

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the stage for a token, on all ranks, as `model.size.flops_per_token`."""
        m, block = self.model, self.undivided
        multiplied = self.layers * block
        if self.last:
            multiplied += self.sizes.multiplied - m.layers * block
        return 6 * multiplied + 12 * self.layers * m.width * m.context


def ranks_of(model: ModelSettings, vocab: int, layout: Layout) -> list[Rank]:
    """The stages that differ in memory or work; of equal stages the first, which holds most."""
    p = layout.pipeline
    layers = stage_layers(model, vocab, p)
    ranks = [Rank(model, vocab, layout, stage, layers[stage]) for stage in range(p)]
    return list({(r.layers, r.first, r.last): r for r in reversed(ranks)}.values())[::-1]


def flops_of_run(recipe: Recipe, start: Line) -> float:
    """FLOPs of a token in a run's last start; the slowest pipeline stage counts for all."""
    if start.get("network") or recipe.model.freeze:
        return CountedSizes(start["parameters"], start["trained"], 0).flops_per_token()
    layout = layout_of(recipe, int(start["world"]), precision=start["precision"])
    stages = ranks_of(recipe.model, recipe.model.vocab or start["data"]["vocab"], layout)
    return max(rank.flops_per_token for rank in stages) * layout.pipeline
