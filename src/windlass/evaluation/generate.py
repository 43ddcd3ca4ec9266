"""Text from a model: batched, with a KV cache, on any number of ranks, each text a pure function of (seed, index)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from windlass.errors import UserError
from windlass.evaluation.lockstep import evaluating, in_lockstep
from windlass.parallel.parallelize import uncompiled, unwrap

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer
    from windlass.parallel.dist import Ranks

OnToken = Callable[[int, int | None], None]
"""Called as `on_token(index, token)` for each token as it comes, and with None when the text is complete."""


class Decoder(Protocol):
    """What generation needs of a model: our GPT and the models of `transformers` both have it."""

    context: int
    """Tokens in its window; where it has a `limit`, it can see so many."""

    def new_cache(self, batch: int, length: int) -> Any:
        """Room for the keys and values of `batch` rows of up to `length` tokens."""

    def __call__(self, tokens: Tensor, *, cache: Any) -> Tensor:
        """Logits [B, T or 1, V] for tokens [B, T] that follow those in the cache; the last column is that of the last token."""


@dataclass(frozen=True)
class Pass:
    """One forward pass: tokens [B, T] that follow what is in the cache."""

    tokens: list[list[int]]
    cache: Any


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    ranks: Ranks | None = None,
    *,
    indices: Sequence[int] | None = None,
    batch: int = 16,
    vocab: int = 0,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    on_token: OnToken | None = None,
    poll: Callable[[], bool] | None = None,
) -> list[list[int]] | None:
    """Continue prompts.

    Which token is chosen depends on the seed, the text's index and the token's place in it, not on what else is in the
    batch or on which rank it is made (but for rounding of the logits). A text longer than the model's context goes on from
    its last half: when the window is full, the first half of it is forgotten.

    Args:
        model: See `Decoder`. Under full_shard the module whose forward gathers the parameters.
        prompts: This rank's prompts, as token ids; none of them empty. Ranks may have different numbers of them.
        sampling: How to choose, how far to go, where to stop.
        ranks: The process group, when all its ranks call this together; None: this process is alone.
        indices: The number of each text, which with the seed determines it; default: its place in `prompts`.
        batch: Texts that are made at once.
        vocab: The tokenizer's vocabulary, where the model's is padded: only its tokens are chosen; 0: all.
        autocast: Makes the context of the forward pass's arithmetic.
        on_token: Called with each token as it comes.
        poll: Asked before each pass whether to stop; when it says so on any rank, all ranks stop.

    Returns:
        The tokens that follow each prompt, without the one that stopped it; None where `poll` cut it short.

    Raises:
        UserError: A prompt is empty.
    """
    model = unwrap(model)
    indices = range(len(prompts)) if indices is None else indices
    if any(not len(prompt) for prompt in prompts):
        raise UserError("a prompt is empty: generation needs at least one token to begin with")
    texts = [_Text(index, [int(t) for t in prompt]) for index, prompt in zip(indices, prompts, strict=True)]
    groups = batches([text.prompt_length for text in texts], batch, window(model), sampling.max_tokens)
    device = ranks.device if ranks else next(model.parameters()).device

    def forward(work: Pass | None) -> Tensor:
        # Without work this rank still takes part: one token, so that the parameters are gathered everywhere.
        tokens, cache = (work.tokens, work.cache) if work else ([[0]], model.new_cache(1, 1))
        with autocast():
            logits = model(torch.tensor(tokens, dtype=torch.int64, device=device), cache=cache)[:, -1]
        return logits[:, :vocab].float() if vocab else logits.float()

    def work() -> Generator[Pass, Tensor, bool]:
        for group in groups:
            yield from _continue([texts[i] for i in group], model, sampling, on_token)
        return True

    with evaluating(model), torch.no_grad(), uncompiled():
        done = in_lockstep(work(), forward, ranks, poll)
    return [text.made for text in texts] if done else None


class _Text:
    """One text in the making; after its end its row goes on with fillers that nobody reads."""

    def __init__(self, index: int, prompt: list[int]):
        self.index, self.row, self.prompt_length = index, prompt, len(prompt)
        self.end: int | None = None

    @property
    def made(self) -> list[int]:
        """The tokens after the prompt."""
        return self.row[self.prompt_length : self.end]

    def take(self, token: int, sampling: Sampling, on_token: OnToken | None) -> None:
        """Add a chosen token, or end."""
        stops = token in sampling.stop
        if stops:
            self.end = len(self.row)
        self.row.append(token)
        if not stops and on_token:
            on_token(self.index, token)
        if len(self.row) - self.prompt_length == sampling.max_tokens and not stops:
            self.end = len(self.row)
        if self.end is not None and on_token:
            on_token(self.index, None)


def window(model: Any) -> int:
    """Tokens that the model can see at once: its `limit`, which may lie past the `context` that it is trained on."""
    return int(getattr(model, "limit", model.context))


def batches(lengths: Sequence[int], batch: int, context: int, max_tokens: int) -> list[list[int]]:
    """Which prompts are continued together: neighbours in length, so that few columns are spent on waiting.

    Where a window may have to slide, only prompts of one length share a batch: then the place at which it slides depends
    on the text alone.
    """
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        first = groups[-1][0] if groups else place
        slides = lengths[place] + max_tokens > context
        if not groups or len(groups[-1]) == batch or (slides and lengths[place] != lengths[first]):
            groups.append([])
        groups[-1].append(place)
    return groups


def _continue(
    texts: list[_Text], model: Any, sampling: Sampling, on_token: OnToken | None
) -> Generator[Pass, Tensor, None]:
    """Continue a batch until each text has ended.

    All rows stand at the same column. First the columns that every prompt has are read in one pass; then, column by
    column, a row takes its prompt's next token while it has one, and its own choice afterwards. So no row is ever padded
    and no mask is needed.
    """
    column = min(text.prompt_length for text in texts)
    longest = max(text.prompt_length for text in texts) + sampling.max_tokens
    limit = window(model)
    start = first = max(0, column - limit)  # `start`: the first column that the model still sees
    cache = model.new_cache(len(texts), min(longest - start, limit))
    while True:
        logits = yield Pass([text.row[first:column] for text in texts], cache)
        _extend(texts, column, logits, sampling, on_token)
        if all(text.end is not None for text in texts):
            return
        first = column
        if column - start == limit:  # the window is full: forget its first half
            start = first = column - limit // 2
            cache = model.new_cache(len(texts), min(longest - start, limit))
        column += 1


def _extend(texts: list[_Text], column: int, logits: Tensor, sampling: Sampling, on_token: OnToken | None) -> None:
    """Give every row that has none a token at `column`: its own choice, or a filler after its end."""
    due = [i for i, text in enumerate(texts) if len(text.row) == column]
    live = [i for i in due if texts[i].end is None]
    for i in due:
        if texts[i].end is not None:
            texts[i].row.append(texts[i].row[-1])
    if live:
        draws = [uniform(sampling.seed, texts[i].index, column - texts[i].prompt_length) for i in live]
        for i, token in zip(live, choose(logits[live], sampling, draws).tolist(), strict=True):
            texts[i].take(token, sampling, on_token)


@dataclass(frozen=True)
class Sampling:
    """How to go on from a prompt."""

    max_tokens: int = 128
    """Tokens to generate, at most."""
    temperature: float = 1.0
    """Logits are divided by it; 0: always the likeliest token."""
    top_k: int = 0
    """Choose among the k likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability (arXiv 1904.09751)."""
    seed: int = 0
    """With the text's index and the token's place it determines every choice."""
    stop: frozenset[int] = field(default_factory=frozenset)
    """Tokens that end a text; they are not part of it."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"max-tokens must be at least 1, not {self.max_tokens}")
        if not self.temperature >= 0:
            raise UserError(
                f"the temperature cannot be negative, and {self.temperature} is; 0 takes the likeliest token"
            )
        if self.top_k < 0:
            raise UserError(f"top-k must be 0 (all tokens) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p is a probability above 0 and at most 1, not {self.top_p}")


def uniform(seed: int, index: int, place: int) -> float:
    """A number in [0, 1) on a grid of 2^-32, fixed for ever by its three arguments."""
    text = f"windlass/sample/{seed}/{index}/{place}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") / 2**32


def choose(logits: Tensor, sampling: Sampling, draws: Sequence[float]) -> Tensor:
    """The next token of each row.

    Args:
        logits: [B, V]
        sampling: Temperature, top-k and top-p, applied in this order.
        draws: One number in [0, 1) a row; the token is where the cumulated probability passes it.

    Returns:
        Token ids [B], int64.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    kept = keep(logits.double() / sampling.temperature, sampling.top_k, sampling.top_p)
    # In float64 the sum of 2^18 probabilities is exact far below the grid of the draws.
    cumulated = kept.softmax(-1).cumsum(-1)
    draw = torch.tensor(draws, dtype=torch.float64, device=logits.device).unsqueeze(-1)
    place = torch.searchsorted(cumulated, draw * cumulated[:, -1:], right=True).squeeze(-1)
    return place.clamp_(max=logits.shape[-1] - 1)


def keep(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """The logits [B, V] with -inf at the tokens that top-k and top-p leave out; ties at the edge of top-k stay."""
    if 0 < top_k < logits.shape[-1]:
        edge = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < edge, -torch.inf)
    if top_p < 1:
        ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # the likeliest token has 0 before it: it always stays
        left_out = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(left_out, -torch.inf)
    return logits


UNFINISHED = "\ufffd"
SEEN = 16
"""Tokens of a prompt that are decoded together with the first that follow it."""


def text_after(tokenizer: Tokenizer, prompt: Sequence[int], made: Sequence[int]) -> str:
    """The text of tokens that follow a prompt, as it stands after the prompt's."""
    seen = list(prompt[-SEEN:])
    return tokenizer.decode([*seen, *made])[len(tokenizer.decode(seen)) :]


class TextDecoder:
    """Turns tokens into text one at a time; a character whose bytes are spread over tokens comes when it is whole.

    `after` are the tokens before the first, which are not shown: some tokenizers leave out the space before a text.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._ids = list(after[-SEEN:])
        # Tokens already shown; and where the stretch began that is decoded together with new ones.
        self._done, self._before = len(self._ids), 0

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._ids.append(token)
        text = self._new()
        if text.endswith(UNFINISHED):
            return ""
        self._before, self._done = self._done, len(self._ids)
        return text

    def rest(self) -> str:
        """What is left at the end, certain or not."""
        text = self._new()
        self._before = self._done = len(self._ids)
        return text

    def _new(self) -> str:
        known = self._tokenizer.decode(self._ids[self._before : self._done])
        return self._tokenizer.decode(self._ids[self._before :])[len(known) :]


class InOrder:
    """Writes several texts that are made at once, one after the other: the first as it comes, the next when it is done.

    A call takes (index, token), and (index, None) at a text's end: what `generate` gives its `on_token`. All follow the
    tokens `after`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        count: int,
        write: Callable[[str], None],
        begin: Callable[[int], None],
        after: Sequence[int] = (),
    ):
        self._decoders = [TextDecoder(tokenizer, after) for _ in range(count)]
        self._waiting: list[list[str]] = [[] for _ in range(count)]
        self._ended = [False] * count
        self._write, self._begin, self._current = write, begin, -1
        self._next()

    def __call__(self, index: int, token: int | None) -> None:
        """Take a token of a text, or its end."""
        decoder = self._decoders[index]
        text = decoder.rest() if token is None else decoder.add(token)
        self._ended[index] |= token is None
        if index == self._current:
            self._write(text)
        else:
            self._waiting[index].append(text)
        while self._current < len(self._ended) and self._ended[self._current]:
            self._next()

    def _next(self) -> None:
        self._current += 1
        if self._current < len(self._ended):
            self._begin(self._current)
            self._write("".join(self._waiting[self._current]))
