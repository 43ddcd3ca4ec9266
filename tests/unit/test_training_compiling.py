"""What `train.compile = "auto"` needs on a machine, and where it compiles nothing."""

import json
import sysconfig
import warnings

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

from helpers import tiny_recipe
from windlass import Recipe, train
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.size import CHUNK_BYTES
from windlass.training.network import missing_tools


def test_missing_tools(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "C compiler" in missing_tools()
    compiler = tmp_path / "gcc"
    compiler.touch(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python.h" in missing_tools()
    (tmp_path / "Python.h").touch()
    assert missing_tools() == ""


def test_auto_compiles_nothing_on_a_cpu_and_the_start_says_so(
    tmp_path, corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", None)  # it would raise TypeError
    small = {"model.layers": 1, "model.context": 32, "train.steps": 1, "eval.every": 0}
    small |= {"data.source": str(corpus), "data.dir": str(tmp_path / "data")}
    run = train(Recipe.load("quickstart").replace(small, {"run.dir": str(tmp_path / "run")}))
    assert run.events[0]["compiles"] is False


class Own(torch.nn.Module):
    """A user's module, which the start tries on two samples."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        self.vocab, self.network = 257, build_model(recipe, 257).to_empty(device="cpu")
        initialise(self.network, 1)

    def blocks(self) -> list[torch.nn.Module]:
        return list(self.network.blocks)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.network(tokens, labels)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("documents", {"data__document_mask": True}),  # the start checks a mask of 8 tokens
        ("own", {}),
        ("ragged", {"data__format": "chat", "train__micro_batch": 2}),
    ],
)
def test_a_fresh_and_a_resumed_run_train_on_the_same_graphs(
    tmp_path, monkeypatch, kind, settings
) -> None:
    """Other graphs have other kernels, which round differently."""
    warnings.simplefilter("ignore")
    texts = ["a word", "three more words", "b", "and here are six words again"] * 60
    corpus, real, made = tmp_path / "text.jsonl", torch.compile, list[list[list[str]]]()
    keys = ("prompt", "completion") if kind == "ragged" else ("text", "n")
    rows = [dict(zip(keys, (f"{text} {n}", str(n)), strict=True)) for n, text in enumerate(texts)]
    lines = [json.dumps(row) + "\n" for row in rows]
    corpus.write_text("".join(lines))
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 0)  # of fewer logits the loss is not compiled
    how = {"train__steps": 4, "train__compile": True, "data__tokenizer": "byte", **settings}
    recipe = tiny_recipe(corpus, tmp_path / "run", **how)
    try:
        for stop in (2, 0):
            torch._dynamo.reset()
            graphs = CompileCounterWithBackend("eager")
            monkeypatch.setattr(torch, "compile", lambda f, g=graphs, **k: real(f, backend=g, **k))
            assert train(recipe, Own(recipe) if kind == "own" else None, stop_at=stop).state
            made.append([inputs(graph) for graph in graphs.graphs])
    finally:
        torch._dynamo.reset()
    fresh, resumed = made
    assert fresh == resumed and len(fresh) == 2, "one of the blocks, and one of the loss"
    varies = any("s" in shape for graph in fresh for shape in graph)
    assert varies == (kind == "ragged")


def inputs(graph: torch.fx.GraphModule) -> list[str]:
    """The shapes of a graph's inputs, with the names of sizes that vary."""
    values = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
    return [str(tuple(v.shape) if isinstance(v, torch.Tensor) else v) for v in values]
