"""Text from a model: batched, with a KV cache, streamed, on any number of ranks.

Unusual: which token is chosen is a pure function of (seed, index of the text, place of the token). It depends neither on
what else is in the batch nor on the rank (but for rounding of the logits). No row is ever padded: all rows of a batch stand
at the same column, and one whose prompt is longer takes its prompt's next token while others already choose theirs.

Legend: B rows of a batch, T tokens of a pass, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from windlass.errors import UserError
from windlass.evaluation.lockstep import agree_on_pass, evaluating
from windlass.parallel.parallelize import uncompiled, unwrap

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer
    from windlass.parallel.dist import Ranks

Event = tuple[int, int | None]
"""The index of a text and its next token; None when the text is complete."""

REPLACEMENT = "\ufffd"
PROMPT_TAIL = 16
"""Tokens of a prompt that are decoded together with those that follow it: some tokenizers drop the space before a text."""


@dataclass(frozen=True)
class Sampling:
    """How to continue a prompt."""

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
            raise UserError(f"temperature must be 0 (the likeliest token) or more, not {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top-k must be 0 (all tokens) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p is a probability above 0 and at most 1, not {self.top_p}")


def uniform(seed: int, index: int, place: int) -> float:
    """A number in [0, 1) on a grid of 2^-32, a pure function of its three arguments."""
    text = f"windlass/sample/{seed}/{index}/{place}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") / 2**32


def choose(logits: Tensor, sampling: Sampling, draws: Sequence[float]) -> Tensor:
    """The next token of each row [B], int64, from logits [B, V] and one number in [0, 1) a row.

    Temperature, top-k and top-p are applied in this order; the token is where the cumulated probability passes the draw.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    masked = mask_unlikely(logits.double() / sampling.temperature, sampling.top_k, sampling.top_p)
    # In float64 the sum of 2^18 probabilities is exact far below the grid of the draws.
    cumulated = masked.softmax(-1).cumsum(-1)
    draw = torch.tensor(draws, dtype=torch.float64, device=logits.device).unsqueeze(-1)
    place = torch.searchsorted(cumulated, draw * cumulated[:, -1:], right=True).squeeze(-1)
    return place.clamp_(max=logits.shape[-1] - 1)


def mask_unlikely(logits: Tensor, top_k: int, top_p: float) -> Tensor:
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


def prompt_ids(model: Any, tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens from which a model generates; for an empty text the one that a text begins after.

    That is what the tokenizer puts before a text; else the BOS of the model's configuration, which many Llamas have though
    their tokenizer adds none; else the end-of-text token.
    """
    bos = getattr(unwrap(model), "bos", None)
    return tokenizer.encode_prompt(text) if text or bos is None or tokenizer.bos else [bos]


def window(model: Any) -> int:
    """Tokens that the model can see at once: its `limit`, which may lie past the `context` that it is trained on."""
    return int(getattr(model, "limit", model.context))


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    ranks: Ranks | None = None,
    *,
    indices: Sequence[int] | None = None,
    **how: Any,
) -> list[list[int]] | None:
    """The tokens that follow each prompt, without the one that stopped it. Arguments as `generate_events`."""
    indices = range(len(prompts)) if indices is None else indices
    texts: dict[int, list[int]] = {index: [] for index in indices}
    events = generate_events(model, prompts, sampling, ranks, indices=indices, **how)
    while True:
        try:
            index, token = next(events)
        except StopIteration as end:
            return list(texts.values()) if end.value else None
        if token is not None:
            texts[index].append(token)


def generate_divided(
    model: Any,
    tokenizer: Tokenizer,
    ranks: Ranks,
    sampling: Sampling,
    sizes: dict[int, int],
    prompt_of: Callable[[int], list[int]],
    **how: Any,
) -> dict[int, str] | None:
    """A text for each number in `sizes`, each generated on one rank, the same on every rank.

    They are divided in the order of `sizes` (about their prompts' lengths), so that the ranks have about the same work.
    """
    mine = sorted(sizes, key=lambda number: (sizes[number], number))[ranks.rank :: ranks.world]
    prompts = [prompt_of(number) for number in mine]
    texts = generate(model, prompts, sampling, ranks, indices=mine, vocab=tokenizer.vocab, **how)
    if texts is None:
        return None
    own = [(n, text_after(tokenizer, prompt, ids)) for n, prompt, ids in zip(mine, prompts, texts, strict=True)]
    return {n: text for part in ranks.all_gather_object("texts", own) for n, text in part}


def generate_events(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    ranks: Ranks | None = None,
    *,
    indices: Sequence[int] | None = None,
    batch: int = 16,
    vocab: int = 0,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    poll: Callable[[], bool] | None = None,
) -> Generator[Event, None, bool]:
    """Continue prompts, a token at a time.

    A text longer than the model's window continues from its last half: when the window is full, the first half of it is
    dropped.

    Args:
        model: Our GPT or a model of `transformers`: has `context`, perhaps a longer `limit`, `new_cache(batch, length)`, and
            `model(tokens [B, T], cache=cache)` gives logits [B, T or 1, V]. Under full_shard the module whose forward
            gathers the parameters.
        prompts: This rank's prompts, as token ids; none of them empty. Ranks may have different numbers of them.
        sampling: How to choose, how many, where to stop.
        ranks, autocast, poll: See `windlass.evaluation.lockstep`; without ranks this process is alone.
        indices: The number of each text, which with the seed determines it; default: its place in `prompts`.
        batch: Texts that are generated at once.
        vocab: The tokenizer's vocabulary, where the model's is padded: only its tokens are chosen; 0: all.

    Yields:
        (index, token) for each token as it is chosen, and (index, None) when the text is complete.

    Returns:
        Whether all texts are complete; False where `poll` cut it short.
    """
    model = unwrap(model)
    indices = range(len(prompts)) if indices is None else indices
    if any(not len(prompt) for prompt in prompts):
        raise UserError("a prompt is empty: generation needs at least one token to begin with")
    rows = [_Row(index, [int(t) for t in prompt]) for index, prompt in zip(indices, prompts, strict=True)]
    groups = batches([row.prompt_length for row in rows], batch, window(model), sampling.max_tokens)
    device = ranks.device if ranks else next(model.parameters()).device
    events: list[Event] = []
    work = _passes([[rows[i] for i in group] for group in groups], model, sampling, events)
    request = next(work, None)
    with evaluating(model), uncompiled():
        while True:
            active, stops = agree_on_pass(request is not None, poll is not None and poll(), ranks)
            if stops or not active:
                return not stops
            # Without work this rank still takes part with one token, so that sharded parameters are gathered everywhere.
            tokens, cache = request or ([[0]], model.new_cache(1, 1))
            with torch.no_grad(), autocast():
                logits = model(torch.tensor(tokens, dtype=torch.int64, device=device), cache=cache)[:, -1]
            if request is not None:
                try:
                    request = work.send(logits[:, :vocab].float() if vocab else logits.float())
                except StopIteration:
                    request = None
                yield from events
                events.clear()


class _Row:
    """One text: its prompt and the tokens chosen so far; after its end the row is filled with tokens that nobody reads."""

    def __init__(self, index: int, prompt: list[int]):
        self.index, self.tokens, self.prompt_length = index, prompt, len(prompt)
        self.ended = False

    def add(self, token: int, sampling: Sampling) -> Iterator[Event]:
        """Add a chosen token; yields the events of it."""
        self.tokens.append(token)
        self.ended = token in sampling.stop
        if not self.ended:
            yield self.index, token
            self.ended = len(self.tokens) - self.prompt_length == sampling.max_tokens
        if self.ended:
            yield self.index, None


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


def _passes(
    groups: list[list[_Row]], model: Any, sampling: Sampling, events: list[Event]
) -> Generator[tuple[list[list[int]], Any], Tensor, None]:
    """Continue each batch until all its texts have ended: yields (tokens [B, T], cache), is sent the last logits [B, V]."""
    for rows in groups:
        # First the columns that every prompt has are read in one pass, then column by column.
        column = min(row.prompt_length for row in rows)
        longest = max(row.prompt_length for row in rows) + sampling.max_tokens
        limit = window(model)
        start = first = max(0, column - limit)  # `start`: the first column that the model still sees
        cache = model.new_cache(len(rows), min(longest - start, limit))
        while True:
            logits = yield [row.tokens[first:column] for row in rows], cache
            due = [i for i, row in enumerate(rows) if len(row.tokens) == column]
            live = [i for i in due if not rows[i].ended]
            for i in due:
                if rows[i].ended:
                    rows[i].tokens.append(rows[i].tokens[-1])
            if live:
                draws = [uniform(sampling.seed, rows[i].index, column - rows[i].prompt_length) for i in live]
                for i, token in zip(live, choose(logits[live], sampling, draws).tolist(), strict=True):
                    events.extend(rows[i].add(token, sampling))
            if all(row.ended for row in rows):
                break
            first = column
            if column - start == limit:  # the window is full: drop its first half
                start = first = column - limit // 2
                cache = model.new_cache(len(rows), min(longest - start, limit))
            column += 1


def text_after(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of tokens that follow a prompt, as it stands after the prompt's."""
    tail = list(prompt[-PROMPT_TAIL:])
    return tokenizer.decode([*tail, *ids])[len(tokenizer.decode(tail)) :]


class TextDecoder:
    """Turns tokens into text one at a time; a character whose bytes are spread over tokens comes when it is whole.

    `after` are the tokens before the first, which are not shown.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._ids = list(after[-PROMPT_TAIL:])
        # Tokens already shown; and where the stretch begins that is decoded together with new ones.
        self._done, self._before = len(self._ids), 0

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._ids.append(token)
        text = self._new()
        if text.endswith(REPLACEMENT):
            return ""
        self._before, self._done = self._done, len(self._ids)
        return text

    def rest(self) -> str:
        """What is left at the end, certain or not."""
        text = self._new()
        self._before = self._done = len(self._ids)
        return text

    def _new(self) -> str:
        shown = self._tokenizer.decode(self._ids[self._before : self._done])
        return self._tokenizer.decode(self._ids[self._before :])[len(shown) :]


def in_order(
    events: Iterable[Event], tokenizer: Tokenizer, count: int, after: Sequence[int] = ()
) -> Iterator[tuple[int, str]]:
    """Texts 0 to `count` - 1, generated at once, as (index, piece of text), one text after the other.

    The first comes as it is generated, the next when the one before is complete; each at least once, if empty. All follow
    the tokens `after`.
    """
    decoders = [TextDecoder(tokenizer, after) for _ in range(count)]
    waiting, ended = [""] * count, [False] * count
    current = 0
    for index, token in events:
        waiting[index] += decoders[index].rest() if token is None else decoders[index].add(token)
        ended[index] |= token is None
        while current < count:
            if waiting[current] or ended[current]:
                yield current, waiting[current]
                waiting[current] = ""
            if not ended[current]:
                break
            current += 1
