"""Text from a model: batched, with a KV cache, streamed, on any number of ranks.

The chosen token is a pure function of (seed, index of the text, place of the token), except for
rounding. No row is padded: all rows of a batch are at the same column, and a row with a longer
prompt takes its prompt's next token while others choose one.

Legend: B rows of a batch, T tokens of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.evaluation.passes import Interrupted, Passes
from windlass.model.modes import casting_once, evaluating
from windlass.parallel.collectives import max_async
from windlass.parallel.parallelize import varying_shapes
from windlass.seeds import seed_bytes

Event = tuple[int, int | None]  # the index of a text and its next token; None: the text is complete
# Prompt tokens decoded with the next ones: some tokenizers drop the space before a text.
PROMPT_TAIL = 16
BATCH = 16  # texts that are continued together


@dataclass(frozen=True)
class Sampling:
    """The settings for continuing a prompt."""

    max_tokens: int = 128
    temperature: float = 1.0  # divides the logits; 0: always the likeliest token
    top_k: int = 0  # choose among the k likeliest tokens; 0: among all
    top_p: float = 1.0  # among the likeliest with this probability together (arXiv 1904.09751)
    seed: int = 0
    stop: frozenset[int] = frozenset()  # tokens that end a text and are not part of it

    def __post_init__(self) -> None:
        valid = self.max_tokens >= 1 and self.temperature >= 0 and self.top_k >= 0
        if not valid or not 0 < self.top_p <= 1:
            raise UserError("write max-tokens >= 1, temperature and top-k >= 0, 0 < top-p <= 1")


def uniform(seed: int, index: int, place: int) -> float:
    """A number in [0, 1) on a grid of 2^-32, a pure function of its three arguments."""
    draw = seed_bytes(f"windlass/sample/{seed}/{index}/{place}", 4)
    return int.from_bytes(draw, "little") / 2**32


def next_tokens(logits: Tensor, sampling: Sampling, draws: Sequence[float]) -> Tensor:
    """The next token of each row [B] from logits [B, V] and a number in [0, 1) a row: the token at
    which the cumulated probability after temperature, top-k and top-p passes the draw."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits, vocab = logits.double() / sampling.temperature, logits.shape[-1]
    if 0 < sampling.top_k < vocab:
        edge = logits.topk(sampling.top_k, -1).values[:, -1:]  # ties with the last one stay
        logits = logits.masked_fill(logits < edge, -torch.inf)
    if sampling.top_p < 1:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = values.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= sampling.top_p  # never the likeliest
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    # In float64 the sum of 2^18 probabilities is exact far below the grid of the draws.
    cumulated = logits.softmax(-1).cumsum(-1)
    draw = torch.tensor(draws, dtype=torch.float64, device=logits.device).unsqueeze(-1)
    place = torch.searchsorted(cumulated, draw * cumulated[:, -1:], right=True).squeeze(-1)
    return place.clamp_(max=vocab - 1)


def window(model: Any) -> int:
    """Tokens that the model can see at once: `limit`, perhaps more than its `context`."""
    return int(getattr(model, "limit", model.context))


def text_after(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of tokens after a prompt."""
    tail = list(prompt[-PROMPT_TAIL:])
    return tokenizer.decode([*tail, *ids])[len(tokenizer.decode(tail)) :]


def generate(
    passes: Passes,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    indices: Sequence[int] | None = None,
) -> list[list[int]]:
    """The tokens after each prompt, without the stop token; arguments as `generate_events`."""
    indices = range(len(prompts)) if indices is None else indices
    texts = {index: list[int]() for index in indices}
    done = 0
    for index, token in generate_events(passes, prompts, sampling, indices):
        if token is not None:
            texts[index].append(token)
        else:
            done += 1
            passes.show(done, len(prompts))
    return list(texts.values())


def generate_divided(
    passes: Passes,
    sampling: Sampling,
    numbers: Sequence[int],
    prompt_of: Callable[[int], list[int]],
) -> dict[int, str]:
    """A text for each number, generated on one rank; every rank gets all texts."""
    mesh = passes.ranks.mesh
    own_numbers = numbers[mesh.data_rank :: mesh.data_world]
    prompts = [prompt_of(number) for number in own_numbers]
    texts = generate(passes, prompts, sampling, own_numbers)
    decoded = [
        (n, text_after(passes.tokenizer, prompt, ids))
        for n, prompt, ids in zip(own_numbers, prompts, texts, strict=True)
    ]
    return dict(chain(*passes.ranks.all_gather_object("texts", decoded)))


def generate_events(
    passes: Passes,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    indices: Sequence[int] | None = None,
) -> Iterator[Event]:
    """Continue prompts: yields (index, token), and (index, None) when a text is complete.

    A full window drops its first half. Raises Interrupted if a rank was asked to stop.

    Args:
        passes: Its model has `context`, perhaps a longer `limit`, and `new_cache(batch, length)`;
            `model(tokens [B, T], cache=cache)` returns logits [B, T or 1, V].
        prompts: The prompts of this rank; ranks may have different numbers of them.
        indices: Numbers of the texts (default: their places); with the seed they determine the
            texts.
    """
    model, ranks = passes.model, passes.ranks
    if any(not len(prompt) for prompt in prompts):
        raise UserError("a prompt is empty: generation needs at least one token to begin with")
    # a model's vocabulary may be padded
    vocab = passes.tokenizer.vocab if passes.tokenizer else None
    numbers = range(len(prompts)) if indices is None else indices
    lengths = list(map(len, prompts))
    groups = iter(batches(lengths, window(model), sampling.max_tokens))
    group: _Texts | None = None
    with evaluating(model), varying_shapes():
        while True:
            if group is None or not group.active:
                members = [(prompts[i], numbers[i]) for i in next(groups, [])]
                group = _Texts(model, members, sampling) if members else None
            # Sharded parameters are gathered in every pass, so a rank without work takes part with
            # one token until no rank has work left.
            flags = [group is not None, passes.poll is not None and passes.poll()]
            active, stops = max_async(flags, ranks.mesh).wait()
            if stops:
                raise Interrupted
            if not active:
                return
            tokens, cache = group.next_pass() if group else ([[0]], model.new_cache(1, 1))
            ids = torch.tensor(tokens, dtype=torch.int64, device=ranks.device)
            with torch.no_grad(), casting_once(passes.autocast):
                logits = model(ids, cache=cache)[:, -1]
            if group is not None:
                yield from group.add(logits[:, :vocab].float())


class _Texts:
    """Texts continued together: first the columns of every prompt, then one column a pass."""

    def __init__(
        self, model: Any, members: Sequence[tuple[Sequence[int], int]], sampling: Sampling
    ):
        self.model, self.sampling, self.limit = model, sampling, window(model)
        self.cache: Any = None
        self.rows = [[int(token) for token in prompt] for prompt, _ in members]
        self.prompt_lengths = [len(row) for row in self.rows]
        self.indices = [index for _, index in members]
        self.active = set(range(len(members)))  # rows that have not ended
        self.column = min(self.prompt_lengths)  # tokens of each row after the next pass
        self.start = max(0, self.column - self.limit)  # the first column that the model still sees

    def next_pass(self) -> tuple[list[list[int]], Any]:
        """The next tokens to read [B, T], and the cache of the tokens before them."""
        first = self.column - 1
        if self.cache is not None and first - self.start == self.limit:
            # drop the first half of the full window
            self.start, self.cache = first - self.limit // 2, None
        if self.cache is None:
            first, longest = self.start, max(self.prompt_lengths) + self.sampling.max_tokens
            self.cache = self.model.new_cache(len(self.rows), min(longest - first, self.limit))
        return [row[first : self.column] for row in self.rows], self.cache

    def add(self, logits: Tensor) -> Iterator[Event]:
        """Choose the next column from logits [B, V], for rows past their prompt; yields events."""
        sampling = self.sampling
        live = [i for i in sorted(self.active) if len(self.rows[i]) == self.column]
        if live:
            places = {i: self.column - self.prompt_lengths[i] for i in live}
            draws = [uniform(sampling.seed, self.indices[i], places[i]) for i in live]
            tokens = next_tokens(logits[live], sampling, draws).tolist()
            for i, token in zip(live, tokens, strict=True):
                self.rows[i].append(token)
                if token not in sampling.stop:
                    yield self.indices[i], token
                if token in sampling.stop or places[i] + 1 == sampling.max_tokens:
                    self.active.discard(i)
                    yield self.indices[i], None
        self.column += 1
        for row in self.rows:  # these tokens of a complete row are ignored
            row.extend(row[-1:] * (self.column - len(row)))


def batches(lengths: Sequence[int], context: int, max_tokens: int) -> list[list[int]]:
    """Prompts of similar lengths together; of one length if the window may slide."""
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        longer = bool(groups) and lengths[place] > lengths[groups[-1][0]]
        slides = lengths[place] + max_tokens > context
        if not groups or len(groups[-1]) == BATCH or (slides and longer):
            groups.append([])
        groups[-1].append(place)
    return groups


def in_order(
    events: Iterable[Event], tokenizer: Tokenizer, count: int, after: Sequence[int] = ()
) -> Iterator[tuple[int, str]]:
    """Texts 0 to `count` - 1 after the tokens `after`, as (index, piece), one after the other.

    An empty text comes as one empty piece. A character comes when all of its tokens are there.
    """
    ids: list[list[int]] = [[] for _ in range(count)]
    ended, current, shown = set[int](), 0, 0
    for index, token in events:
        if token is None:
            ended.add(index)
        else:
            ids[index].append(token)
        if index != current:
            continue
        while current < count and (ids[current] or current in ended):
            text = text_after(tokenizer, after, ids[current])
            if current in ended or not text.endswith("\ufffd"):
                yield current, text[shown:]
                shown = len(text)
            if current not in ended:
                break
            current, shown = current + 1, 0
