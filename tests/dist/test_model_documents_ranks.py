"""Rows of several documents in every layout against one process, in float64, to 1e-9.

`tests/parity/test_model_documents.py` compares one process with the documents one by one.
"""

import equivalence
import numpy as np
import pytest
from equivalence import BATCH, CONTEXT, STEPS, VOCAB, distance, settings, trained
from harness import run_ranks

import windlass.model.documents
from windlass.data.samples import Batch, positions_of

ROPE = {
    "model__position": "rope",
    "model__norm": "rmsnorm",
    "model__heads": 4,
    "model__kv_heads": 2,
    "model__qk_norm": True,
}
LEARNED = {"model__heads": 4, "model__kv_heads": 4}
DROPOUT = {
    "model__dropout": 0.2,
    "train__micro_batch": 4,
    "parallel__activation_checkpointing": "selective",
}
LAYOUTS = [
    {"tensor": 2},
    {"tensor": 2, "sequence": False},
    {"context": 2},  # heads are exchanged
    {"context": 4},  # with two heads of keys: keys are gathered
    {"tensor": 2, "context": 2},
    {"pipeline": 2},
    {},
]


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
        rows, documents = self.tokens[indices], self.documents[indices]
        return Batch(rows[:, :-1], rows[:, 1:], positions_of(documents), documents)


def outcomes(join, recipes, masked):
    equivalence.rows = Documents
    windlass.model.documents.MASKED_TOKENS = CONTEXT if masked else 0
    return [trained(join, recipe) for recipe in recipes]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("parts", "masked", "more"),
    [(ROPE, False, {}), pytest.param(LEARNED, True, DROPOUT, marks=pytest.mark.full)],
    ids=["one by one", "by a mask, with dropout, recomputed"],
)
def test_documents_in_layouts(parts, masked, more):
    [[wanted]] = run_ranks(outcomes, 1, [settings("fp64", "single", **parts | more)], masked)
    recipes = []
    for layout in LAYOUTS:
        ranks = int(np.prod([n for n in layout.values() if not isinstance(n, bool)]))
        keys = {f"parallel__{key}": value for key, value in layout.items()}
        kind = "ddp" if "pipeline" in layout else "full_shard"
        recipes.append(settings("fp64", kind, 4 // ranks, 2, **parts | keys | more))
    for per_rank in run_ranks(outcomes, 4, recipes, masked, timeout=150):
        for layout, outcome in zip(LAYOUTS, per_rank, strict=True):
            losses, norms, parameters = outcome
            own = {n: p for n, p in wanted[2].items() if n in parameters}  # of a pipeline's rank
            assert len(own) == len(wanted[2]) or "pipeline" in layout
            assert max(distance((losses, norms, parameters), (*wanted[:2], own))) < 1e-9, layout
