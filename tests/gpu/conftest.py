"""The device of the tests in this folder: CUDA, or with WINDLASS_TEST_DEVICE=cpu the CPU (to check
the tests themselves).
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DEVICE = os.environ.get("WINDLASS_TEST_DEVICE", "cuda")
SIZES = {
    "cuda": "model.layers=4 model.width=256 model.context=256 train.global_batch=32",
    "cpu": "model.layers=2 model.width=32 model.context=32 train.global_batch=8 train.threads=1",
}
SETTINGS = (
    "model.heads=4 train.steps=8 eval.every=0 eval.sample_every=0 checkpoint.every=0 "
    "telemetry.every=1 train.deterministic=true optim.schedule.warmup=2 data.max_tokens=400_000"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of a driver or of another torch do not fail a test here; pytest lists them at the
    end.
    """
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(180 if DEVICE == "cuda" else 900))


@pytest.fixture(autouse=True)
def device() -> Iterator[str]:
    """`cuda` or `cpu`; afterwards nothing of the test is left on the device."""
    torch = pytest.importorskip("torch")
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    yield DEVICE
    torch.use_deterministic_algorithms(False)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()


@pytest.fixture
def cuda(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs CUDA itself")


@pytest.fixture
def computes(device: str) -> bool:
    """Whether kernels do what they should; those of a stub of CUDA do nothing."""
    import torch

    return torch.ones(1, device=device).item() == 1


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One data directory for all recipes of `words`: it is prepared once."""
    return tmp_path_factory.mktemp("prepared") / "data"


@pytest.fixture
def words(tmp_path: Path, data_dir: Path, device: str) -> Callable[..., list[str]]:
    """`words(name, *settings)`: what follows `windlass train` for a small run in `tmp_path / name`."""

    def build(name: str, *settings: str) -> list[str]:
        where = (f"run.dir='{tmp_path / name}'", f"data.dir='{data_dir}'")
        fixed = f"{SIZES[device]} {SETTINGS} parallel.device={device}".split()
        return ["quickstart", *fixed, *where, *settings]

    return build


@pytest.fixture
def recipe(words: Callable[..., list[str]]) -> Callable[..., Any]:
    """`recipe(name, *settings)`: the same as a recipe."""
    from windlass.recipe import Recipe

    def build(name: str, *settings: str) -> Any:
        preset, *overrides = words(name, *settings)
        return Recipe.load(preset, overrides)

    return build
