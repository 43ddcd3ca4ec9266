"""Best-fit packing: the rows of an independent best-fit decreasing, every token once, no label
across two items, and the same rows whatever reads them.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_fixtures import conversations, recipe_for
from helpers import refused, windlass
from sample_fixtures import examples, opened
from windlass.data.describe import describe, lines
from windlass.data.open import open_data
from windlass.data.samples import best_fit, real_tokens


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
    assert real_tokens(packed) == real_tokens(rows) == sum(rows.sizes)


def test_prepare_shows_how_full_the_rows_are(tmp_path: Path) -> None:
    source = conversations(tmp_path / "talk.jsonl", 600)
    recipe = recipe_for(source, tmp_path / "data", format="chat", packing="best-fit", context=512)
    data = open_data(recipe)
    facts = describe(data)
    train = facts["train"]
    assert train["fill"] == pytest.approx(train["tokens"] / (len(data.train) * 512), abs=1e-6)
    assert train["fill"] > 0.95
    assert train["tokens_per_sample"] == pytest.approx(train["tokens"] / len(data.train), abs=1e-3)
    text = lines(facts, 512)["packing"]
    assert f"{len(data.train)} rows" in text and f"{100 * train['fill']:.1f} % filled" in text
    words = ["prepare", "quickstart", "data.format=chat", "data.packing=best-fit"]
    words += [f"data.source={source}", f"data.dir={tmp_path / 'data'}", "data.tokenizer=byte"]
    out = windlass(*words, "model.context=512", "data.val_fraction=0.1").stdout
    assert "% filled" in out
    assert "\u27e6" in out and "<|endoftext|>\u27e7" in out  # an example with what counts marked


def test_rows_without_file_order_or_of_texts_are_refused():
    with refused("data.order", '"shuffled"'):
        recipe_for("x", packing="best-fit", format="chat").replace("data.order=sequential")
    with refused("data.packing", '"packed"'):
        recipe_for("x").replace("data.packing=best-fit")
