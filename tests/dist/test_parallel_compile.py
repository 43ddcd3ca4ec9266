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
from windlass.data.batch import positions_of
from windlass.data.tokenizer_kinds import byte_tokenizer
from windlass.errors import installed
from windlass.evaluation.generate import Sampling, generate
from windlass.evaluation.likelihood import Continuation, log_likelihoods
from windlass.evaluation.passes import Passes
from windlass.evaluation.suites import Suites
from windlass.model.attention import Documents
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.loss import chunk_loss
from windlass.model.sharding import unwrap
from windlass.model.size import CHUNK_BYTES
from windlass.parallel.env import DistEnv
from windlass.parallel.parallelize import autocast, parallelize
from windlass.parallel.ranks import Ranks, init_ranks

VOCAB = 64
SMALL = {"model__layers": 12, "model__heads": 2, "model__width": 16, "model__context": 32}
LOW = {"parallel__strategy": "full_shard", "train__precision": "bf16"}
FLOAT8 = {"train__precision": "float8", "model__width": 128}
SELECTIVE = {"parallel__activation_checkpointing": "selective"}
FULL = {"parallel__activation_checkpointing": "full"}
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
    backend = {chunk_loss: tails}
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
        *({}, SELECTIVE, LOW, slow(FULL), slow(LOW | FULL)),
        pytest.param(FLOAT8, marks=needs_torchao),
        slow(LOW | FLOAT8 | SELECTIVE, needs_torchao),
    ],
    ids=str,
)
def test_all_blocks_are_one_graph(compiled, settings):
    (graph,) = compiled(lambda model, ranks, train: [train() for _ in range(2)], **settings)
    assert static(graph)


def two_steps(join: Join, how: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """The graphs of two steps and their breaks."""
    warnings.simplefilter("ignore")
    graphs, CHUNK_BYTES["cpu"] = CompileCounterWithBackend("eager"), 0
    torch.compile = partial(torch.compile, backend=graphs)
    counters.clear()
    chosen = recipe(**SMALL, **how, parallel__bucket_mb=0.005, train__compile=True)
    with join(chosen) as ranks:
        model = parallelize(build_model(chosen, VOCAB), ranks, chosen)
        initialise(unwrap(model), 1)
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        for _ in range(2):
            model(tokens, tokens).backward()
    return len(graphs.graphs), dict(counters["graph_break"])


@pytest.mark.parametrize(
    ("how", "graphs"),
    [
        ({"parallel__strategy": "ddp"}, 2),
        ({"parallel__strategy": "full_shard"}, 2),
        ({"parallel__tensor": 2, "model__activation": "swiglu"} | SELECTIVE, 1),
    ],
    ids=str,
)
def test_two_ranks_have_one_graph_for_all_blocks_and_one_for_the_loss(how, graphs):
    """Also if the buckets of DDP end within blocks. The loss of a divided vocabulary has none."""
    assert run_ranks(two_steps, 2, how) == [(graphs, {})] * 2


def test_blocks_of_a_model_of_transformers_are_one_graph(compiled, tmp_path):
    directory = hf_fixtures.save("llama", tmp_path, num_hidden_layers=10)
    hf = {"model__kind": "hf", "model__name": str(directory), "model__context": 32}
    assert len(compiled(lambda model, ranks, train: train(), **hf, **LOW)) == 1


@pytest.mark.parametrize("settings", [{}, slow(FULL), SELECTIVE], ids=str)
def test_rows_of_varying_length_break_no_graph(compiled, settings):
    graphs = compiled(
        lambda model, ranks, train: [train(2, length) for length in (32, 20, 9, 32, 11)],
        **settings,
    )
    assert list(map(static, graphs)) == [True, False]


def test_an_evaluation_leaves_the_trainings_graph_static(compiled, monkeypatch):
    def evaluate_then_train(model: Any, ranks: Ranks, train: Callable[..., None]) -> None:
        rows = [Continuation([1] * n, [2, 3]) for n in (3, 9, 20, 28)]

        def harness(passes: Passes, tasks: str, *_: Any) -> dict[str, Any]:
            scored = log_likelihoods(passes, rows[: 4 if tasks == "a" else 2])
            return {"rows": len(scored)}

        def own(model: Any) -> dict[str, Any]:
            return {"score": float(unwrap(model)(torch.zeros(3, 7, dtype=torch.int64)).sum())}

        monkeypatch.setattr("windlass.evaluation.suites.run_harness", harness)
        suites = Suites(recipe(**SMALL), byte_tokenizer(), ranks, own={"own:x": own})
        for suite in ("lm-eval:a", "lm-eval:b", "own:x"):
            assert suites.measure(suite, model)
        generate(Passes(unwrap(model), ranks), [[1, 2, 3]], Sampling(max_tokens=4, temperature=0))
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


@pytest.mark.parametrize("settings", [{}, SELECTIVE], ids=str)
def test_varying_documents_compile_once(compiled, settings):
    (graph,) = compiled(
        lambda model, ranks, train: [train(documents=documents_of(*n)) for n in VARYING],
        **settings,
    )
    assert static(graph)
