"""Packed rows know their documents: past those held out, in every order, on any number of ranks."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import tokenizer_fixtures
from data_fixtures import documents, jsonl, recipe_for, text_hash
from helpers import refused
from windlass.data.open import Data, open_data
from windlass.data.samples import masks_documents
from windlass.recipe.settings import IGNORE_INDEX

CONTEXT = 64


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "x.jsonl", documents(150))


def opened(source, folder: Path, **data) -> Data:
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


@pytest.mark.parametrize("shard_tokens", [1024, 10**6])
def test_the_rows_are_cut_documents(source, tmp_path, shard_tokens):
    data = opened(source, tmp_path, val_fraction=0.2, shard_tokens=shard_tokens)
    texts = [text for text in documents(150) if text]
    assert len(texts) > 100 and 10 < sum(is_held(text) for text in texts) < 50
    for samples, held in ((data.train, False), (data.val, True)):
        own = [[256, *text.encode()] for text in texts if is_held(text) is held]
        assert samples.tokens == sum(map(len, own))
        check_rows(samples, own, 256, ragged=held)


def test_the_mask_changes_no_token_no_label_and_no_fingerprint(source, tmp_path):
    masked, plain = opened(source, tmp_path), opened(source, tmp_path, document_mask=False)
    assert masked.fingerprint == plain.fingerprint and len(masked.train) == len(plain.train)
    rows = np.arange(len(plain.train))
    ours, wanted = masked.train.read(rows), plain.train.read(rows)
    assert (ours.tokens == wanted.tokens).all() and (ours.labels == wanted.labels).all()
    assert wanted.documents is None and not masks_documents(plain.train)
    assert masks_documents(opened(source, tmp_path, document_mask=True).train)


@pytest.mark.parametrize("kind", ["llama2", "llama3"])
def test_documents_between_a_begin_and_an_end(source, tmp_path, kind):
    """BOS text EOS; the label after a document's EOS is the next document's BOS."""
    folder = tokenizer_fixtures.save(kind, tmp_path / kind)
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.encode_special_tokens = True
    bos, eos = (inner.token_to_id(tokenizer_fixtures.KINDS[kind][x]) for x in ("bos", "eos"))
    data = opened(source, tmp_path, tokenizer=f"hf:{folder}", val_fraction=0.2)
    texts = [text for text in documents(150) if text]
    for samples, held in ((data.train, False), (data.val, True)):
        own = [text for text in texts if is_held(text) is held]
        whole = [[bos, *inner.encode(text, add_special_tokens=False).ids, eos] for text in own]
        check_rows(samples, whole, bos, ragged=held)


def test_a_range_that_begins_inside_of_a_document_is_a_document(source, tmp_path):
    """The first shards are held out, and several sources join."""
    other = jsonl(tmp_path / "y.jsonl", documents(90, seed=1))
    data = opened([str(source), str(other)], tmp_path, val_shards=1)
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
        assert not masks_documents(opened(name, tmp_path / str(number)).train)
    data = opened(source, tmp_path, document_mask=True, eval_source=str(tmp_path / "one.txt"))
    assert masks_documents(data.train) and not masks_documents(data.val)
    with refused("data.document_mask", "shards of other tools", "auto"):
        recipe_for(shards).replace("data.document_mask=true")
