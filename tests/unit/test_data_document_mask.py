"""Packed rows know their documents: from the index, in every order and on any number of ranks."""

from pathlib import Path

import numpy as np
import pytest
from data_fixtures import documents, jsonl, recipe_for

from helpers import refused
from windlass.data.describe import describe, lines
from windlass.data.loader import Loader
from windlass.data.mixture import MixedSamples
from windlass.data.open import Data, open_data
from windlass.data.samples import masks_documents
from windlass.recipe import Recipe, plan_batch
from windlass.recipe.settings import IGNORE_INDEX

CONTEXT = 64


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "x.jsonl", documents(150))


def opened(source, folder: Path, **data) -> Data:
    return open_data(recipe_for(source, folder / "data", context=CONTEXT, **data))


def stream_of(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and the number of each token's document."""
    whole = [[256, *text.encode()] for text in texts if text]
    numbers = [[number] * len(ids) for number, ids in enumerate(whole)]
    return np.concatenate(whole), np.concatenate(numbers)


@pytest.mark.parametrize("shard_tokens", [1024, 10**6])
def test_the_rows_are_cut_documents(source, tmp_path, shard_tokens):
    data = opened(source, tmp_path, val_fraction=0.2, shard_tokens=shard_tokens)
    tokens, numbers = stream_of(documents(150))
    end = data.train.tokens
    for samples, own in ((data.train, slice(0, end)), (data.val, slice(end, None))):
        ids, of, expected = tokens[own], numbers[own], 0.0
        batch = samples.read(np.arange(len(samples)))
        labels = 0
        for row in range(len(samples)):
            here = slice(row * CONTEXT, min((row + 1) * CONTEXT, len(ids) - 1))
            count = here.stop - here.start
            assert batch.tokens[row, :count].tolist() == ids[here].tolist()
            after = ids[here.start + 1 : here.stop + 1]  # of a document's end: the end token
            assert batch.labels[row, :count].tolist() == after.tolist()
            assert (batch.labels[row, count:] == IGNORE_INDEX).all()
            part = np.unique(of[here], return_inverse=True)[1]
            assert batch.documents[row, :count].tolist() == part.tolist()
            sizes = np.bincount(part)
            places = [place for size in sizes for place in range(size)]
            assert batch.positions[row, :count].tolist() == places
            labels += count
            expected += float((sizes**2).sum())
        assert labels == samples.valid_tokens
        assert samples.attended == pytest.approx(expected / labels, rel=1e-12)
    facts = describe(data)
    assert facts["train"]["attended"] == round(data.train.attended, 3)
    assert facts["train"]["label_tokens"] == data.train.valid_tokens
    assert f"{data.train.attended:,.0f} of 64" in lines(facts, CONTEXT)["attention"]


def test_the_mask_changes_no_token_no_label_and_no_fingerprint(source, tmp_path):
    masked, plain = opened(source, tmp_path), opened(source, tmp_path, document_mask=False)
    assert masked.fingerprint == plain.fingerprint and len(masked.train) == len(plain.train)
    rows = np.arange(len(plain.train))
    ours, wanted = masked.train.read(rows), plain.train.read(rows)
    assert (ours.tokens == wanted.tokens).all() and (ours.labels == wanted.labels).all()
    assert wanted.documents is None and not masks_documents(plain.train)
    assert masks_documents(opened(source, tmp_path, document_mask=True).train)


@pytest.mark.parametrize("order", ["shuffled", "shards-shuffled", "sequential"])
def test_any_number_of_ranks_reads_the_same_documents(source, tmp_path, order):
    samples = opened(source, tmp_path).train

    def read(world: int, micro: int) -> list[list[int]]:
        plan, found = plan_batch(8, micro, world, CONTEXT), []
        loaders = [Loader(samples, plan, rank, 7, order) for rank in range(world)]
        for _ in range(12):
            batches = [next(loader) for loader in loaders]
            micros = sorted((m for b in batches for m in b.micro), key=lambda m: m.k)
            found.append(
                [
                    np.concatenate(x).tolist()
                    for x in zip(*(m.batch[:4] for m in micros), strict=True)
                ]
            )
        for loader in loaders:
            loader.close()
        return found

    assert read(1, 8) == read(2, 2) == read(4, 1)


def test_a_range_that_begins_inside_of_a_document_is_a_document(source, tmp_path):
    """The first shards are held out, and several sources join."""
    other = jsonl(tmp_path / "y.jsonl", documents(90, seed=1))
    data = opened([str(source), str(other)], tmp_path, val_shards=1)
    starts = {row * CONTEXT for row in range(len(data.train))}
    batch = data.train.read(np.arange(len(data.train)))
    flat, places = batch.tokens.flatten(), batch.positions.flatten()
    begins = set(np.flatnonzero(places == 0).tolist())
    cuts = begins - starts - set(np.flatnonzero(flat == 256).tolist())
    assert len(cuts) == 1  # where the second source begins, behind its held-out shard
    assert batch.labels.flatten()[cuts.pop() - 1] == 256


def test_sources_without_documents_stay_streams(tmp_path):
    (tmp_path / "one.txt").write_text("one text " * 200)
    ids = np.arange(3000, dtype="<u2") % 50
    ids.tofile(tmp_path / "tokens.bin")
    shards = f"shards:{tmp_path / 'tokens.bin'}"
    for number, name in enumerate((tmp_path / "one.txt", shards)):
        assert not masks_documents(opened(name, tmp_path / str(number)).train)
    with refused("data.document_mask", "one text", "auto"):
        opened(tmp_path / "one.txt", tmp_path / "0", document_mask=True)
    with refused("data.document_mask", "shards of other tools", "auto"):
        recipe_for(shards).replace("data.document_mask=true")


def test_a_mixture_of_documents_and_one_text(source, tmp_path):
    (tmp_path / "one.txt").write_text("one text " * 200)
    names = {"documents": source, "text": tmp_path / "one.txt"}
    mix = [{"name": key, "source": str(name), "weight": 0.5} for key, name in names.items()]
    own = {"mix": mix, "dir": str(tmp_path / "mix")}
    model = {"layers": 1, "heads": 1, "width": 8, "context": CONTEXT}
    samples = open_data(Recipe.model_validate({"model": model, "data": own})).train
    assert isinstance(samples, MixedSamples) and masks_documents(samples)
    indices = np.array([0, len(samples) - 1, 1, len(samples) - 2])
    batch = samples.read(indices)
    for at, index in enumerate(indices.tolist()):
        source_number = int(index >= samples.starts[1])
        own = samples.parts[source_number].read(np.array([index - samples.starts[source_number]]))
        assert (batch.tokens[at] == own.tokens[0]).all()
        if source_number:
            assert not batch.documents[at].any() and own.documents is None
            assert batch.positions[at].tolist() == list(range(CONTEXT))
        else:
            assert (batch.documents[at] == own.documents[0]).all()
            assert (batch.positions[at] == own.positions[0]).all()
