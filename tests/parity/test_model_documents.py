"""A packed row has the loss and the gradients of its conversations one by one: for our GPT, for
models of transformers, and in a whole run. Models that cannot keep documents apart are refused.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hf_fixtures
from helpers import curve, refused
from windlass import train
from windlass.data.loader import to_tensor
from windlass.data.packing import BestFitSamples
from windlass.data.samples import Row, Rows
from windlass.model.build import build_model
from windlass.model.documents import Documents, document_arguments
from windlass.model.gpt import initialise
from windlass.recipe import Recipe

CONTEXT = 48


def talks() -> Rows:
    draw = np.random.default_rng(3)
    rows = []
    for size in [2, 3, 49, *draw.integers(2, 30, 25).tolist()]:
        marks = draw.random(size) < 0.4
        marks[-1] = True
        rows.append(Row(draw.integers(1, 200, size).tolist(), marks.tolist(), size))
    return Rows(rows, pad=0)


def losses_and_gradients(model: Any, batches: list[Any]) -> list[Tensor]:
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        loss = model(batch.tokens, batch.labels, **document_arguments(batch, model))
        loss.backward()
        total += loss.detach()
    return [total, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check_equal(model: Any) -> None:
    """The sums over packed rows are those over conversations, to 1e-12 of the largest entry."""
    rows = talks()
    packed = BestFitSamples(rows, CONTEXT)
    assert len(packed) < len(rows) / 2
    joined = [packed.read(np.arange(i, min(i + 3, len(packed)))) for i in range(0, len(packed), 3)]
    single = [rows.read(np.array([i])) for i in range(len(rows))]
    ours, expected = (
        losses_and_gradients(model, [batch.map(to_tensor) for batch in batches])
        for batches in (joined, single)
    )
    assert len(ours) == len(expected) > 5
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).abs().max() <= 1e-12 * max(1.0, float(other.abs().max()))


SHAPES: dict[str, dict[str, Any]] = {
    "rope": {"position": "rope", "qk_norm": True, "kv_heads": 2, "norm": "rmsnorm"},
    "learned": {"position": "learned", "activation": "gelu"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_row_is_its_conversations_one_by_one(shape: str) -> None:
    settings = {"layers": 2, "heads": 4, "width": 32, "context": CONTEXT, **SHAPES[shape]}
    recipe = Recipe.model_validate({"model": settings})
    model = build_model(recipe, 200, device="cpu").double()
    initialise(model, 1)
    check_equal(model)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mistral"])
def test_models_of_transformers_find_the_documents(kind: str, tmp_path: Path) -> None:
    hf_fixtures.save(kind, tmp_path / kind)
    tree = {"kind": "hf", "name": str(tmp_path / kind), "context": CONTEXT}
    model = build_model(Recipe.model_validate({"model": tree}), 0, device="cpu").double()
    initialise(model, 1)
    check_equal(model.eval())


def test_the_mask_is_the_documents_one_by_one() -> None:
    """On a GPU and in compiled blocks."""
    draw = torch.Generator().manual_seed(1)
    numbers = torch.tensor([[0, 0, 0, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2]])
    q = torch.randn(2, 4, 7, 8, generator=draw, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 7, 8, generator=draw, dtype=torch.float64)
    compiled: Any = SimpleNamespace(forward=SimpleNamespace(_torchdynamo_orig_callable=None))
    whole, parts = Documents(numbers, [compiled]), Documents(numbers, [nn.Identity()])
    assert whole.mask is not None and parts.mask is None
    results = [way.attention(q, k, v, 0.0) for way in (whole, parts)]
    assert (results[0] - results[1]).abs().max() < 1e-14


def recipe_of(folder: Path, run: str, **changes: Any) -> Recipe:
    if not (folder / "talk.jsonl").exists():
        draw = np.random.default_rng(1)
        with (folder / "talk.jsonl").open("w") as file:
            for asked, answered in draw.integers(3, 40, (80, 2)).tolist():
                user = {"role": "user", "content": "q" * asked}
                answer = {"role": "assistant", "content": "a b" * (answered // 3 + 1)}
                file.write(json.dumps({"messages": [user, answer]}) + "\n")
    data = {"source": str(folder / "talk.jsonl"), "dir": str(folder / "data"), "format": "chat"}
    data |= {"tokenizer": "byte", "packing": "best-fit"}
    model = {"layers": 1, "heads": 2, "width": 16, "context": 256, "position": "rope"}
    tree: dict[str, Any] = {"preset": "packed", "model": model, "data": data}
    tree |= {"run": {"dir": str(folder / run)}, "telemetry": {"every": 1}}
    tree |= {"train": {"steps": 4, "global_batch": 4, "precision": "fp64"}}
    tree |= {"eval": {"every": 4, "batches": 0}, "checkpoint": {"every": 2}}
    return Recipe.from_dict(tree).replace(changes)


def test_a_run_on_packed_rows_resumes_and_validates_as_on_single_ones(tmp_path: Path) -> None:
    straight = train(recipe_of(tmp_path, "straight"))
    recipe = recipe_of(tmp_path, "stopped")
    train(recipe, stop_at=2)
    run = train(recipe)
    assert curve(run) == curve(straight)
    start = run.lines("event")[0]["data"]["train"]
    line = run.lines("train")[-1]
    assert start["fill"] > 0.9 and start["items"] == 72
    assert line["tokens"] < line["samples"] * 256  # padding does not count
    assert "% filled" in run.log_path.read_text()
    single = train(recipe_of(tmp_path, "single", **{"data.packing": "packed"}))
    ours, expected = (one.lines("eval")[0] for one in (run, single))
    assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert ours["tokens"] == expected["tokens"]


@pytest.mark.parametrize("kind", ["bloom", "mamba"])
def test_models_that_join_documents_are_refused(kind: str, tmp_path: Path) -> None:
    folder = hf_fixtures.save(kind, tmp_path / kind)
    hf_fixtures.save_tokenizer(["the cat sat on the mat"], folder)
    tree = recipe_of(tmp_path, "run").tree()
    tree["data"]["tokenizer"] = f"hf:{folder}"
    tree["model"] = {"kind": "hf", "name": str(folder), "context": 128}
    with refused('data.packing = "best-fit"', "each conversation is a row"):
        train(Recipe.from_dict(tree))


def test_rows_of_documents_need_a_module_that_takes_them_and_data_parallelism(tmp_path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(300, 300)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            logits = self.table(tokens).flatten(0, 1)
            return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")

    with refused('data.packing = "best-fit"', "documents", "positions"):
        train(recipe_of(tmp_path, "own", **{"train.precision": "fp32"}), model=Own())
    with refused("data.packing", "parallel.tensor = 2", "data parallelism"):
        recipe_of(tmp_path, "tensor", **{"parallel.tensor": 2})
