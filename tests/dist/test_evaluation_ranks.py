"""Evaluation and generation on several ranks, sharded and not: the numbers of one process, and
never a hang.
"""

import math
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from harness import Join, recipe, run_ranks

from windlass.data.samples import Rows
from windlass.data.squad import Question
from windlass.data.vocabulary import byte_tokenizer
from windlass.evaluation import likelihood
from windlass.evaluation.generate import Sampling, generate
from windlass.evaluation.likelihood import Continuation, Item, evaluate_loss, log_likelihoods
from windlass.evaluation.lm_eval import generate_until
from windlass.evaluation.source import alone
from windlass.evaluation.squad import evaluate_squad
from windlass.evaluation.suites import Suites, precision_of
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.parallel.dist import Ranks
from windlass.parallel.mesh import Mesh
from windlass.parallel.parallelize import parallelize, unwrap
from windlass.recipe.strategies import STRATEGIES, Sizes

pytestmark = pytest.mark.dist

SHAPE = {
    "model__layers": 2,
    "model__heads": 2,
    "model__width": 32,
    "model__context": 64,
    "model__init_std": 0.3,
}
TOKENIZER = byte_tokenizer()


def rows(count: int) -> Rows:
    """Rows of unequal length; the validation set of one of them has nothing that counts at all."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(2, 40, count)
    return Rows(
        [(generator.integers(0, 256, n), generator.random(n) < 0.5) for n in lengths], pad=256
    )


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
SAMPLING = Sampling(
    max_tokens=24, seed=3, stop=frozenset(range(40))
)  # stops soon, and each text elsewhere


def sharded(join: Join, strategy: str) -> tuple[Any, Ranks]:
    settings = recipe(**SHAPE, parallel__strategy=strategy)
    ranks = join(settings)
    model = parallelize(build_model(settings, 257), ranks, settings)
    initialise(unwrap(model), 1)
    return model, ranks


def measure(join: Join, strategy: str) -> dict[str, Any]:
    model, ranks = sharded(join, strategy)
    results = measured(model, ranks)
    ranks.stop()
    return results


def measured(model: Any, ranks: Ranks) -> dict[str, Any]:
    """All that is measured, with counts that no world divides; rank 3 of 4 gets no prompt at all."""
    texts = prompts(7)
    mine = [
        i
        for i in range(7)
        if i % ranks.world == ranks.rank and not (ranks.world == 4 and ranks.rank == 3)
    ]
    continued = generate(model, [texts[i] for i in mine], SAMPLING, ranks, indices=mine, batch=2)
    scored = log_likelihoods(model, [Continuation(texts[i], texts[i + 1]) for i in range(6)], ranks)
    assert continued is not None and scored is not None
    # One text that ends at its first token, while the other ranks go on for long; and of three
    # ranks of four no text at all.
    brief = Sampling(
        max_tokens=24, temperature=0, stop=frozenset(range(257)) if ranks.rank == 0 else frozenset()
    )
    uneven = generate(model, [texts[0]], brief, ranks)
    assert uneven is not None and len(uneven[0]) == (0 if ranks.rank == 0 else 24)
    lone = generate(model, texts[:1] if ranks.rank == ranks.world - 1 else [], SAMPLING, ranks)
    hellaswag = likelihood.evaluate_hellaswag(
        model, ITEMS, likelihood.continuations(ITEMS, TOKENIZER), ranks
    )
    squad = evaluate_squad(model, TOKENIZER, QUESTIONS, ranks, max_tokens=8, batch=2)
    assert hellaswag is not None and squad is not None
    return {
        "loss": [evaluate_loss(model, rows(11), ranks, 2, limit) for limit in (0, 1, 5)],
        "both": evaluate_loss(model, rows(11), ranks, 2, 5, whole=True),
        "texts": dict(zip(mine, continued, strict=True)),
        "sums": [one.sum for one in scored],
        "hellaswag": {k: hellaswag[k] for k in ("acc", "acc_norm", "acc_per_token", "items")},
        "squad": squad[1],
        "lone": lone or None,
        "few": [few(model, ranks, count) for count in (1, 3)],
        "written": generate_until(model, TOKENIZER, ranks, REQUESTS),
    }


def few(model: Any, ranks: Ranks, count: int) -> tuple[Any, ...]:
    """Fewer items than ranks, and an odd number of them."""
    scored, items = (
        log_likelihoods(model, [Continuation([1], [2, i]) for i in range(count)], ranks),
        ITEMS[:count],
    )
    chosen = likelihood.evaluate_hellaswag(
        model, items, likelihood.continuations(items, TOKENIZER), ranks
    )
    assert scored is not None and chosen is not None
    return (
        scored[0].tokens,
        chosen["acc"],
        evaluate_squad(model, TOKENIZER, QUESTIONS[:count], ranks, max_tokens=8)[1],
    )  # type: ignore[index]


def scores_of(ranks: Ranks) -> tuple[Any, Any]:
    model = build_model(recipe(**SHAPE), 257, device="cpu")
    initialise(model, 1)
    loss = evaluate_loss(model, rows(11), ranks, 2)
    scored = log_likelihoods(model, [Continuation([1, 2], [3, i]) for i in range(3)], ranks)
    assert loss is not None and scored is not None
    return (loss["loss"], loss["tokens"]), [(one.sum, one.greedy) for one in scored]


def scores_with_parts_of_sequences(join: Join) -> tuple[Any, Any]:
    with join(recipe(parallel__strategy="ddp")) as ranks:
        ranks.mesh = Mesh(Sizes(cp=2), ranks.rank)
        ranks.mesh.connect(STRATEGIES["ddp"], "cpu", timedelta(seconds=30))
        return scores_of(ranks)


def test_ranks_that_share_sequences_count_them_once() -> None:
    expected = scores_of(alone("cpu"))
    assert run_ranks(scores_with_parts_of_sequences, 2) == [expected, expected]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("strategy", ["full_shard", "ddp"])
def test_all_that_is_measured_is_that_of_one_process(strategy: str, world: int) -> None:
    model = build_model(recipe(**SHAPE), 257, device="cpu")
    initialise(model, 1)
    expected = measured(model, alone("cpu"))
    results = run_ranks(measure, world, strategy)
    for one in results:
        for mine, whole in zip(one["loss"], expected["loss"], strict=True):
            assert (mine["tokens"], mine["samples"]) == (whole["tokens"], whole["samples"])
            assert mine["loss"] == pytest.approx(whole["loss"], rel=1e-6)
            assert mine["perplexity"] == pytest.approx(math.exp(mine["loss"]))
        both = one["both"]
        assert both["loss"] == one["loss"][2]["loss"] and both["full_samples"] == 11, (
            "the bits of the bounded pass"
        )
        assert both["full_loss"] == pytest.approx(expected["loss"][0]["loss"], rel=1e-6)
        assert one["sums"] == pytest.approx(expected["sums"], rel=1e-5)
        assert all(one[name] == expected[name] for name in ("hellaswag", "squad", "few", "written"))
        assert one["texts"].items() <= expected["texts"].items()
    assert [one["lone"] for one in results] == [None] * (world - 1) + [expected["lone"]]
    lengths = {len(text) for text in expected["texts"].values()}
    assert len(lengths) > 2, "texts end at different places"


def stopped(join: Join, poll_on: int, after: int) -> list[Any]:
    model, ranks = sharded(join, "full_shard")

    def poll_of() -> Any:
        asked = iter(range(10**6))
        return lambda: ranks.rank == poll_on and next(asked) >= after

    results = [
        evaluate_loss(model, rows(64), ranks, 2, poll=poll_of()),
        generate(model, prompts(3 + ranks.rank), SAMPLING, ranks, batch=2, poll=poll_of()),
        log_likelihoods(model, [Continuation([1] * 60, [2] * 4)] * 512, ranks, poll=poll_of()),
        evaluate_loss(model, rows(5), ranks, 2, poll=lambda: False),
    ]
    ranks.stop()
    return results


def test_a_stop_signal_on_one_rank_stops_all_after_the_same_pass() -> None:
    for one in run_ranks(stopped, 2, 1, 3):
        assert one[:3] == [None, None, None]
        assert one[3]["samples"] == 5


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
def test_a_saved_model_is_measured_on_a_gpu_in_the_precision_of_its_run(
    trained, changes, gpu, used
):
    assert precision_of(recipe(train__precision=trained), changes, gpu) == used


@pytest.mark.parametrize(
    ("suite", "settings", "planned"),
    [
        ("loss", {}, True),
        ("loss", {"data__format": "chat", "data__source": "x.jsonl"}, False),
        ("own:x", {}, False),
    ],
)
def test_attention_of_cudnn_is_for_passes_of_one_shape(suite, settings, planned):
    """It makes a plan for each shape, which takes longer than the pass."""

    class Model(torch.nn.Module):
        def forward(self, *_: torch.Tensor) -> torch.Tensor:
            seen.append(torch.backends.cuda.cudnn_sdp_enabled())
            return torch.zeros(())

    def own(model: Any) -> dict[str, Any]:
        model()
        return {"score": 1.0}

    seen: list[bool] = []
    suites = Suites(recipe(**settings), TOKENIZER, alone("cpu"), rows(3), own={"own:x": own})
    suites.measure(suite, Model())
    assert set(seen) == {planned} and torch.backends.cuda.cudnn_sdp_enabled()
