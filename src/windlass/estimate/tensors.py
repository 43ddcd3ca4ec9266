"""The bytes of the tensors of our GPT in a training step on one rank; `memory.py` adds them up."""

from __future__ import annotations

from windlass.estimate.layout import COMPUTE_BYTES
from windlass.estimate.rank import Rank
from windlass.model.size import loss_chunk

# Tests keep the first, third and fourth equal to the numbers of `windlass.optim`.
CHUNK = 2**24  # numbers that `adamw` updates in float32 at a time
CHUNK_COPIES = 28  # bytes of each: weight, gradient, moments, random bits, two of the rounding
GATHER_BYTES = 2**25  # parameters that `shard` gathers at a time
STACK_NUMBERS = {"cpu": 2**18, "cuda": 2**25}  # that `muon` orthogonalises at once
RNG_BYTES = {"cpu": 5056, "cuda": 5056 + 16}  # that checkpointing saves for each block


class Tensors:
    """The tensors of a step.

    Legend: N tokens of the micro-batch on this rank, S of them in the residual stream, D width, F
    hidden width, H heads, K width of all keys, T context, V vocabulary; F, H, K and V are the
    rank's. The residual stream and the norms have the master precision; matrix products and their
    results have autocast's.
    """

    def __init__(self, rank: Rank, optimizer: str = "adamw"):
        self.rank, self.optimizer = rank, optimizer
        self.model, self.layout, self.layers = rank.model, rank.layout, rank.layers
        model, layout, parts = rank.model, rank.layout, rank.layout.tensor
        self.compute = COMPUTE_BYTES[layout.precision]  # bytes of a number in matrix products
        # Bytes of a number outside matrix products, and of the weights.
        self.full = layout.program.weight or max(4, self.compute)
        self.master = layout.program.weight or layout.weight_bytes
        self.raised = self.full // self.master  # FSDP2's unreduced gradients are float32
        self.cuda = layout.device == "cuda"
        # Bytes of a number in the input of a block's product, which saves it rounded.
        self.float8 = layout.precision == "float8"
        self.operand = 1 if self.float8 else self.compute
        self.vocab, self.kv = -(-rank.vocab // parts), rank.keys  # V, K
        self.n, self.s = rank.tokens, rank.stream_tokens
        self.queries = rank.queries  # D, or the rank's part of it
        self.stream_width = layout.program.stream or self.full  # bytes of a number
        # A copy of the residual stream [S, D].
        self.stream = self.s * model.width * self.stream_width
        self.wide = self.n * model.width * self.compute  # one copy of a product's input [N, D]
        self.hidden = self.n * (model.ff_width_ // parts) * self.compute  # one hidden copy [N, F]
        # All weights. The root is outside the blocks: embedding, positions, final norm, head.
        self.weights = self.master * rank.total
        self.block = self.master * rank.block
        self.root = self.weights - self.layers * self.block
        # A unit of FSDP2: its gradients, which it reduces in float32, and its gathered parameters
        # in autocast's precision.
        self.unit = self.full * rank.unit_blocks * rank.block
        self.gathered = self.compute * rank.unit_blocks * rank.block
        # The matrix of the head (also a tied one); on earlier stages the embedding, if any.
        self.head = self.master * rank.table * (rank.first or rank.last)
        # The largest matrix of a block, whose gradient exists twice for a moment.
        rows = max(model.ff_width_ // parts, self.queries + 2 * self.kv)
        self.largest = rows * model.width * self.master
        # Beside weights, gradients and state in the update.
        self.update = 6 * self.largest if optimizer == "muon" else 0
        if optimizer == "muon":  # a stack and its products, in bf16 on CUDA
            most, each = STACK_NUMBERS[layout.device], 2 if self.cuda else self.master
            self.update = max(self.update, 6 * each * min(most, self.layers * rank.matrices))
        if self.master < self.full or optimizer == "adamw8bit":
            numbers = min(CHUNK, max(self.head, self.largest) // self.master)
            self.update = max(self.update, CHUNK_COPIES * numbers)
        if not layout.policy.shards_parameters and layout.shard > 1:
            # Rows to send, received rows, and a copy of a part.
            bucket = min(self.weights, max(self.head, GATHER_BYTES))
            self.update = max(self.update, bucket + bucket // layout.shard + self.largest)
        # Autocast's copies of a block's matrices, which the backward pass needs.
        copied = self.compute < self.master and not self.float8
        self.copies = rank.matrices * self.compute if copied else 0

    def norm(self) -> int:
        """A normalisation saves its input (the stream), and a mean and a scale for each token."""
        if self.model.norm == "layernorm":
            return self.stream + 2 * self.s * self.full
        # Without a fused kernel it computes in float32, and also saves the scaled input.
        plain = 2 * self.s * self.model.width * self.full
        return (self.stream if self.cuda else plain) + self.s * self.full

    def dropout(self, width: int) -> int:
        """The mask of a dropout over [S, D] numbers of `width` bytes."""
        fused = self.cuda and self.layout.tensor * self.layout.context == 1
        return self.s * self.model.width * (1 if fused else width) if self.model.dropout else 0

    def attention(self) -> int:
        """The bytes from the input of the projections to the input of the output projection."""
        model, n, c, d, k = self.model, self.n, self.compute, self.queries, self.kv
        heads, kv_heads = self.rank.heads, self.rank.kv_heads
        saved = n * model.width * self.operand  # the input
        saved += n * d * self.float8  # the rounded result
        upcast = model.qk_norm and not self.cuda and c < 4  # fp32 copies of queries and keys
        if model.qk_norm:
            saved += n * (heads + kv_heads) * self.full
            saved += n * (d + k) * 4 if upcast else 0
        if not self.rank.by_heads:  # gathered keys and values
            saved += 2 * n * (self.layout.context - 1) * k * c
        # No kernel takes a part of a dropout mask, fp64 on CUDA, or a mask on a CPU.
        # Then attention saves whole T x T matrices (`model.attention.masked_attention`).
        divided = self.layout.tensor * self.layout.context > 1
        plain = model.dropout > 0 and (divided or not self.cuda)
        plain = plain or (self.cuda and c == 8)
        if not plain or (model.qk_norm and not upcast):
            saved += n * (d + 2 * k) * c  # queries, keys and values, which are one tensor
        if plain:
            squares = max(4, c) if self.cuda else c  # softmax, in fp32 on CUDA
            squares += 2 * c if model.dropout else 0  # the dropout mask and their product
            return saved + n * heads * model.context * squares + 4 * n * d * c
        if self.cuda and kv_heads != heads and self.layout.precision != "bf16":
            saved += 2 * n * d * c  # keys and values for each head (`documents.attend`)
        if model.qk_norm or model.position == "rope":
            saved += n * (d + k) * c  # transformed queries and keys
        return saved + n * d * c + n * heads * max(4, c)  # the result, and a log-sum-exp

    def feed_forward(self) -> int:
        """The bytes from the input of the first matrix to the input of the last one."""
        activation = self.model.activation
        copies = {"gelu": 2, "gelu_tanh": 2, "relu": 1, "relu2": 2, "swiglu": 4}[activation]
        # Autocast casts the input of two matrices twice, unless it is gathered after one cast.
        casts = self.copies and self.stream_width > self.compute
        casts = (casts and self.layout.tensor == 1) or self.float8
        inputs = (2 if activation == "swiglu" and casts else 1) * self.n * self.model.width
        saved = inputs * self.operand + copies * self.hidden
        if self.float8:  # only the derivative of relu needs the last product's input as it was
            saved += self.hidden // self.compute - (activation != "relu") * self.hidden
        return saved

    def block_saved(self) -> int:
        """The bytes that a block saves without checkpointing and copies of its weights."""
        saved = self.attention() + self.feed_forward()
        return 2 * self.norm() + saved + 2 * self.dropout(self.compute)

    def saved(self, blocks: int) -> int:
        """The bytes that `blocks` blocks save with the layout's checkpointing."""
        if self.layout.checkpointing == "none":
            return blocks * self.block_saved()
        saved = self.stream + RNG_BYTES[self.layout.device]
        if self.layout.checkpointing == "selective":  # results of products, attention and sums
            model, n, c, d = self.model, self.n, self.compute, self.queries
            ups = 2 if model.activation == "swiglu" else 1
            products = 2 * self.wide + n * (d + 2 * self.kv) * c + ups * self.hidden
            saved += int((1 - self.layout.program.repeated) * products)
            saved += 2 * self.s * model.width * c * (self.layout.tensor > 1)  # sums over ranks
            saved += 0 if model.dropout else n * d * c + n * self.rank.heads * max(4, c)
        return blocks * saved

    def inside(self) -> int:
        """The recomputed activations and their gradients in a block's backward pass."""
        # A product of two hidden states has two gradients.
        copies = {"swiglu": 2, "relu2": 2}.get(self.model.activation, 1)
        gathered = self.wide if self.layout.tensor > 1 else 0
        recomputed = max(0, self.block_saved() - self.saved(1))
        return recomputed + self.stream + gathered + copies * self.hidden

    def root_saved(self) -> int:
        """The bytes of the embedding's dropout, the final norm and the head's input."""
        model, rank = self.model, self.rank
        saved = self.dropout(self.stream_width) * rank.first + self.wide * rank.last
        tokens = self.n // self.layout.micro_batch
        if model.position == "rope":  # the tables that all blocks share
            saved += 2 * tokens * rank.head_width * self.full
        elif model.position == "learned":  # the places, int64
            saved += 8 * tokens * rank.first
        return saved + (self.norm() if model.final_norm and rank.last else 0)

    def waiting(self, later: bool) -> int:
        """The bytes of passes that wait for their backward pass; `later`: after a micro-batch's."""
        layout, micro = self.layout, self.layout.accumulation - later
        # The events count the passes of one micro-batch.
        others = min(layout.pipeline - self.rank.stage, micro) - 1
        copies = 0 if self.layout.policy.shards_parameters else self.copies
        copies = copies if self.layout.checkpointing == "none" else 0
        # The output, too, waits for its gradient.
        each = self.saved(self.layers) + self.root_saved() + self.layers * copies + self.stream
        return others * each if others > 0 else 0

    def logits(self) -> tuple[int, int, int]:
        """The bytes of head and loss: during the loss, after it, and in their backward pass.

        Small logits exist as a whole, large ones a chunk at a time.
        """
        n, V, d, c, m = self.n, self.vocab, self.model.width, self.compute, self.full
        wide, capped = max(4, c), bool(self.model.logit_cap)
        each = c + 4 * capped if (tail := self.layout.tail) else 4
        head_copy = V * d * c if c < self.master else 0  # in the precision of autocast
        if other := self.layout.program.logits:
            return (n * V * other + head_copy,) * 3
        chunk = loss_chunk(n, V, each, self.layout.device)
        if not chunk and self.layout.tensor == 1:
            one, rest = n * V * wide, capped * n * V * c + head_copy
            return 2 * one + rest, one + rest, 3 * one + rest
        chunk = chunk or n
        # The forward pass computes the gradients of head and input.
        gradient = V * d * m + n * d * (c if c == m else c + m)
        # The logits and their log-probabilities, with the slope of a cap.
        loss = chunk * V * each if tail else (2 + capped) * chunk * V * wide
        # The gradient at the logits, and the head's, which is added in autocast's precision.
        inside = max(loss, chunk * V * c + (V * d * c if c < wide else 0))
        return gradient + head_copy + inside, V * d * m + n * d * m, V * d * m + n * d * m
