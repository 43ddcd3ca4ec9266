"""A packed row has the loss and the gradients of its documents one by one: for our GPT, for models
of transformers, and in a whole run. Models that cannot keep documents apart are refused.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hf_fixtures
from helpers import curve, refused, tiny_recipe
from sample_fixtures import Example, examples, opened
from windlass import train
from windlass.data.batch import Batch
from windlass.data.loader import to_tensor
from windlass.data.recipe_sources import SourceSpec
from windlass.data.samples import PackedSamples
from windlass.data.shards import Corpus, Index, Row, ShardWriter
from windlass.data.split import DocumentSet
from windlass.data.tokenizer_kinds import byte_tokenizer
from windlass.model.attention import Documents, documents_of
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.hf_network import attention_within_documents
from windlass.recipe import Recipe

CONTEXT = 48


def losses_and_gradients(model: Any, batches: list[Any]) -> list[Tensor]:
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        loss = model(batch.tokens, batch.labels, **documents_of(batch, model))
        loss.backward()
        total += loss.detach()
    return [total, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def conversations(folder: Path) -> tuple[list[Batch[Any]], list[Batch[Any]]]:
    """Packed rows, and each of their conversations."""
    whole = Example([7] * 49, [False, *[True] * 48], group=1)  # fills a row
    made = [whole, *examples(27, longest=30, vocab=200)]
    rows, packed = (opened(made, folder / "talk", CONTEXT, packed=p, pad=0) for p in (False, True))
    assert len(packed) < len(rows) / 2
    joined = [packed.read(np.arange(i, min(i + 3, len(packed)))) for i in range(0, len(packed), 3)]
    return joined, [rows.read(np.array([i])) for i in range(len(rows))]


def texts(folder: Path) -> tuple[list[Batch[Any]], list[Batch[Any]]]:
    """Packed rows of text, and each part of a document in a row.

    End tokens (0) stand inside of documents, too. Some documents have one token, some fill rows.
    """
    draw, eot = np.random.default_rng(5), 0
    sizes = [130, 1, 1, *draw.integers(2, 40, 20).tolist()]
    documents = [np.append(eot, draw.integers(0, 9, size - 1)) for size in sizes]
    tokenizer = byte_tokenizer()
    index = Index(key={}, source={}, tokenizer=tokenizer.describe(), shard_tokens=100)
    with ShardWriter(folder, index) as writer:
        for number, document in enumerate(documents):
            writer.add(Row(number, document))
        index = writer.finish(complete=True)
    assert len(index.shards) > 3
    edges = np.cumsum([0, *sizes])
    corpus = Corpus(folder, index, SourceSpec("x", "x"), tokenizer)
    ranges = np.stack([edges[:-1], edges[1:]], axis=1)
    tokens = DocumentSet([corpus], [np.arange(len(sizes))], [ranges])
    rows = PackedSamples(tokens, CONTEXT, ragged=True, following=eot)
    joined = [rows.read(np.arange(i, min(i + 3, len(rows)))) for i in range(0, len(rows), 3)]
    parts, place = list[Batch[Any]](), 0
    for document in documents:
        whole = np.append(document, eot)
        cuts = [*(i for i in range(1, len(document)) if (place + i) % CONTEXT == 0), len(document)]
        for a, b in zip([0, *cuts], cuts, strict=False):
            parts.append(Batch(whole[None, a:b], whole[None, a + 1 : b + 1]))
        place += len(document)
    parts[-1].labels[0, -1] = -100  # a packed row does not know what follows the last token
    labels = sum(int((batch.labels != -100).sum()) for batch in joined)
    assert labels == rows.valid_tokens == sum(sizes) - 1
    return joined, parts


def check_equal(model: Any, joined: list[Batch[Any]], single: list[Batch[Any]]) -> None:
    """The sums over packed rows are those over single texts, to 1e-12 of the largest entry."""
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


@pytest.mark.parametrize(
    ("shape", "shortest"),  # the shortest row that takes products instead of a mask
    [(shape, shortest) for shape in SHAPES for shortest in (0, CONTEXT)]
    + [(kind, 0) for kind in ("llama", "qwen3", "gpt2", "mistral")],
)
def test_a_packed_row_is_its_conversations_one_by_one(
    shape: str, shortest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.model.attention.MASKED_TOKENS", shortest)
    settings = {"layers": 2, "heads": 4, "width": 32, **SHAPES.get(shape, {})}
    if shape not in SHAPES:
        settings = {"kind": "hf", "name": str(hf_fixtures.save(shape, tmp_path / shape))}
    recipe = Recipe.model_validate({"model": settings | {"context": CONTEXT}})
    model = build_model(recipe, 200, device="cpu").double().eval()
    initialise(model, 1)
    check_equal(model, *conversations(tmp_path))
    check_equal(model, *texts(tmp_path))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_documents_without_flash_attention_have_one_mask_for_all_blocks(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; here on the meta device, which like a GPU is not a CPU."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it has none
    shape = {"layers": 2, "heads": 4, "width": 32, "context": 512, "dropout": dropout}
    model: Any = build_model(Recipe.model_validate({"model": shape}), 200)
    numbers = torch.arange(512).div(8, rounding_mode="floor").repeat(2, 1)
    documents = Documents(numbers, torch.zeros(2, 512, dtype=torch.int64, device="meta"))
    here = model.prepare(documents.positions, None, 0, documents)
    assert here.spans.mask.shape == (2, 1, 512, 512)


@pytest.mark.parametrize(
    ("kind", "current", "wanted"),
    [
        ("llama", "sdpa", "flex_attention"),
        ("gpt2", "sdpa", "sdpa"),
        ("gpt2", "flash_attention_2", "sdpa"),
    ],
)
def test_attention_of_a_model_of_transformers_on_a_gpu(
    kind: str, current: str, wanted: str, tmp_path: Path
) -> None:
    """GPT-2 has dropout, which flex attention rejects."""
    folder = hf_fixtures.save(kind, tmp_path / kind)
    tree = {"kind": "hf", "name": str(folder), "context": CONTEXT}
    model: Any = build_model(Recipe.model_validate({"model": tree}), 0, device="cpu")
    assert attention_within_documents(model.model, current) == wanted


def recipe_of(folder: Path, run: str, **changes: Any) -> Recipe:
    draw = np.random.default_rng(1)
    with (folder / "talk.jsonl").open("w") as file:
        for asked, answered in draw.integers(3, 40, (80, 2)).tolist():
            user = {"role": "user", "content": "q" * asked}
            answer = {"role": "assistant", "content": "a b" * (answered // 3 + 1)}
            file.write(json.dumps({"messages": [user, answer]}) + "\n")
    how = {"data__format": "chat", "data__packing": "best-fit", "data__tokenizer": "byte"}
    how |= {"model__layers": 1, "model__width": 16, "model__context": 256, "train__steps": 4}
    how |= {"train__global_batch": 4, "train__precision": "fp64", "checkpoint__every": 2}
    how |= {"eval__every": 4, "eval__batches": 0, "data__val_fraction": 0.1}
    return tiny_recipe(folder / "talk.jsonl", folder / run, **how | changes)


def test_a_run_on_packed_rows_resumes_and_validates_as_on_single_ones(tmp_path: Path) -> None:
    straight = train(recipe_of(tmp_path, "straight"))
    recipe = recipe_of(tmp_path, "stopped")
    train(recipe, stop_at=2)
    run = train(recipe)
    assert curve(run) == curve(straight)
    start = run.lines("event")[0]["data"]["train"]
    line = run.lines("train")[-1]
    assert start["fill"] > 0.9 and start["items"] == 71
    assert line["tokens"] < line["samples"] * 256  # padding does not count
    assert "% filled" in run.log_path.read_text()
    single = train(recipe_of(tmp_path, "single", data__packing="packed"))
    ours, expected = (one.lines("eval")[0] for one in (run, single))
    assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert ours["tokens"] == expected["tokens"]


@pytest.mark.parametrize("kind", ["bloom", "mamba"])
def test_models_that_join_documents_are_refused(kind: str, tmp_path: Path) -> None:
    folder = hf_fixtures.save(kind, tmp_path / kind)
    hf_fixtures.save_tokenizer(["the cat sat on the mat"], folder)
    recipe = recipe_of(tmp_path, "run").replace(f"data.tokenizer=hf:{folder}", "model.context=128")
    with refused('data.packing = "best-fit"', "leave it out"):
        train(recipe.replace("model.kind=hf", f"model.name={folder}"))


def test_rows_of_documents_need_a_module_that_takes_them(tmp_path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(300, 300)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            logits = self.table(tokens).flatten(0, 1)
            return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")

    with refused('data.packing = "best-fit"', "forward takes no `documents`"):
        train(recipe_of(tmp_path, "own", train__precision="fp32"), model=Own())
