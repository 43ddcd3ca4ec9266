"""The step on torch's meta device, where no tensor has a value: whatever reads one raises an error.

On a GPU a read (`item`, a boolean index, a copy to the host) makes the host wait, which only a log
may do. The tests in `tests/gpu` ask CUDA itself.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bare_trainer import bare_trainer
from windlass.data.batch import Batch
from windlass.data.loader import MicroBatch
from windlass.model.gpt import GPT
from windlass.model.size import CHUNK_BYTES
from windlass.parallel.env import DistEnv
from windlass.parallel.parallelize import checkpoint_activations
from windlass.parallel.ranks import Ranks
from windlass.recipe import Recipe
from windlass.training import trainer as training

META = torch.device("meta")
SHAPES: list[dict[str, Any]] = [
    {"activation": "gelu_tanh", "dropout": 0.1},
    {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "kv_heads": 2,
        "qk_norm": True,
        "logit_cap": 5.0,
    },
]


def batch(length: int) -> Any:
    rows = torch.zeros(2, length, dtype=torch.int64, device=META)
    micro = [MicroBatch(k, Batch(rows, rows)) for k in range(2)]
    return SimpleNamespace(micro=micro, step=1, valid_tokens=8, unpadded_tokens=8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("precision", "recompute", "chunked"), [("fp32", "full", False), ("fp16", "none", True)]
)
def test_a_step_reads_no_value(monkeypatch, shape, precision, recompute, chunked):
    monkeypatch.setattr(training, "autocast", lambda *_: nullcontext())  # the meta device has none
    if chunked:
        monkeypatch.setitem(CHUNK_BYTES, "cuda", 4 * 300 * 10)
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
        monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    size = {"layers": 2, "heads": 4, "width": 32, "context": 16, "vocab": 300}
    recipe = Recipe.model_validate(
        {"model": {**size, **shape}, "train": {"precision": precision, "grad_clip": 0.5}}
    )
    with META:
        model = GPT(recipe.model, 300)
    checkpoint_activations(model.blocks, recompute)
    trainer = bare_trainer(model, recipe, Ranks(DistEnv(), META), deferred=True)
    updates = list[Any]()
    update = SimpleNamespace(param_groups=[], zero_grad=trainer.optimizer.zero_grad, found_inf=None)
    # torch's fused optimizers take it as a tensor
    update.step = lambda: updates.append(update.found_inf)
    trainer.optimizer = update  # type: ignore[assignment]
    for length in (16, 9):
        result = trainer.step(batch(length), 0.5)
        assert result.loss.device == result.grad_norm.device == META
    assert [bad.device for bad in updates] == [META, META]
    with pytest.raises(RuntimeError):
        result.loss.item()
