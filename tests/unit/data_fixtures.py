"""What the tests of the data share: recipes over small corpora."""

import json
import random
from pathlib import Path

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


def recipe_for(source, directory="", *, context: int = 16, **data) -> Recipe:
    """The data of a path or of a list of names, with a tiny model."""
    source = source if isinstance(source, list) else str(source)
    model = {"layers": 1, "heads": 1, "width": 8, "context": context}
    values = {"source": source, "dir": str(directory), "shard_tokens": 1024, **data}
    return Recipe.model_validate({"model": model, "data": values})


def counted(tokenizer, tokens, marks) -> str:
    """The text of the tokens that count in the loss."""
    return tokenizer.decode(token for token, mark in zip(tokens, marks, strict=True) if mark)
