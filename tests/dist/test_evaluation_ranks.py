"""Evaluation and generation on several ranks, sharded and not: the numbers of one process, and
never a hang.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from harness import Join, recipe, run_ranks

from rows import Rows
from windlass.data.items import Question
from windlass.data.mixture import MixedSamples
from windlass.data.tokenizer_kinds import byte_tokenizer
from windlass.evaluation import generate as generation
from windlass.evaluation.api import precision_of
from windlass.evaluation.generate import Sampling, generate
from windlass.evaluation.harness import generate_until
from windlass.evaluation.hellaswag import Item, continuations, evaluate_hellaswag
from windlass.evaluation.likelihood import Continuation, evaluate_loss, log_likelihoods
from windlass.evaluation.passes import Interrupted, Passes
from windlass.evaluation.squad import evaluate_squad
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.sharding import unwrap
from windlass.parallel.parallelize import parallelize
from windlass.parallel.ranks import Ranks, alone

pytestmark = pytest.mark.dist

SIZES = {"layers": 2, "heads": 2, "width": 32, "context": 64, "init_std": 0.3}
SHAPE = {f"model__{key}": value for key, value in SIZES.items()}
TOKENIZER = byte_tokenizer()


def rows(count: int) -> Rows:
    """Rows of unequal length; the validation set of one of them has nothing that counts at all."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(2, 40, count)
    examples = [(generator.integers(0, 256, n), generator.random(n) < 0.5) for n in lengths]
    return Rows(examples, pad=256)


MIXED = MixedSamples({"a": rows(11), "b": rows(5), "c": rows(3)}, spread=True)


def prompts(count: int) -> list[list[int]]:
    generator = np.random.default_rng(2)
    return [generator.integers(0, 256, n).tolist() for n in generator.integers(1, 50, count)]


ITEMS = [
    Item(f"The cat number {i}", ("sat", "ran away from it", "ate", "slept " * (i % 3 + 1)), i % 4)
    for i in range(7)
]
QUESTIONS = [
    Question(f"q{i}", f"Who is {i}?", "A cat. " * (i % 4 + 1), ("cat",), 2) for i in range(7)
]
REQUESTS = [
    ("cat " * (i % 3), {"max_gen_toks": 6 + i % 2, "until": ["e"], "do_sample": i == 4, "top_k": 5})
    for i in range(5)
]
# Stops soon, and each text elsewhere.
SAMPLING = Sampling(max_tokens=24, seed=3, stop=frozenset(range(40)))


def on_this_process() -> Any:
    model = build_model(recipe(**SHAPE), 257, device="cpu")
    initialise(model, 1)
    return model


def on_ranks(join: Join, strategy: str, call: Callable[..., Any], layout: dict[str, int]) -> Any:
    """`call(model, ranks)` on the ranks of a parallelized model."""
    settings = recipe(**SHAPE, **layout, parallel__strategy=strategy)
    with join(settings) as ranks:
        model = parallelize(build_model(settings, 257), ranks, settings)
        initialise(unwrap(model), 1)
        return call(unwrap(model), ranks)


def measured(model: Any, ranks: Ranks) -> dict[str, Any]:
    """All measurements, with counts that no world divides; rank 3 of 4 gets no prompt at all."""
    texts, rank, world = prompts(7), ranks.mesh.data_rank, ranks.mesh.data_world
    passes = Passes(model, ranks, TOKENIZER)
    mine = [] if rank == 3 else list(range(7))[rank::world]
    with mock.patch.object(generation, "BATCH", 2):
        continued = generate(passes, [texts[i] for i in mine], SAMPLING, mine)
    pairs = [Continuation(texts[i // 2], texts[i + 1]) for i in range(6)]  # contexts twice
    scored = log_likelihoods(passes, pairs)
    # One text ends at its first token, while the other ranks go on for long. Then only the last
    # rank has a text.
    stop = frozenset(range(257 if rank == 0 else 0))
    uneven = generate(passes, [texts[0]], Sampling(24, temperature=0, stop=stop))
    assert len(uneven[0]) == (0 if rank == 0 else 24)
    lone = generate(passes, texts[:1] if rank == world - 1 else [], SAMPLING)
    squad = evaluate_squad(passes, QUESTIONS)
    return {
        "loss": [evaluate_loss(passes, rows(11), 2, limit) for limit in (0, 1, 5)],
        "both": evaluate_loss(passes, rows(11), 2, 5, whole=True),
        "mixed": evaluate_loss(passes, MIXED, 2, 8, whole=True),
        "texts": dict(zip(mine, continued, strict=True)),
        "sums": [one.sum for one in scored],
        "hellaswag": hellaswag(passes, ITEMS),
        "squad": squad[1],
        "lone": lone or None,
        "few": [few(passes, count) for count in (1, 3)],
        "written": generate_until(passes, REQUESTS, TOKENIZER.prompt),
    }


def hellaswag(passes: Passes, items: list[Item]) -> dict[str, float]:
    return evaluate_hellaswag(passes, items, continuations(items, TOKENIZER))


def few(passes: Passes, count: int) -> tuple[Any, ...]:
    """Fewer items than ranks, and an odd number of them."""
    rows = [Continuation([1], [2, i]) for i in range(count)]
    scored, chosen = log_likelihoods(passes, rows), hellaswag(passes, ITEMS[:count])
    squad = evaluate_squad(passes, QUESTIONS[:count])
    return scored[0].tokens, chosen["acc"], squad[1]


TENSOR, CONTEXT, PIPELINE = ({f"parallel__{d}": 2} for d in ("tensor", "context", "pipeline"))


@pytest.mark.parametrize(
    ("strategy", "world", "layout"),
    [
        ("full_shard", 2, {}),
        ("ddp", 4, {}),
        ("ddp", 2, TENSOR),
        ("full_shard", 4, CONTEXT),
        ("full_shard", 4, PIPELINE),
        pytest.param("ddp", 4, PIPELINE | TENSOR, marks=pytest.mark.full),
        pytest.param("full_shard", 4, TENSOR, marks=pytest.mark.full),
        pytest.param("ddp", 4, TENSOR | CONTEXT, marks=pytest.mark.full),
    ],
)
def test_all_that_is_measured_is_that_of_one_process(strategy, world, layout) -> None:
    expected = measured(on_this_process(), alone("cpu"))
    results = run_ranks(on_ranks, world, strategy, measured, layout)
    for one in results:
        for mine, whole in zip(one["loss"], expected["loss"], strict=True):
            assert (mine["tokens"], mine["samples"]) == (whole["tokens"], whole["samples"])
            assert mine["loss"] == pytest.approx(whole["loss"], rel=1e-6)
            assert mine["perplexity"] == pytest.approx(math.exp(mine["loss"]))
        both = one["both"]
        assert both["loss"] == one["loss"][2]["loss"], "the bits of the bounded pass"
        assert both["full_samples"] == 11
        assert both["full_loss"] == pytest.approx(expected["loss"][0]["loss"], rel=1e-6)
        assert one["mixed"] == pytest.approx(expected["mixed"], rel=1e-6)
        assert {f"source.{name}.full_loss" for name in "abc"} < one["mixed"].keys()
        assert one["sums"] == pytest.approx(expected["sums"], rel=1e-5)
        assert all(one[name] == expected[name] for name in ("hellaswag", "squad", "few", "written"))
        assert one["texts"].items() <= expected["texts"].items()
    copies = math.prod(layout.values())  # ranks with the same prompts
    lone = [one["lone"] for one in results]
    assert lone.count(expected["lone"]) == copies and lone.count(None) == world - copies
    lengths = {len(text) for text in expected["texts"].values()}
    assert len(lengths) > 2, "texts end at different places"


def stopped(model: Any, ranks: Ranks) -> float:
    def poll_of() -> Passes:
        asked = itertools.count()
        return Passes(model, ranks, poll=lambda: ranks.rank == 1 and next(asked) >= 3)

    for measure in (
        lambda: evaluate_loss(poll_of(), rows(64), 2),
        lambda: generate(poll_of(), prompts(3 + ranks.rank), SAMPLING),
        lambda: log_likelihoods(poll_of(), [Continuation([1] * 60, [2] * 4)] * 512),
    ):
        with pytest.raises(Interrupted):
            measure()
    return evaluate_loss(Passes(model, ranks, poll=lambda: False), rows(5), 2)["samples"]


def test_a_stop_signal_on_one_rank_stops_all_after_the_same_pass() -> None:
    assert run_ranks(on_ranks, 2, "full_shard", stopped, {}) == [5, 5]


@pytest.mark.parametrize(
    ("trained", "changes", "gpu", "used"),
    [
        ("auto", (), True, "auto"),
        ("bf16", (), True, "bf16"),
        ("bf16", (), False, "fp32"),
        ("fp64", (), False, "fp64"),
        ("fp16", ("train.precision",), False, "fp16"),
    ],
)
def test_precision_of_the_measurements_of_a_saved_model(trained, changes, gpu, used):
    assert precision_of(recipe(train__precision=trained), changes, gpu) == used
