"""`train.compile` on CUDA: one graph for all blocks, one for the loss and no breaks, in bf16, whatever
the strategy; rows of varying length.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import curve

pytestmark = pytest.mark.gpu


@pytest.fixture
def graphs() -> Callable[[], tuple[int, dict[str, int]]]:
    """The graphs that Dynamo has made since the test began, and the reasons of graph breaks."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    return lambda: (counters["stats"]["unique_graphs"], dict(counters["graph_break"]))


@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.strategy=single",),
        ("parallel.strategy=ddp",),
        ("parallel.strategy=full_shard",),
        ("parallel.strategy=full_shard", "parallel.activation_checkpointing=full"),
    ],
)
def test_twelve_blocks_are_one_graph(recipe, graphs, settings):
    from windlass import train

    # the loss is compiled if its logits are large
    more = ("model.layers=12", "model.vocab=50304", "train.deterministic=false")
    settings = (*settings, "train.precision=bf16", *more)
    eager = train(recipe("eager", *settings))
    assert graphs() == (0, {})
    compiled = train(recipe("compiled", *settings, "train.compile=true"))
    count, breaks = graphs()
    assert count == 2 and not breaks  # of a block and of the loss
    for (_, mine), (_, other) in zip(curve(compiled, "loss"), curve(eager, "loss"), strict=True):
        assert mine == pytest.approx(other, rel=2e-2)


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Answers of many lengths: each micro-batch is as wide as its longest row."""
    rng, path = random.Random(0), tmp_path / "chat.jsonl"
    with path.open("w") as file:
        for i in range(400):
            text = " ".join(rng.choice(["red", "green", "blue"]) for _ in range(rng.randint(1, 12)))
            talk = [
                {"role": "user", "content": f"Say {i % 7}"},
                {"role": "assistant", "content": text},
            ]
            file.write(json.dumps({"messages": talk}) + "\n")
    return path


def test_ragged_batches_compile_whole_and_give_the_losses_of_the_cpu(
    recipe: Callable[..., Any], graphs: Any, conversations: Path, tmp_path: Path, device: str
) -> None:
    from windlass import train

    settings = (
        f"data.source='{conversations}'",
        "data.format=chat",
        f"data.dir='{tmp_path / 'talks'}'",
        *"train.precision=fp64 train.micro_batch=4 train.global_batch=16 model.context=128".split(),
    )
    expected = curve(train(recipe("cpu", *settings, "parallel.device=cpu")), "loss", "grad_norm")
    assert graphs() == (0, {})
    for name, more in (("eager", ()), ("compiled", ("train.compile=true",))):
        run = train(recipe(name, *settings, *more))
        for mine, other in zip(curve(run, "loss", "grad_norm"), expected, strict=True):
            assert mine == pytest.approx(other, rel=1e-7)
    count, breaks = graphs()
    assert count == 1 and not breaks  # of a block, for rows of any length
