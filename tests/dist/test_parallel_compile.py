"""`train.compile` makes one graph for all blocks and one for the loss, without breaks, despite
evaluations in between."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from harness import Join, recipe, run_ranks
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import hf_fixtures
from windlass.data.samples import positions_of
from windlass.data.tokenizer_kinds import byte_tokenizer
from windlass.errors import installed
from windlass.evaluation.generate import Sampling, generate
from windlass.evaluation.likelihood import Continuation, log_likelihoods
from windlass.evaluation.suites import Suites
from windlass.model.attention import Documents
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.loss import loss_tail
from windlass.model.size import CHUNK_BYTES
from windlass.parallel.connect import init_ranks
from windlass.parallel.env import DistEnv
from windlass.parallel.parallelize import parallelize, unwrap
from windlass.parallel.precision import autocast
from windlass.parallel.ranks import Ranks

VOCAB = 64
SMALL = {"model__layers": 12, "model__heads": 2, "model__width": 16, "model__context": 32}
LOW = {"parallel__strategy": "full_shard", "train__precision": "bf16"}
FLOAT8 = {"train__precision": "float8", "model__width": 128}
SELECTIVE = {"parallel__activation_checkpointing": "selective"}
Work = Callable[[Any, Ranks, Callable[..., None]], object]


def slow(value: Any, *marks: Any) -> Any:
    return pytest.param(value, marks=[pytest.mark.full, *marks])


needs_torchao = pytest.mark.skipif(not installed("torchao"), reason="torchao is not installed")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """A function that works with a compiled model and returns the graphs of its blocks, which have
    no breaks. There are as many graphs of the loss.
    """
    warnings.simplefilter("ignore")
    graphs, tails = CompileCounterWithBackend("eager"), CompileCounterWithBackend("eager")
    # One chunk for all rows here; of a quarter of it the loss is not compiled.
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 64 * VOCAB * 4)
    real = torch.compile
    backend = {loss_tail: tails}
    monkeypatch.setattr(
        torch, "compile", lambda f, **k: real(f, backend=backend.get(f, graphs), **k)
    )

    def run(work: Work, **settings: Any) -> list[torch.fx.GraphModule]:
        small = {} if settings.get("model__kind") == "hf" else SMALL
        chosen = recipe(**(small | settings), train__compile=True)
        with init_ranks(DistEnv(), chosen) as ranks:
            model = parallelize(build_model(chosen, VOCAB), ranks, chosen)
            initialise(unwrap(model), 1)

            def train(rows: int = 2, length: int = 32, **more: Any) -> None:
                tokens = torch.arange(rows * length).reshape(rows, length) % VOCAB
                with autocast(chosen, ranks.device):
                    loss = model(tokens, tokens, **more)
                loss.backward()

            work(model, ranks, train)
        assert not counters["graph_break"]
        assert counters["frames"]["ok"] == counters["frames"]["total"]
        assert len(tails.graphs) == len(graphs.graphs)
        return graphs.graphs

    torch._dynamo.reset()
    counters.clear()
    yield run
    torch._dynamo.reset()


def static(graph: torch.fx.GraphModule) -> bool:
    """Whether every size that a graph is given is a number."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("example_value") for node in inputs]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return all(isinstance(size, int) for tensor in tensors for size in tensor.shape)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        slow({"parallel__activation_checkpointing": "full"}),
        {"parallel__activation_checkpointing": "selective"},
        LOW,
        slow(LOW | {"train__precision": "fp16", "parallel__activation_checkpointing": "full"}),
        pytest.param(FLOAT8, marks=needs_torchao),
        slow(LOW | FLOAT8, needs_torchao),
        slow(FLOAT8 | SELECTIVE, needs_torchao),
    ],
    ids=[
        *("one rank", "full", "selective", "FSDP2 in bf16", "FSDP2 in fp16, full"),
        *("float8", "FSDP2 in float8", "float8, selective"),
    ],
)
def test_all_blocks_are_one_graph(compiled, settings):
    (graph,) = compiled(lambda model, ranks, train: [train() for _ in range(2)], **settings)
    assert static(graph)


def two_steps(join: Join, strategy: str) -> tuple[int, dict[str, int]]:
    """The graphs of two steps and their breaks."""
    warnings.simplefilter("ignore")
    graphs, CHUNK_BYTES["cpu"] = CompileCounterWithBackend("eager"), 0
    torch.compile = partial(torch.compile, backend=graphs)
    counters.clear()
    how = {"parallel__strategy": strategy, "parallel__bucket_mb": 0.005}
    chosen = recipe(**SMALL, **how, train__compile=True)
    with join(chosen) as ranks:
        model = parallelize(build_model(chosen, VOCAB), ranks, chosen)
        initialise(unwrap(model), 1)
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        for _ in range(2):
            model(tokens, tokens).backward()
    return len(graphs.graphs), dict(counters["graph_break"])


@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
def test_two_ranks_have_one_graph_for_all_blocks_and_one_for_the_loss(strategy):
    """Also if the buckets of DDP end within blocks."""
    assert run_ranks(two_steps, 2, strategy) == [(2, {})] * 2


def test_blocks_of_a_model_of_transformers_are_one_graph(compiled, tmp_path):
    directory = hf_fixtures.save("llama", tmp_path, num_hidden_layers=10)
    hf = {"model__kind": "hf", "model__name": str(directory), "model__context": 32}
    assert len(compiled(lambda model, ranks, train: train(), **hf, **LOW)) == 1


@pytest.mark.parametrize(
    "checkpointing", ["none", pytest.param("full", marks=pytest.mark.full), "selective"]
)
def test_rows_of_varying_length_break_no_graph(compiled, checkpointing):
    graphs = compiled(
        lambda model, ranks, train: [train(2, length) for length in (32, 20, 9, 32, 11)],
        parallel__activation_checkpointing=checkpointing,
    )
    assert list(map(static, graphs)) == [True, False]


def test_an_evaluation_leaves_the_trainings_graph_static(compiled, monkeypatch):
    def evaluate_then_train(model: Any, ranks: Ranks, train: Callable[..., None]) -> None:
        rows = [Continuation([1] * n, [2, 3]) for n in (3, 9, 20, 28)]

        def harness(tasks: str, *place: Any) -> dict[str, Any]:
            scored = log_likelihoods(model, rows[: 4 if tasks == "a" else 2], ranks, place[-1])
            return {"rows": len(scored or [])}

        def own(model: Any) -> dict[str, Any]:
            return {"score": float(unwrap(model)(torch.zeros(3, 7, dtype=torch.int64)).sum())}

        monkeypatch.setattr("windlass.evaluation.suites.run_harness", harness)
        suites = Suites(recipe(**SMALL), byte_tokenizer(), ranks, own={"own:x": own})
        for suite in ("lm-eval:a", "lm-eval:b", "own:x"):
            assert suites.measure(suite, model) is not None
        generate(model, [[1, 2, 3]], Sampling(max_tokens=4, temperature=0), ranks)
        train()
        suites.measure("lm-eval:b", model)
        train()

    (graph,) = compiled(evaluate_then_train)
    assert static(graph)


def documents_of(*lengths: int) -> Documents:
    """Two rows of 32 tokens, one with documents of these lengths, one with a single document."""
    numbers = torch.zeros(2, 32, dtype=torch.int64)
    numbers[0] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return Documents(numbers, torch.from_numpy(positions_of(numbers.numpy())))


VARYING = ((8, 24), (1, 1, 30), (32,), (4,) * 8, (2,) * 16)


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_varying_documents_compile_once(compiled, checkpointing):
    (graph,) = compiled(
        lambda model, ranks, train: [train(documents=documents_of(*n)) for n in VARYING],
        parallel__activation_checkpointing=checkpointing,
    )
    assert static(graph)
