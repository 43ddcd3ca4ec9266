"""What a data set holds, in numbers and in words."""

import json

import numpy as np
import pytest

from data_fixtures import conversations, documents, jsonl, recipe_for
from helpers import windlass
from windlass.data.describe import describe, lines
from windlass.data.open import Data, open_data


def test_facts_of_texts(tmp_path) -> None:
    texts = [text for text in documents(150) if text]
    source = jsonl(tmp_path / "x.jsonl", texts)
    data = open_data(recipe_for(source, tmp_path / "data", val_fraction=0.2))
    facts = describe(data)
    total = len("".join(texts).encode()) + len(texts)
    assert facts["train"]["tokens"] + facts["val"]["tokens"] == total
    assert facts["train"]["items"] + facts["val"]["items"] == len(texts)
    expected = {"source": str(source), "files": 1, "items": "documents", "tokenizer": "byte"}
    assert facts == facts | expected | {"vocab": 257}
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize("packing", ["packed", "best-fit"])
def test_facts_of_conversations_are_what_prepare_prints(tmp_path, packing) -> None:
    source = tmp_path / "talk.jsonl"
    with source.open("w") as file:
        for asked, answered in [*((10, n) for n in (5, 5, 5, 100, 5)), (90, 10)]:
            user = {"role": "user", "content": "q" * asked}
            talk = [user, {"role": "assistant", "content": "a" * answered}]
            file.write(json.dumps({"messages": talk}) + "\n")
    how = {"format": "chat", "val_fraction": 0, "packing": packing}
    data = open_data(recipe_for(source, tmp_path / "data", context=60, **how))
    train, count = describe(data)["train"], len(data.train)
    assert train["label_tokens"] == int((data.train.read(np.arange(count))[1] != -100).sum())
    assert train["tokens_per_sample"] == round(train["tokens"] / count, 3)
    # "User: qqqqqqqqqq\n\nAssistant: aaaaa", the token that ends it, and two lines; the last is
    # predicted and not read
    assert train["tokens"] == 4 * 36 + 60
    assert (train["items"], train["left_out"]) == (5, 1)
    assert (train["cut"], train["cut_tokens"]) == (1, 132 - 61)
    places = [f"data.source={source}", f"data.dir={tmp_path / 'data'}"]
    settings = "data.format=chat data.val_fraction=0 model.context=60 data.max_tokens=0".split()
    settings.append(f"data.packing={packing}")
    printed = " ".join(windlass("prepare", "quickstart", *settings, *places).stdout.split())
    for text in lines(describe(data), 60).values():
        assert text in printed
    assert "1 cut at model.context = 60, 71 tokens lost" in printed
    assert "1 conversation left out" in printed
    assert "\u27e6" in printed and "<|endoftext|>\u27e7" in printed  # an example with its marks
    if packing == "best-fit":
        assert train["fill"] == round(train["tokens"] / (count * 60), 6)
        assert f"{count} rows of 60 tokens, {100 * train['fill']:.1f} % filled" in printed


def test_facts_of_data_of_ones_own() -> None:
    class Mine:
        def __len__(self) -> int:
            return 7

        def read(self, indices):
            """Rows of 6, their first two labels masked."""
            labels = np.where(np.arange(6) < 2, -100, 1)
            return np.ones((len(indices), 6), np.int64), np.tile(labels, (len(indices), 1))

    facts = describe(Data(Mine(), None, None, "x", 100))  # type: ignore[arg-type]
    assert facts == {"vocab": 100, "train": {"samples": 7}}
    expected = {"training": "7 samples", "validation": "none", "tokenizer": "100 ids"}
    assert lines(facts, 8) == expected


def test_a_mixture_of_formats_and_the_end_of_its_single_text(tmp_path) -> None:
    for name, size in (("one", 2000), ("many-1", 500), ("many-2", 700), ("many-3", 4000)):
        (tmp_path / f"{name}.txt").write_text(f"book {name} " * (size // 9))
    mix = [
        {"name": "one", "source": str(tmp_path / "one.txt")},
        {"name": "many", "source": str(tmp_path / "many*.txt")},
        {"name": "talk", "source": str(tmp_path / "talk.jsonl"), "format": "chat"},
    ]
    conversations(tmp_path / "talk.jsonl", 150)
    recipe = recipe_for("", tmp_path / "data", context=256, mix=mix)
    data = open_data(recipe)
    facts = describe(data)
    assert facts["items"] == "items" and facts["template"].startswith("User")
    rows = [(s, s.read(np.arange(len(s)))) for s in (data.train, data.val)]
    for name, (samples, batch) in zip(("train", "val"), rows, strict=True):
        assert facts[name]["label_tokens"] == (batch.labels != -100).sum() == samples.valid_tokens
        lengths = sum(map(samples.length, range(len(samples))))
        assert lengths == samples.unpadded_tokens > samples.valid_tokens
        assert facts[name]["tokens_per_sample"] == round(lengths / len(samples), 3)
    shown = lines(facts, 256)
    assert f"{facts['train']['label_tokens']:,} of them" in shown["training"]
