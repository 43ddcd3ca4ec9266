"""What the tests of the data share: recipes over small corpora."""

import csv
import gzip
import hashlib
import itertools
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from windlass.data.shards import MARK
from windlass.data.split import DocumentSet
from windlass.recipe import Recipe


def documents(count: int, seed: int = 0, longest: int = 400) -> list[str]:
    draw = random.Random(seed)
    words = [*"the cat sat on mat café 中文 42".split(), "def f():\n\treturn", "\n\n"]
    return [
        " ".join(draw.choices(words, k=draw.choice([0, 1, 5, 30, longest]))) for _ in range(count)
    ]


def jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path


def conversations(path: Path, count: int, seed: int = 0, longest: int = 60) -> Path:
    """Conversations of one to three turns."""
    draw, texts = random.Random(seed), [t or "yes" for t in documents(97, seed, longest)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            turns = [
                {"role": role, "content": f"{number}.{turn}: {draw.choice(texts)}"}
                for turn in range(draw.randint(1, 3))
                for role in ("user", "assistant")
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def questions(path: Path, articles: int, each: int = 5) -> Path:
    """A file in SQuAD's format."""
    data = []
    for number in range(articles):
        context = f"Article {number} says that river {number * 7} is {number + 3} miles long."
        asked = [
            {
                "id": f"{number}-{k}",
                "question": f"How long is river {number * 7}, asked {k}?",
                "answers": [{"text": f"{number + 3} miles", "answer_start": 0}],
            }
            for k in range(each)
        ]
        paragraphs = [{"context": context, "qas": asked}]
        data.append({"title": f"Title {number}", "paragraphs": paragraphs})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"data": data}), encoding="utf-8")
    return path


def write_source(folder: Path, kind: str, texts: list[str]) -> dict[str, Any]:
    """Settings of a source of a kind with these texts, or as many conversations or questions; `mix`
    has half of them as texts and half as conversations."""
    folder.mkdir(exist_ok=True)
    file = folder / f"x.{kind}"
    if kind == "mix":
        half = len(texts) // 2
        parts = [write_source(folder, "jsonl", texts[:half])]
        parts.append(write_source(folder / "talk", "chat", texts[half:]))
        return {"mix": [{"name": f"part{n}", **part} for n, part in enumerate(parts)]}
    if kind == "chat":
        file = conversations(folder / "x.jsonl", len(texts), longest=20)
        return {"source": str(file), "format": "chat"}
    if kind == "squad":
        file = questions(folder / "x.json", len(texts) // 5)
        return {"source": f"squad:{file}", "format": "squad"}
    records = [{"text": text} for text in texts]
    if kind == "hf":
        write_source(folder / "hf", "parquet", texts)
        return {"source": f"hf:{folder / 'hf'}"}
    if kind == "jsonl":
        jsonl(file, texts)
    elif kind == "json":
        file.write_text(json.dumps(records))
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress(jsonl(folder / "x.jsonl", texts).read_bytes(), 1))
    elif kind == "csv":
        with file.open("w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, ["text"])
            writer.writeheader()
            writer.writerows(records)
    elif kind == "parquet":
        pq.write_table(pa.table({"text": texts}), file, row_group_size=len(texts) // 9)
    else:
        file.write_text("\n".join(texts), "utf-8")
    return {"source": str(file)}


def recipe_for(source, directory="", *, context: int = 16, **data) -> Recipe:
    """The data of a path or of a list of names, with a tiny model."""
    source = source if isinstance(source, list) else str(source)
    model = {"layers": 1, "heads": 1, "width": 8, "context": context}
    values = {"source": source, "dir": str(directory), "shard_tokens": 1024, **data}
    return Recipe.model_validate({"model": model, "data": values})


def counted(tokenizer, tokens, marks) -> str:
    """The text of the tokens that count in the loss."""
    return tokenizer.decode(token for token, mark in zip(tokens, marks, strict=True) if mark)


# -- an independent reference of the split, and what a division has


def text_hash(*texts: str) -> int:
    content = "\0".join(texts).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def reference_split(texts: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """The training and validation texts of a source of documents; "" is none."""
    share = Fraction(str(fraction))
    train, val = [], []
    few = sum(map(bool, texts)) < 100
    for text in filter(None, texts):
        if fraction and (few or len(text) > 400_000):
            cut = int(len(text) * (1 - share))
            train.append(text[:cut])
            val.append(text[cut:])
        elif text_hash(text) < share * 2**64:
            val.append(text)
        else:
            train.append(text)
    return train, val


def read_documents(tokens: DocumentSet) -> list[list[int]]:
    """The tokens of each document of a set."""
    row = tokens.read(0, len(tokens)) % MARK
    return [row[a:b].tolist() for a, b in itertools.pairwise(tokens.edges.tolist())]


def texts_of(data) -> tuple[list[str], list[str]]:
    """The training and the validation documents of opened data, as text without special tokens."""
    special = set(data.tokenizer.special.values())
    return tuple(
        [
            data.tokenizer.decode(t for t in document if t not in special)
            for tokens in sets
            for document in read_documents(tokens)
        ]
        for sets in (data.division.train, data.division.val)
    )
