"""What a data set holds, in numbers and in words; and the split of few documents, which those
numbers would give away.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from data_fixtures import documents, jsonl, recipe_for

from helpers import windlass
from windlass.data.describe import describe, lines
from windlass.data.open import Data, open_data


def books(folder: Path, *sizes: int) -> Path:
    rng = random.Random(7)
    folder.mkdir()
    for number, size in enumerate(sizes):
        (folder / f"book-{number}.txt").write_text("".join(rng.choices("etaoin shrdlu\n", k=size)))
    return folder


@pytest.mark.parametrize("packing", ["packed", "documents"])
@pytest.mark.parametrize(
    ("sizes", "inside"), [((500, 700, 600, 4000), True), ((4000, 3000, 2200, 1000), False)]
)
def test_few_documents_are_split_by_their_tokens(sizes, inside, packing, tmp_path, capsys) -> None:
    source = books(tmp_path / "books", *sizes)
    data = open_data(recipe_for(source, tmp_path / "data", packing=packing))
    assert data.index is not None
    train, val = data.index.splits["train"], data.index.splits["val"]
    (first,), (second,) = train.ranges, val.ranges
    assert (first.start, first.stop, second.stop) == (0, second.start, sum(sizes) + 4)
    assert val.tokens / second.stop == pytest.approx(0.1, rel=0.05)
    if inside:  # each part of the document counts
        assert (train.documents, val.documents) == (4, 1)
    else:  # the last document is near enough to a tenth
        assert (train.documents, val.documents, val.tokens) == (3, 1, 1001)
    text = (tmp_path / "books" / "book-3.txt").read_text()
    row = data.train.read(np.array([len(data.train) - 1]))
    last = data.val.read(np.array([0]))[0][0] if data.val else []
    # nothing of the held-out part is trained on, and all of it is there
    if packing == "documents" and inside:
        assert data.tokenizer.decode(last) == text[-580:][:16]
        assert (row[1] != -100).sum() == 16
    assert "held out" not in capsys.readouterr().err


def test_a_split_far_from_what_was_asked_is_said(tmp_path, capsys) -> None:
    texts = ["short"] * 110 + ["a long document " * 20] * 10
    recipe = recipe_for(jsonl(tmp_path / "x.jsonl", texts), tmp_path / "data")
    open_data(recipe)
    err = capsys.readouterr().err
    words = "data.val_fraction = 0.1", "% of the text is held out", "data.eval_source"
    assert all(word in err for word in words)
    open_data(recipe.replace("data.max_tokens=500", f"data.dir={tmp_path / 'less'}"))
    assert "data.max_tokens = 500" not in capsys.readouterr().err
    whole = recipe_for(books(tmp_path / "books", 3000, 3000), tmp_path / "long", max_tokens=1000)
    assert len(open_data(whole).train) > 100
    assert "data.max_tokens = 1,000" in capsys.readouterr().err


def test_facts_of_texts(tmp_path) -> None:
    texts = [text for text in documents(150) if text]
    source = jsonl(tmp_path / "x.jsonl", texts)
    facts = describe(open_data(recipe_for(source, tmp_path / "data", val_fraction=0.2)))
    total = len("".join(texts).encode()) + len(texts)
    assert facts["train"]["tokens"] + facts["val"]["tokens"] == total
    assert facts["train"]["items"] + facts["val"]["items"] == len(texts)
    expected = {"source": str(source), "files": 1, "items": "documents", "tokenizer": "byte"}
    assert facts == facts | expected | {"vocab": 257}
    assert json.loads(json.dumps(facts)) == facts
    options = {"val_fraction": 0.2, "packing": "documents", "context": 64}
    train = describe(open_data(recipe_for(source, tmp_path / "data", **options)))["train"]
    sizes = [len(text.encode()) + 1 for text in texts[: facts["train"]["items"]]]
    assert train["cut"] == sum(size > 64 for size in sizes)
    assert train["cut_tokens"] == sum(max(0, size - 64) for size in sizes)
    assert train["tokens"] == sum(min(size, 64) for size in sizes)
    assert train["lengths"]["max"] == max(sizes)
    assert train["lengths"]["50"] == sorted(sizes)[(len(sizes) - 1) // 2]


def test_facts_of_conversations_are_what_prepare_prints(tmp_path) -> None:
    source = tmp_path / "talk.jsonl"
    with source.open("w") as file:
        for asked, answered in [*((10, n) for n in (5, 5, 5, 100, 5)), (90, 10)]:
            user = {"role": "user", "content": "q" * asked}
            talk = [user, {"role": "assistant", "content": "a" * answered}]
            file.write(json.dumps({"messages": talk}) + "\n")
    recipe = recipe_for(source, tmp_path / "data", format="chat", val_fraction=0, context=60)
    data = open_data(recipe)
    train = describe(data)["train"]
    assert train["label_tokens"] == int((data.train.read(np.arange(5))[1] != -100).sum())
    # "User: qqqqqqqqqq\n\nAssistant: aaaaa", the token that ends it, and two lines; the last is
    # predicted and not read
    assert train["tokens"] == 4 * 36 + 60
    assert (train["items"], train["left_out"], train["lengths"]["50"]) == (5, 1, 37)
    assert (train["cut"], train["cut_tokens"]) == (1, 132 - 61)
    places = [f"data.source={source}", f"data.dir={tmp_path / 'data'}"]
    settings = "data.format=chat data.val_fraction=0 model.context=60 data.max_tokens=0".split()
    printed = windlass("prepare", "quickstart", *settings, *places).stdout
    for text in lines(describe(data), 60).values():
        assert text in printed
    assert "1 of 5 conversations cut, 71 tokens lost" in printed
    assert "1 conversation left out" in printed


def test_a_character_tokenizer_names_its_symbols(data_files, tmp_path) -> None:
    """As nanoGPT's data/shakespeare_char/prepare.py prints them; with documents the token between
    them is not counted.
    """
    text = (data_files / "tinyshakespeare" / "input.txt").read_text()[:30_000]
    (tmp_path / "x.txt").write_text(text)
    texts = [text for text in documents(40) if text]
    jsonl(tmp_path / "x.jsonl", texts)

    def shown(source: str, tokenizer: str) -> dict[str, str]:
        recipe = recipe_for(
            tmp_path / source, tmp_path / source[2:] / tokenizer, tokenizer=tokenizer
        )
        return lines(describe(open_data(recipe)), 16)

    for source, whole in (("x.txt", text), ("x.jsonl", "".join(texts))):
        printed = shown(source, "char")
        assert printed["characters"] == f"{len(whole):,}"
        assert printed["symbols"] == repr("".join(sorted(set(whole))))
    assert "symbols" not in shown("x.txt", "byte")


def test_facts_of_data_of_ones_own() -> None:
    class Mine:
        def __len__(self) -> int:
            return 7

        def read(self, indices):
            """Rows of 6, their first two labels masked."""
            labels = np.where(np.arange(6) < 2, -100, 1)
            return np.ones((len(indices), 6), np.int64), np.tile(labels, (len(indices), 1))

    class WithLengths(Mine):
        def length(self, i: int) -> int:
            return 2 + i

    facts = describe(Data(Mine(), None, None, "x", 100))  # type: ignore[arg-type]
    assert facts == {"vocab": 100, "train": {"samples": 7, "tokens_per_sample": 4.0}}
    longer = describe(Data(WithLengths(), None, None, "x", 100))  # type: ignore[arg-type]
    assert longer["train"]["tokens_per_sample"] == 5.0
    expected = {"training": "7 samples", "validation": "none", "tokenizer": "100 ids"}
    assert lines(facts, 8) == expected


def test_the_end_of_a_single_text_in_a_mixture_is_held_out_of_its_source(tmp_path) -> None:
    mix = [
        {"name": "one", "source": str(books(tmp_path / "one", 2000) / "book-0.txt")},
        {"name": "many", "source": str(books(tmp_path / "many", 500, 700, 4000))},
    ]
    recipe = recipe_for(tmp_path / "one", tmp_path / "data").replace({"data.mix": mix})
    facts = describe(open_data(recipe))
    single, several = facts["sources"]
    assert (single["tokens"], single["train"], single["val"]) == (2000, 1800, 200)
    assert several["train"] + several["val"] == several["tokens"] == 5203
    assert "eval_sources" not in facts
    assert facts["val"]["tokens"] == single["val"] + several["val"]
