"""Questions and conversations as rows, against plain Python: the cut at the context, what is left
out, the labels, the counts; and sets that are shorter than a row.
"""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_fixtures import documents, jsonl, questions, recipe_for
from helpers import refused
from sample_fixtures import Example, examples, opened
from windlass.data.loader import eval_batches
from windlass.data.open import open_data
from windlass.data.samples import real_tokens


def cut(one: Example, context: int) -> tuple[list[int], list[bool]] | None:
    """The tokens and marks of an example in a row; None if nothing is left to learn."""
    room, size = context + 1, len(one.tokens)
    if size <= room:
        return one.tokens, one.marks
    head = room - one.tail
    if head < one.reach:
        return None
    places = [*range(head), *range(size - one.tail, size)]
    return [one.tokens[i] for i in places], [one.marks[i] for i in places]


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.integers(2, 50), st.booleans(), st.integers(60, 260))
def test_rows_are_those_of_plain_python(tmp_path_factory, seed, context, tails, shard_tokens):
    rows, folder = examples(30, seed, tails=tails), tmp_path_factory.mktemp("data")
    samples = opened(rows, folder, context, shard_tokens=shard_tokens)
    kept = [(one, new) for one in rows if (new := cut(one, context)) is not None]
    assert len(samples) == len(kept)
    assert samples.left_out == 30 - len(kept)
    batch = samples.read(np.arange(len(kept)))
    sizes = [len(tokens) - 1 for _, (tokens, _) in kept]
    assert batch.tokens.shape == batch.labels.shape == (len(kept), max(sizes, default=1))
    assert batch.documents is None and batch.positions is None
    for number, (_, (tokens, marks)) in enumerate(kept):
        row, counted = samples.example(number)
        assert (row.tolist(), counted.tolist()) == (tokens, marks)
        padding = batch.tokens.shape[1] - sizes[number]
        assert batch.tokens[number].tolist() == tokens[:-1] + [255] * padding
        wanted = [
            b if mark else -100 for (_, b), mark in zip(pairwise(tokens), marks[1:], strict=True)
        ]
        assert batch.labels[number].tolist() == wanted + [-100] * padding
        assert set(wanted) != {-100} and samples.length(number) == sizes[number]
    assert samples.valid_tokens == sum(sum(marks[1:]) for _, (_, marks) in kept)
    assert real_tokens(samples) == sum(sizes)
    over = [len(one.tokens) - context - 1 for one, _ in kept if len(one.tokens) > context + 1]
    assert (samples.cut, samples.cut_tokens) == (len(over), sum(over))
    begins = np.cumsum([0, *(len(one.tokens) for one in rows)])[:-1]
    ends = np.cumsum([s.tokens for s in samples._tokens.parts[0].corpus.index.shards])
    shard_of = np.searchsorted(ends, begins, "right")
    learns = np.array([cut(one, context) is not None for one in rows])
    expected = np.bincount(shard_of[learns], minlength=len(ends))
    assert list(samples.shard_samples) == expected.tolist()


def test_the_tokens_of_a_users_set():
    assert real_tokens(SimpleNamespace(valid_tokens=3)) == 3
    assert real_tokens(SimpleNamespace()) is None


def test_a_question_keeps_its_answer_and_needs_it_in_the_context(tmp_path):
    file = questions(tmp_path / "squad.json", 20)
    how = {"format": "squad", "val_fraction": 0.1}

    def rows(context):
        data = open_data(recipe_for(f"squad:{file}", tmp_path / "data", context=context, **how))
        return data, [data.train.example(i) for i in range(len(data.train))]

    whole, cut_rows = rows(400)[1], rows(108)
    data, short = cut_rows
    assert data.train.cut and data.tokenizer.kind == "byte"
    places = {}
    for tokens, marks in whole:
        prompt, answer = bytes(tokens[~marks].tolist()), tokens[marks].tolist()
        end = prompt.index(bytes(answer[1:-1])) + len(answer) - 2
        room = 109 - len(answer) - len(b" Answer:")
        if len(tokens) <= 109 or end <= room:
            kept = (
                tokens if len(tokens) <= 109 else np.append(tokens[:room], tokens[-(109 - room) :])
            )
            places[tuple(kept.tolist())] = tuple(answer)
    assert {tuple(t.tolist()): tuple(t[m].tolist()) for t, m in short} == places
    assert data.train.left_out == len(whole) - len(short)
    with refused("(train): no item fits", "left out", "model.context"):
        rows(40)


# -- sets of less than a row


@pytest.mark.parametrize("size", [1, 2, 12, 16, 17, 18])
def test_a_short_validation_text_is_one_narrower_row(tmp_path, size):
    (tmp_path / "long.txt").write_text("abc " * 200)
    (tmp_path / "short.txt").write_text(("xyz" * 6)[:size])
    recipe = recipe_for(
        tmp_path / "long.txt", tmp_path / "data", eval_source=str(tmp_path / "short.txt")
    )
    if size == 1:
        with refused("(val): 1 tokens are too few", "model.context + 1"):
            open_data(recipe)
        return
    val = open_data(recipe).val
    batches = list(eval_batches(val, 0, 1, 3, 0, len(val)))
    labels = [int(x) for batch in batches for x in batch.labels[batch.labels != -100]]
    assert bytes(labels).decode() == ("xyz" * 6)[1:size]
    assert val.valid_tokens == size - 1 and len(val) == -(-(size - 1) // 16)
    assert val.length(0) == min(16, size - 1)


def test_short_sets_of_documents_and_of_a_mixture(tmp_path):
    train = jsonl(tmp_path / "train.jsonl", documents(150))
    val = jsonl(tmp_path / "val.jsonl", ["a", "bc"])
    recipe = recipe_for(train, tmp_path / "data", eval_source=str(val), context=64)
    batch = open_data(recipe).val.read(np.array([0]))
    assert batch.tokens.tolist() == [[256, 97, 256, 98]]
    assert batch.labels.tolist() == [[97, 256, 98, 99]]
    assert batch.documents.tolist() == [[0, 0, 1, 1]]
    (tmp_path / "one.txt").write_text("x")
    names = {"a": (train, val), "b": (jsonl(tmp_path / "b.jsonl", documents(9, 2)), "")}
    names["c"] = (tmp_path / "train.jsonl", tmp_path / "one.txt")
    mix = [{"name": n, "source": str(s), "eval_source": str(e)} for n, (s, e) in names.items()]
    mixed = open_data(recipe_for("", tmp_path / "data", context=64, mix=mix)).val
    batch = mixed.read(np.arange(len(mixed)))
    assert mixed.names == ["a", "b"] and set(batch.sources.tolist()) == {0, 1}
    assert batch.tokens.shape[1] == 64
    narrow = batch.sources.tolist().index(0)
    assert batch.labels[narrow].tolist() == [97, 256, 98, 99, *[-100] * 60]
