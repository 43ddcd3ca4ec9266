"""Rows of examples and of documents, against plain Python: the cut at the context, best-fit packing,
the documents of a row, the labels, the counts; and sets that are shorter than a row.
"""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import tokenizer_fixtures
from data_fixtures import documents, jsonl, questions, recipe_for, text_hash
from helpers import refused
from sample_fixtures import Example, examples, opened
from windlass.data.batch import masks_documents, unpadded_tokens
from windlass.data.loader import eval_batches
from windlass.data.open import Data, open_data
from windlass.data.samples import best_fit
from windlass.recipe.settings import IGNORE_INDEX


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
    assert unpadded_tokens(samples) == sum(sizes)
    over = [len(one.tokens) - context - 1 for one, _ in kept if len(one.tokens) > context + 1]
    assert (samples.cut, samples.cut_tokens) == (len(over), sum(over))
    begins = np.cumsum([0, *(len(one.tokens) for one in rows)])[:-1]
    ends = np.cumsum([s.tokens for s in samples._tokens.corpora[0].index.shards])
    shard_of = np.searchsorted(ends, begins, "right")
    learns = np.array([cut(one, context) is not None for one in rows])
    expected = np.bincount(shard_of[learns], minlength=len(ends))
    assert list(samples.shard_samples) == expected.tolist()


def test_the_tokens_of_a_users_set():
    assert unpadded_tokens(SimpleNamespace(valid_tokens=3)) == 3
    assert unpadded_tokens(SimpleNamespace()) is None


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


# -- best-fit packing: the rows of an independent best-fit decreasing, every token once


def best_fit_decreasing(sizes, context):
    """The used tokens of each row, by the textbook: one item at a time, a search over all rows."""
    rows = []
    for size in sorted(sizes, reverse=True):
        fitting = [i for i, used in enumerate(rows) if used + size <= context]
        if fitting:
            rows[max(fitting, key=lambda i: rows[i])] += size
        else:
            rows.append(size)
    return sorted(rows)


@given(st.integers(1, 40), st.data())
def test_rows_are_those_of_best_fit_decreasing(context, data):
    sizes = data.draw(st.lists(st.integers(1, context), min_size=1, max_size=120))
    order, edges = best_fit(np.array(sizes), context)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    parts = np.split(np.array(sizes)[order], edges[1:-1])
    assert sorted(int(part.sum()) for part in parts) == best_fit_decreasing(sizes, context)
    assert all(len(part) and (np.diff(part) <= 0).all() for part in parts)


def test_long_tailed_lengths_fill_the_rows_and_any_rows_are_a_fair_sample():
    draw = np.random.default_rng(0)
    for context in (512, 2048, 8192):
        sizes = np.clip(draw.lognormal(5.5, 1.0, 20_000).astype(np.int64), 1, context)
        order, edges = best_fit(sizes, context)
        assert sizes.sum() / ((len(edges) - 1) * context) > 0.995
        first = sizes[order[: edges[(len(edges) - 1) // 4]]]
        assert np.median(first) == pytest.approx(np.median(sizes), rel=0.2)


@pytest.mark.parametrize("tails", [False, True])
def test_each_item_is_whole_and_alone_in_its_part_of_a_row(tmp_path, tails):
    made = examples(60, longest=90, tails=tails)
    rows, packed = (opened(made, tmp_path, 64, packed=packed) for packed in (False, True))
    assert rows.cut
    batch = packed.read(np.arange(len(packed)))
    assert batch.documents is not None and batch.positions is not None
    seen = []
    for at in range(len(packed)):
        items = packed.examples_of(at)
        seen += items
        for number, item in enumerate(items):
            here = batch.documents[at] == number
            alone = rows.read(np.array([item]))
            assert batch.tokens[at][here].tolist() == alone.tokens[0].tolist()
            assert batch.labels[at][here].tolist() == alone.labels[0].tolist()
            assert batch.positions[at][here].tolist() == list(range(here.sum()))
        padding = batch.documents[at] == len(items)
        assert padding.sum() == 64 - packed.length(at)
        assert (batch.labels[at][padding] == -100).all()
        assert (batch.tokens[at][padding] == 255).all()
    assert sorted(seen) == list(range(len(rows)))
    assert (batch.labels != -100).sum() == packed.valid_tokens == rows.valid_tokens
    assert unpadded_tokens(packed) == unpadded_tokens(rows) == sum(rows.sizes)


def test_rows_without_file_order_or_of_texts_are_refused():
    with refused("data.order", '"shuffled"'):
        recipe_for("x", packing="best-fit", format="chat").replace("data.order=sequential")
    with refused("data.packing", '"packed"'):
        recipe_for("x").replace("data.packing=best-fit")


# -- packed rows know their documents

CONTEXT = 64


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "x.jsonl", documents(150))


def data_of(source, folder: Path, **data) -> Data:
    return open_data(recipe_for(source, folder / "data", context=CONTEXT, **data))


def is_held(text: str) -> bool:
    return text_hash(text) < 2**64 // 5


def stream_of(whole: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and the number of each token's document."""
    numbers = [[number] * len(ids) for number, ids in enumerate(whole)]
    return np.concatenate(whole), np.concatenate(numbers)


def check_rows(samples, whole: list[list[int]], following: int, ragged: bool) -> None:
    """The rows of a set are those of its documents end to end."""
    ids, of = stream_of(whole)
    expected, labels = 0.0, 0
    batch = samples.read(np.arange(len(samples)))
    for row in range(len(samples)):
        here = slice(row * CONTEXT, min((row + 1) * CONTEXT, len(ids) - 1))
        count = here.stop - here.start
        assert batch.tokens[row, :count].tolist() == ids[here].tolist()
        after = slice(here.start + 1, here.stop + 1)
        wanted = np.where(of[after] == of[here], ids[after], following)
        assert batch.labels[row, :count].tolist() == wanted.tolist()
        assert (batch.labels[row, count:] == IGNORE_INDEX).all()
        part = np.unique(of[here], return_inverse=True)[1]
        assert batch.documents[row, :count].tolist() == part.tolist()
        sizes = np.bincount(part)
        places = [place for size in sizes for place in range(size)]
        assert batch.positions[row, :count].tolist() == places
        labels += count
        expected += float((sizes**2).sum())
    assert labels == samples.valid_tokens == (len(ids) - 1 if ragged else len(samples) * CONTEXT)
    assert 0 <= len(ids) - 1 - labels < CONTEXT
    assert samples.attended == pytest.approx(expected / labels, rel=1e-12)


@pytest.mark.parametrize("kind", ["byte", "llama2", "llama3"])
def test_the_rows_are_cut_documents(source, tmp_path, kind):
    """EOT text, or BOS text EOS; the label after a document is what begins the next document."""
    name, begin, end = "byte", 256, []
    if kind != "byte":
        folder = tokenizer_fixtures.save(kind, tmp_path / kind)
        inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
        inner.encode_special_tokens = True
        named = tokenizer_fixtures.KINDS[kind]
        begin, *end = (inner.token_to_id(named[edge]) for edge in ("bos", "eos"))
        name = f"hf:{folder}"
    data = data_of(source, tmp_path, val_fraction=0.2, tokenizer=name)
    for samples, held in ((data.train, False), (data.val, True)):
        own = [text for text in documents(150) if text and is_held(text) is held]
        ids = [
            text.encode() if kind == "byte" else inner.encode(text, add_special_tokens=False).ids
            for text in own
        ]
        whole = [[begin, *document, *end] for document in ids]
        assert len(own) > 10 and samples.tokens == sum(map(len, whole))
        check_rows(samples, whole, begin, ragged=held)
    plain = data_of(source, tmp_path, val_fraction=0.2, tokenizer=name, document_mask=False)
    assert data.fingerprint == plain.fingerprint and len(data.train) == len(plain.train)
    rows = np.arange(len(plain.train))
    batch = plain.train.read(rows)
    assert (data.train.read(rows).tokens == batch.tokens).all()
    assert batch.documents is None and not masks_documents(plain.train)


def test_a_range_that_begins_inside_of_a_document_is_a_document(source, tmp_path):
    """The first shards are held out, and several sources join."""
    other = jsonl(tmp_path / "y.jsonl", documents(90, seed=1))
    data = data_of([str(source), str(other)], tmp_path, val_shards=1)
    rest, held = [], set()
    for texts in (documents(150), documents(90, seed=1)):
        whole = [[256, *text.encode()] for text in texts if text]
        ids, of = stream_of(whole)
        assert of[1023] == of[1024]  # the first shard ends inside of a document
        held |= {tuple(document) for document in whole[: of[1023] + 1]}
        rest.append([ids[1024:][of[1024:] == of[1024]].tolist()])
        rest.append(whole[of[1024] + 1 :])
    trained = [document for part in rest for document in part if tuple(document) not in held]
    assert len(trained) < sum(map(len, rest)) and data.division.shared
    check_rows(data.train, trained, 256, ragged=False)


def test_sources_without_documents_need_no_mask(source, tmp_path):
    (tmp_path / "one.txt").write_text("one text " * 200)
    (np.arange(3000, dtype="<u2") % 50).tofile(tmp_path / "tokens.bin")
    shards = f"shards:{tmp_path / 'tokens.bin'}"
    for number, name in enumerate((tmp_path / "one.txt", shards)):
        assert not masks_documents(data_of(name, tmp_path / str(number)).train)
    data = data_of(source, tmp_path, document_mask=True, eval_source=str(tmp_path / "one.txt"))
    assert masks_documents(data.train) and not masks_documents(data.val)
    with refused("data.document_mask", "shards of other tools", "auto"):
        recipe_for(shards).replace("data.document_mask=true")


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
