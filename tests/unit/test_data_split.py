"""What is held out, against an independent reference; nothing validated is trained on."""

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_fixtures import (
    conversations,
    documents,
    jsonl,
    questions,
    read_documents,
    recipe_for,
    reference_split,
    text_hash,
    texts_of,
)
from helpers import refused
from windlass.data.describe import describe, warnings
from windlass.data.open import open_data
from windlass.data.split import held_out
from windlass.data.tokenizer_kinds import bpe_tokenizer


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def split_of(texts, folder, **data):
    """The training and validation texts that a file of documents gives."""
    return texts_of(
        open_data(recipe_for(jsonl(folder / "x.jsonl", texts), folder / "data", **data))
    )


@given(st.lists(st.text(max_size=30), min_size=1, max_size=8), st.sampled_from([0.1, 0.5]))
@settings(max_examples=30)
def test_few_texts_of_any_characters_are_cut_by_characters(tmp_path_factory, texts, fraction):
    texts = [*texts, "a text that is long enough for one row " * 3]
    texts = [t.encode("utf-8", "replace").decode() for t in texts]
    wanted = [list(filter(None, part)) for part in reference_split(texts, fraction)]
    found = split_of(texts, tmp_path_factory.mktemp("x"), val_fraction=fraction)
    assert [list(filter(None, part)) for part in found] == wanted


def test_order_copies_limits_and_tokenizers_change_no_choice(tmp_path):
    texts = [t for t in documents(300, longest=40) if t]
    held = set(reference_split(texts, 0.1)[1])
    bpe = {"tokenizer": "bpe", "tokenizer_vocab": 300}
    changes = {"max_tokens": 5000}, {"tokenizer": "char"}, bpe
    for number, more in enumerate(({}, *changes, {"shard_tokens": 4096})):
        shuffled = texts * 2
        random.Random(number).shuffle(shuffled)
        train, val = split_of(shuffled, tmp_path / str(number), **more)
        assert not set(train) & set(val) and set(val) <= held and not set(train) & held
        assert len(val) > 1
        if not more:
            assert set(val) == held


def test_every_file_of_a_folder_is_represented(tmp_path):
    for n in range(4):
        jsonl(tmp_path / "c" / f"{n}.jsonl", [f"file {n}, text {k}" * 3 for k in range(300)])
    _, val = texts_of(open_data(recipe_for(tmp_path / "c", tmp_path / "data")))
    assert {re.match(r"file \d", text)[0] for text in val} == {f"file {n}" for n in range(4)}
    for n in range(3):
        (tmp_path / f"book{n}.txt").write_text(f"book {n} says something. " * 100)
    _, val = texts_of(open_data(recipe_for(tmp_path / "book*.txt", tmp_path / "data")))
    assert [len(text) for text in val] == [230, 230, 230]
    assert [f"book {n}" in text for n, text in enumerate(val)] == [True] * 3


def test_a_long_text_among_many_documents_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("windlass.data.split.LONG_TEXT", 2000)
    long = [f"{n} long text, " * 300 for n in range(30)]
    texts = [t for n in range(30) for t in (long[n], *(f"short {n}-{k}" for k in range(9)))]
    train, val = split_of(texts, tmp_path)
    cut = [int(len(t) * 9 / 10) for t in long]
    assert [t for t in train if len(t) > 99] == [t[:n] for t, n in zip(long, cut, strict=True)]
    assert [t for t in val if len(t) > 99] == [t[n:] for t, n in zip(long, cut, strict=True)]
    held = [t for t in texts if len(t) < 99 and text_hash(t) < 2**64 // 10]
    assert [t for t in val if len(t) < 99] == held and len(held) > 9


# -- validation data of its own


def test_no_validation_text_is_trained_on(tmp_path):
    """The training source is a pattern, a link, a file with copies, or the validation file."""
    texts, held = documents(150, longest=40), [t for t in documents(60, 5, longest=40) if t]
    own = jsonl(tmp_path / "c" / "a.jsonl", texts)
    separate = str(jsonl(tmp_path / "c" / "val.jsonl", held))
    (tmp_path / "link").symlink_to(tmp_path / "c")
    copies = jsonl(tmp_path / "both.jsonl", [*texts, *held, *held])
    also = sum(t in set(held) for t in texts)
    for source, shared in (
        (tmp_path / "c" / "*.jsonl", len(held) + also),
        ([str(tmp_path / "link"), str(own)], len(held) + 2 * also),
        (copies, 2 * len(held) + also),
    ):
        data = open_data(recipe_for(source, tmp_path / "data", eval_source=separate))
        train, val = texts_of(data)
        assert val == held and set(train) == {t for t in texts if t} - set(held)
        facts = describe(data)
        assert facts["shared"] == shared
        assert any(f"{shared} documents" in text for text in warnings(facts))
    with refused("data.source", "nothing is left"):
        open_data(recipe_for(separate, tmp_path / "data", eval_source=separate))


def test_a_text_file_beside_its_validation_file(tmp_path):
    """As `data.source='c/*.txt' data.eval_source=c/val.txt`; also of a text in several blocks."""
    for name, size in (("a", 50), ("b", 2000), ("val", 60_000)):
        (tmp_path / f"{name}.txt").write_text(f"text {name} of this. " * size)
    recipe = recipe_for(
        tmp_path / "*.txt", tmp_path / "data", eval_source=str(tmp_path / "val.txt")
    )
    data = open_data(recipe)
    train, val = texts_of(data)
    assert [t[:7] for t in (*train, *val)] == ["text a ", "text b ", "text va"]
    assert len(val[0]) == 60_000 * 18 and data.division.shared == 1


def test_members_of_a_mixture_do_not_train_on_the_validation_data_of_others(tmp_path):
    few = ["a text of the few, " * 20, "another of them, " * 20]
    source = jsonl(tmp_path / "many.jsonl", [*documents(200, longest=30), *few])
    books = jsonl(tmp_path / "few.jsonl", few)  # of each the end is held out
    mix = [{"name": "many", "source": str(source)}, {"name": "few", "source": str(books)}]
    data = open_data(recipe_for("stdlib", tmp_path / "data", mix=mix))
    train, val = texts_of(data)
    assert [t for t in val if t in "".join(few)] == reference_split(few, 0.1)[1]
    assert not set(few) & set(train) and data.division.shared == 2
    # whole texts of another member's validation data, which this one would only cut
    mix[0]["eval_source"] = str(books)
    mix[1]["source"] = str(jsonl(tmp_path / "c.jsonl", ["something else, " * 9, *few]))
    train, val = texts_of(open_data(recipe_for("stdlib", tmp_path / "data", mix=mix)))
    assert not [t for t in train if t.startswith(("a text of the few", "another of"))]
    assert set(few) <= set(val)


def test_members_of_a_mixture_that_cut_a_text_at_different_places(tmp_path):
    """No part of a text is trained on in one member and validated in another."""
    few = [" ".join(f"{n}-{k}" for k in range(200)) for n in range(4)]
    mix = [
        {"name": name, "source": str(jsonl(tmp_path / f"{name}.jsonl", texts)), "val_fraction": f}
        for name, texts, f in (("a", ["other " * 99, *few], 0.1), ("b", few, 0.5))
    ]
    data = open_data(recipe_for("stdlib", tmp_path / "data", mix=mix))
    train, val = (set(re.findall(r"\d+-\d+ ", " ".join(t))) for t in texts_of(data))
    assert train and val and not train & val
    assert data.division.shared == 4  # `a` trains on more than `b` does
    mix[0]["val_fraction"] = 0.5
    assert open_data(recipe_for("stdlib", tmp_path / "data", mix=mix)).division.shared == 0


def test_separate_conversations_end_at_the_limit_and_are_not_trained_on(tmp_path):
    source = conversations(tmp_path / "x.jsonl", 120)
    held = conversations(tmp_path / "v.jsonl", 300, seed=5, longest=9)
    also = source.read_text().splitlines(keepends=True)[10:13]
    held.write_text("".join(also) + held.read_text())
    how = {"format": "chat", "context": 500, "eval_source": str(held), "max_tokens": 40_000}
    data = open_data(recipe_for(source, tmp_path / "data", **how))
    sizes = [
        sum(len(message["content"]) for message in json.loads(line)["messages"])
        for line in held.read_text().splitlines()
    ]
    count = int(np.searchsorted(np.cumsum(sizes), 4000)) + 1
    assert len(data.val) == count == data.division.val[0].corpora[0].index.items < 100
    (numbers,) = data.division.train[0].numbers
    assert data.division.shared == 3 and not {10, 11, 12} & set(numbers.tolist())


def test_the_validation_source_has_the_share_of_the_limit(tmp_path):
    texts, held = documents(300, longest=40), documents(300, 5, longest=40)
    source, other = jsonl(tmp_path / "x.jsonl", texts), jsonl(tmp_path / "v.jsonl", held)
    held = [t for t in held if t]
    limits = {"eval_source": str(other), "max_tokens": 8000}
    for tokenizer in ("byte", "bpe"):
        how = {**limits, "tokenizer": tokenizer, "tokenizer_vocab": 300}
        _, val = texts_of(open_data(recipe_for(source, tmp_path / "data", **how)))
        assert "".join(val) == "".join(held)[:800]
    single = tmp_path / "one.txt"
    single.write_text("a text that is validated on, " * 99)
    limits["eval_source"] = str(single)
    _, (text,) = texts_of(open_data(recipe_for(source, tmp_path / "data", **limits)))
    assert text == single.read_text()[:800]
    unlimited = {**limits, "val_fraction": 0}
    _, (text,) = texts_of(open_data(recipe_for(source, tmp_path / "data", **unlimited)))
    assert text == single.read_text()


@pytest.mark.parametrize("most", [0, 3000])
@pytest.mark.parametrize("count", [5, 150])
def test_the_validation_text_does_not_depend_on_the_tokenizer(tmp_path, most, count):
    """With `max_tokens` too, and if documents are cut; nothing of it is trained on."""
    sizes = [1 + n % 4 + 300 // count for n in range(count)]
    sentences = [
        [f"the cat {n}-{k} sat on the mat." for k in range(s)] for n, s in enumerate(sizes)
    ]
    source, found = jsonl(tmp_path / "x.jsonl", list(map(" ".join, sentences))), set()
    for name in ("byte", "char", "bpe"):
        how = {"tokenizer": name, "tokenizer_vocab": 300, "max_tokens": most}
        data = open_data(recipe_for(source, tmp_path / "data", **how))
        train, val = ("".join(texts) for texts in texts_of(data))
        if not most:
            found.add(describe(data)["val"]["text"])
        assert val and not {*re.findall(r" \d+-\d+ ", val)} & {*re.findall(r" \d+-\d+ ", train)}
    assert most or len(found) == 1
    other = open_data(recipe_for(source, tmp_path / "data", max_tokens=most, val_fraction=0.3))
    assert describe(other)["val"]["text"] not in found


@given(st.integers(20, 6000), st.sampled_from([0.0, 0.1, 0.9]), st.integers(0, 2))
@settings(max_examples=25)
def test_the_split_is_the_reference_and_max_tokens_reads_the_first_documents(
    tmp_path_factory, most, fraction, shards
):
    """Until they have as many tokens, those held out included; at least 100 texts, and never more
    tokens to train on."""
    folder = tmp_path_factory.mktemp("x")
    texts = [f"{n}: {t}" for n, t in enumerate(documents(300, longest=30))]
    source = jsonl(folder / "x.jsonl", texts)
    limits = {"max_tokens": most, "val_fraction": fraction, "val_shards": shards}
    most = limits["max_tokens"] = max(most, 1024 * shards + 2)
    data = open_data(recipe_for(source, folder / "data", **limits))
    ends = np.cumsum([1 + len(t.encode()) for t in texts])
    count = max(100, int(np.searchsorted(ends, most)) + 1)
    row = [i for t in texts[:count] for i in [256, *t.encode()]]
    train = [t for member in data.division.train for d in read_documents(member) for t in d]
    if shards:
        wanted = row[shards * 1024 :]
        assert data.val.tokens == shards * 1024
    else:
        kept, held = reference_split(texts[:count], fraction)
        wanted = [i for t in kept for i in [256, *t.encode()]]
        assert texts_of(data)[1] == held
    assert train == wanted[:most]


def test_byte_pairs_are_not_learned_from_the_first_shards():
    with refused("data.val_shards", "data.val_fraction"):
        recipe_for("x", "y", tokenizer="bpe").replace("data.val_shards=1")


def test_copies_of_texts_in_the_first_shards(tmp_path):
    texts = [f"{n}: {t}" for n, t in enumerate(documents(200, longest=30))]
    source = jsonl(tmp_path / "x.jsonl", [*texts, *texts])
    data = open_data(recipe_for(source, tmp_path / "data", val_shards=3))
    train, val = texts_of(data)
    assert not {t for t in train if t in texts} & {t for t in val if t in texts}
    assert data.val.tokens == 3 * 1024 and data.division.shared == len(val)


# -- conversations and questions


def test_conversations_and_questions(tmp_path):
    """Of many conversations some, by their hashes; of few questions the articles of lowest hash."""
    how = {"format": "chat", "context": 500}
    talk = conversations(tmp_path / "x.jsonl", 150, longest=9)
    data = open_data(recipe_for(talk, tmp_path / "data", **how))
    (train,), (val,) = data.division.train, data.division.val
    assert len(data.train) + len(data.val) == train.documents + val.documents == 150
    hashes = train.corpora[0].field("text")
    assert val.numbers[0].tolist() == np.flatnonzero(hashes < 2**64 // 10).tolist()
    how["format"], squad = "squad", questions(tmp_path / "x.json", 20)
    divided = texts_of(open_data(recipe_for(f"squad:{squad}", tmp_path / "data", **how)))
    articles = sorted(range(20), key=lambda n: text_hash(f"Title {n}"))
    for texts, wanted in zip(divided, (articles[2:], articles[:2]), strict=True):
        found = [int(re.search(r"Article (\d+)", t)[1]) for t in texts]
        assert sorted(found) == sorted(n for n in wanted for _ in range(5))


@pytest.mark.parametrize("kind", ["shared", "lowest", "long", "shards", "copies", "chat"])
def test_a_directory_that_grows_changes_no_limited_data(tmp_path, kind, monkeypatch):
    texts = [f"document {i} " + "x" * 300 for i in range(900)]
    how = {"max_tokens": 40_000, "val_fraction": 0.01}
    source = jsonl(tmp_path / "x.jsonl", texts)
    if kind == "shared":
        how |= {"eval_source": str(jsonl(tmp_path / "v.jsonl", texts[:60])), "val_fraction": 0}
    elif kind == "lowest":  # the hash holds out none of the first documents
        how["val_fraction"] = 1e-7
    elif kind == "long":
        monkeypatch.setattr("windlass.data.split.LONG_TEXT", 300)
        how["val_fraction"] = 0.2
    elif kind == "shards":
        how["val_shards"] = 3
    elif kind == "copies":
        source = [str(source), str(jsonl(tmp_path / "y.jsonl", texts[::-1]))]
    else:
        source, how["format"] = conversations(tmp_path / "c.jsonl", 900), "chat"
    recipe = recipe_for(source, tmp_path / "data", context=512, **how)
    first = open_data(recipe)
    sizes = [corpus.index.tokens for corpus in first.prepared.corpora]
    open_data(recipe.replace("data.max_tokens=0"))
    grown = open_data(recipe)
    assert sizes[0] < grown.prepared.corpora[0].index.tokens
    assert grown.fingerprint == first.fingerprint


def test_a_choice_of_items_by_the_seed(tmp_path):
    source = conversations(tmp_path / "x.jsonl", 200, longest=9)
    how = {"format": "chat", "context": 500, "train_size": 20, "eval_size": 5}
    recipe = recipe_for(source, tmp_path / "data", **how)
    first, again = open_data(recipe), open_data(recipe)
    other = open_data(recipe.replace("run.seed=7"))
    assert (len(first.train), len(first.val)) == (len(other.train), len(other.val)) == (20, 5)
    assert first.fingerprint == again.fingerprint != other.fingerprint


# -- the arithmetic


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=300), st.floats(0, 0.99), st.booleans()
)
def test_held_out_by_hash(hashes, fraction, are_examples):
    fraction = round(fraction, 3)
    array, limit = np.array(hashes, np.uint64), round(fraction * 1000) * 2**64 // 1000
    sizes = np.full(len(hashes), 1000)
    whole, cuts = held_out(array, sizes, fraction, are_examples=are_examples)
    groups, first = sorted(set(hashes)), hashes[:100]
    if len(groups if are_examples else hashes) >= 100 and fraction:
        held = {h for h in hashes if h < limit} or {min(first)}
        held |= {min(first)} if min(first) >= limit else set()
    elif are_examples and fraction:
        held = set(groups[: min(len(groups) - 1, max(1, round(len(groups) * fraction)))])
    else:
        held = set()
    assert whole.tolist() == [h in held for h in hashes]
    is_cut = fraction and not are_examples and len(hashes) < 100
    assert set(cuts.tolist()) == {round(1000 - 1000 * fraction) if is_cut else -1}


# -- what a tokenizer learns from


@pytest.mark.parametrize(
    "kind", ["many", "few", "blocks", "many files", "eval_source", "mixture", "chat", "chat few"]
)
def test_byte_pairs_are_learned_from_what_trains(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("windlass.data.files.READ", 500)
    monkeypatch.setattr("windlass.data.tokenizer.STRETCH", 400)
    seen = []
    monkeypatch.setattr(
        "windlass.data.tokenizer_kinds.bpe_tokenizer",
        lambda texts, vocab: seen.extend(texts) or bpe_tokenizer(seen, vocab),
    )
    how, texts = {}, [t for t in documents(200, longest=30) if t]
    if kind in ("many", "few"):
        texts = texts[: 60 if kind == "few" else 200]
        source = jsonl(tmp_path / "x.jsonl", ["", *texts])
    elif kind in ("blocks", "many files", "eval_source"):
        source, count = tmp_path / "*.txt", 120 if kind == "many files" else 3
        texts = [f"{number} line of text\n" * (400 * (number % 3) + 5) for number in range(count)]
        for number, text in enumerate(texts):
            (tmp_path / f"{number:03}.txt").write_text(text)
        how = {"eval_source": str(tmp_path / "002.txt")} if kind == "eval_source" else {}
    elif kind == "mixture":
        own = ([f"{name} {text}" for text in documents(150, longest=30)] for name in "abc")
        a, b, c = (str(jsonl(tmp_path / f"{n}.jsonl", texts)) for n, texts in enumerate(own))
        source = "stdlib"
        how["mix"] = [
            {"name": "a", "source": a, "eval_source": c},
            {"name": "b", "source": b, "val_fraction": 0.5},
        ]
    else:
        source = conversations(tmp_path / "x.jsonl", 40 if "few" in kind else 150, longest=9)
        with source.open("a") as file:
            file.write("{broken\n")
        how = {"format": "chat", "context": 400, "on_bad_item": "skip"}
    how |= {"tokenizer": "bpe", "tokenizer_vocab": 300}
    train, val = texts_of(open_data(recipe_for(source, tmp_path / "data", **how)))
    assert train and val
    if "chat" in kind:
        numbers = sorted(int(re.search(r"(\d+)\.0: ", t)[1]) for t in train)
        learned = {int(m[1]) for t in seen if (m := re.match(r"(\d+)\.\d: ", t))}
        assert numbers == sorted(learned) and len(numbers) > 30
    else:
        # a text may be cut inside of a token
        train = reference_split(texts, 0.1)[0] if kind in ("few", "blocks") else train
        assert "".join(seen) == "".join(train)


def test_byte_pairs_are_not_learned_from_what_is_validated_anywhere(tmp_path, monkeypatch):
    """In another source of a mixture, or after the characters from which they are learned."""
    seen = []
    monkeypatch.setattr(
        "windlass.data.tokenizer_kinds.bpe_tokenizer",
        lambda texts, vocab: seen.extend(texts) or bpe_tokenizer(seen, vocab),
    )
    texts = [f"document {n} of all" for n in range(150)]
    a, b = str(jsonl(tmp_path / "a.jsonl", texts)), str(jsonl(tmp_path / "b.jsonl", texts[::-1]))
    mix = [{"name": "a", "source": a, "val_fraction": 0}]
    mix.append({"name": "b", "source": b, "val_fraction": 0.3})
    held = str(jsonl(tmp_path / "held.jsonl", ["x" * 3000, *texts[:9]]))
    for name, how in (("mixed", {"mix": mix}), ("separate", {"eval_source": held})):
        seen.clear()
        recipe = recipe_for(a, tmp_path / name, tokenizer="bpe", tokenizer_vocab=260, **how)
        val = texts_of(open_data(recipe))[1]
        monkeypatch.setattr("windlass.data.recipe_tokenizer.BPE_CHARACTERS", 2000)
        assert len(val) > 5 and len(set(seen)) > 50 and not set(filter(None, seen)) & set(val)
