"""The corpus of the small trainings in this folder."""

import random
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of made-up words: 44 samples of 16 characters for training, so that 12 steps of 8
    cross two epochs' edges.
    """
    folder, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    words = [
        "".join(draw.choice("abcdefgh") for _ in range(draw.randint(2, 6))) for _ in range(400)
    ]
    (folder / "text.txt").write_text(" ".join(words)[:787])
    return folder
