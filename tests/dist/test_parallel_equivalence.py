"""Every strategy, layout, world and accumulation is one process with the whole batch, in float64,
to 1e-9.

The reference shares nothing with the trained path but the network itself: one batch, one backward
pass, torch's own AdamW and clipping. This also excludes errors that other trainers have had, here
by their issues at pytorch/torchtitan (t), pytorch/pytorch (p), NVIDIA/Megatron-LM (m),
NVIDIA/TransformerEngine (e) and NVIDIA-NeMo/RL (n): a loss halved by tp x cp (t3280, t3329) or
changed by tp (t1750); a partial gradient taken for a whole one (t3412, p129355); a tie lost on the
meta device (t2252); replicated norms counted tp times (e715, n3788, p159856); unmasked labels on
one rank of cp alone (m7452, finding 9).
"""

import math
from typing import Any

import equivalence
import numpy as np
import pytest
import torch
from equivalence import (
    BATCH,
    CONTEXT,
    STEPS,
    VOCAB,
    check,
    distance,
    logits_of,
    reference,
    rows,
    settings,
    trained,
)
from harness import run_ranks

from windlass.data.batch import Batch, positions_of

OLD = {"model__heads": 4}
NEW = {
    "model__position": "rope",
    "model__norm": "rmsnorm",
    "model__activation": "swiglu",
    "model__ff_width": 24,
    "model__heads": 4,
    "model__kv_heads": 2,
    "model__qk_norm": True,
    "model__tie_head": False,
    "model__logit_cap": 5.0,
    "model__attn_bias": False,
}
MUP = {
    "model__mup_base_width": 4,
    "model__heads": 4,
    "model__qk_norm": True,
    "model__tie_head": False,
    "train__average": 0.6,
}
Cell = dict[str, Any]


def on(strategy: str = "auto", accumulation: int = 2, **more: Any) -> Cell:
    return {"strategy": strategy, "accumulation": accumulation, **more}


def in_stages(strategy: str, pipeline: int = 2, **more: Any) -> Cell:
    return on(strategy, 4, pipeline=pipeline, model__layers=5, **more)


STRATEGIES = ("ddp", "shard_optim", "full_shard", "shard_grad_op")
EVERY = [on(strategy) for strategy in STRATEGIES]
DIVIDED_BY = [{"tensor": 2}, {"context": 2}]
DIVIDED = [on(**how) for how in DIVIDED_BY]
STAGES = {
    2: [in_stages("ddp"), in_stages("full_shard")],
    4: [
        in_stages("shard_optim"),
        in_stages("hybrid_shard"),
        in_stages("ddp", pipeline=4),
        in_stages("shard_optim", tensor=2),
        in_stages("full_shard", context=2),
    ],
}
TRAININGS: dict[str, tuple[dict[str, Any], dict[int, list[Cell]]]] = {
    "plain": (
        {},
        {
            2: [on(strategy, number) for strategy in STRATEGIES for number in (1, 4)],
            4: [on("full_shard"), on("hybrid_shard")],
        },
    ),
    "settings of parallel": (
        {},
        {
            2: [
                on("full_shard", offload=True),
                on("full_shard", reduce_each_micro_batch=False),
                on("shard_grad_op", reduce_each_micro_batch=True),
                on("full_shard", forward_prefetch=2, backward_prefetch=2),
                on("hybrid_shard", shard_size=2),
                on("ddp", activation_checkpointing="full"),
                on("full_shard", activation_checkpointing="full"),
                on("full_shard", activation_checkpointing="selective"),
            ]
        },
    ),
    "frozen": ({"model__freeze": ["blocks.0.*", "norm.*"]}, {2: EVERY}),
    # FSDP2 shards the head as a unit of one module
    "untied, no norm": ({"model__tie_head": False, "model__final_norm": False}, {2: EVERY}),
    "torch.optim": (
        {"optim__kind": "torch.optim.AdamW", "optim__options": {"betas": [0.9, 0.95]}},
        {2: [*EVERY, on(tensor=2)]},
    ),
    "muP, averaged": (MUP, {2: [*EVERY, on(tensor=2), on(context=2), on(pipeline=2)]}),
    "old": (
        OLD,
        {
            2: DIVIDED,
            4: [
                on("shard_optim", tensor=2),
                on("full_shard", context=2),
                on(tensor=4),
            ],
        },
    ),
    "new": (
        NEW,
        {
            2: DIVIDED,
            4: [
                on("full_shard", tensor=2),
                on("ddp", context=2),
                on(context=4),
                on(tensor=2, context=2),
            ],
        },
    ),
    "old stages": (OLD, STAGES),
    "new stages": (NEW, {4: STAGES[4][:1]}),
}


DROPOUT = {"model__dropout": 0.2, "train__micro_batch": 4}
ONE_ROW = {"train__global_batch": 8, "train__micro_batch": 1, "train__grad_clip": 0.0}
FOUR = [{"context": 4}, {"tensor": 2, "context": 2}, {"tensor": 2}]


def recomputed(how: str) -> list[Cell]:
    cells = [*(on("ddp", **layout) for layout in FOUR), on("full_shard", pipeline=2)]
    return [cell | {"activation_checkpointing": how} for cell in cells]


# What a plain loop does not have: our dropout and our optimizers.
BESIDE_ONE_PROCESS: dict[str, tuple[dict[str, Any], dict[int, list[Cell]]]] = {
    # masks are of attention by heads and by gathered keys, with padding at the end of the parts
    "dropout": (OLD | DROPOUT, {4: [on("ddp", tensor=4), *recomputed("full")]}),
    "dropout, new": (NEW | DROPOUT, {4: recomputed("selective")}),
    # rows of 1 to 11 tokens, fewer than ranks and no multiple of them; in every context layout some
    # rank has no unmasked label, and four rows of eight have none at all
    "one row": (NEW | ONE_ROW, {4: [on("full_shard", tensor=2, context=2)]}),
    "one row, other": (NEW | ONE_ROW, {4: [on("full_shard", **layout) for layout in FOUR]}),
    "muon": (
        NEW | {"optim__kind": "muon"},
        {4: [on(strategy, tensor=2) for strategy in ("shard_optim", "full_shard")]},
    ),
}
# More than one data rank in each layout.
SLOW = {
    f"{strategy}, {name}": (
        model,
        {
            4: [
                *(on(strategy, n, **how) for how in (*DIVIDED_BY, {}) for n in (1, 2, 4)),
                in_stages(strategy),
            ]
        },
    )
    for strategy in (*STRATEGIES, "hybrid_shard")
    for name, model in (("old", OLD), ("new", NEW))
}
ALL = TRAININGS | BESIDE_ONE_PROCESS | SLOW
NAMES = [(name, world) for name, (_, worlds) in ALL.items() for world in worlds]
NAMES_SLOW = (*SLOW, "dropout, new", "one row, other")


def check_cells(world: int, model: dict[str, Any], cells: list[Cell], wanted: Any = None) -> None:
    """Cells with equal layers have one reference, a plain loop unless `wanted` is given."""
    for layers in {cell.get("model__layers", 2) for cell in cells}:
        own = [cell for cell in cells if cell.get("model__layers", 2) == layers]
        recipes = [settings(world=world, **model | cell) for cell in own]
        check(world, recipes, wanted or reference(**model | {"model__layers": layers}))


@pytest.fixture(scope="module")
def plain():
    return reference()


@pytest.mark.parametrize("accumulation", [1, 4])
def test_one_process_in_float64(plain, accumulation):
    check(1, [settings("fp64", "single", 1, accumulation)], plain)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "world"),
    [pytest.param(*one, marks=[pytest.mark.full] * (one[0] in NAMES_SLOW)) for one in NAMES],
)
def test_trainings_in_float64(name, world):
    model, worlds = ALL[name]
    wanted = None
    if name in BESIDE_ONE_PROCESS:
        [wanted] = run_ranks(trained, 1, settings("fp64", "single", **model))
    check_cells(world, model, worlds[world], wanted)


@pytest.mark.dist
@pytest.mark.parametrize("model", [OLD, NEW], ids=["old", "new"])
def test_logits_and_a_cache_are_those_of_one_process(model):
    """The tokens do not divide by the ranks, and the vocabulary of 37 does not either."""
    [[(wanted, cached)]] = run_ranks(logits_of, 1, [settings("fp64", "single", **model)])
    recipes = [settings("fp64", "full_shard", **model, **layout) for layout in FOUR]
    for per_rank in run_ranks(logits_of, 4, recipes):
        for whole, parts_of_it in per_rank:
            torch.testing.assert_close(whole, wanted, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(parts_of_it, cached, rtol=1e-9, atol=1e-12)


def test_rows_are_shorter_than_ranks_and_longer():
    lengths = {rows().read(np.array([row]))[0].shape[1] for row in range(BATCH)}
    assert min(lengths) < 4 < max(lengths)


class Documents:
    """Rows of 1 to 4 documents, some of a single token."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.tokens = draw.integers(0, VOCAB, (STEPS * BATCH, CONTEXT + 1))
        begins = draw.random((STEPS * BATCH, CONTEXT)) < 0.25
        begins[:, 0] = False
        self.documents = begins.cumsum(axis=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        tokens, documents = self.tokens[indices], self.documents[indices]
        return Batch(tokens[:, :-1], tokens[:, 1:], positions_of(documents), documents)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("model", "shortest"),
    [
        (NEW, 0),
        pytest.param(
            OLD | DROPOUT | {"parallel__activation_checkpointing": "selective"},
            CONTEXT,
            marks=pytest.mark.full,
        ),
    ],
    ids=["one by one", "by a mask, with dropout, recomputed"],
)
def test_rows_of_several_documents(model, shortest, monkeypatch):
    """With heads exchanged (context 2) and keys gathered (context 4).

    tests/parity/test_model_documents.py compares one process with the documents one by one.
    """
    monkeypatch.setattr(equivalence, "rows", Documents)
    monkeypatch.setattr("windlass.model.attention.MASKED_TOKENS", shortest)
    [wanted] = run_ranks(trained, 1, settings("fp64", "single", **model))
    cells = [on("full_shard", **FOUR[1]), on("full_shard", context=2), on("ddp", pipeline=2)]
    check_cells(4, model, cells, wanted)


@pytest.mark.dist
def test_a_wrong_divisor_is_seen(plain):
    for outcome in run_ranks(trained, 2, settings("fp64", "ddp", 2, 2), 1.1):
        assert distance(outcome, plain)[0] > 1e-3
    assert math.isclose(plain[0][0], math.log(VOCAB), rel_tol=0.02)
