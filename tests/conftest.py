"""What all tests share: where the real data lies, and a quiet environment."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from helpers import write_corpus

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # cuBLAS reads it once, at the process's first product
for _key in ("OMP_NUM_THREADS",):
    os.environ.setdefault(
        _key, "1"
    )  # tests run side by side on few cores, and small tensors gain nothing from two

hypothesis.settings.register_profile(
    "windlass", deadline=None, database=None, derandomize=True, max_examples=50
)
hypothesis.settings.load_profile("windlass")

for _signal in (
    signal.SIGINT,
    signal.SIGHUP,
):  # under nohup or in the background of a shell they are ignored, by children too
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(
            _signal, signal.default_int_handler if _signal == signal.SIGINT else signal.SIG_DFL
        )

REPOSITORY = Path(__file__).parent.parent


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under xdist one worker runs a whole file, and one all tests of the SLURM cluster, which exists once."""
    for item in items:
        folder = item.path.parent.name
        item.add_marker(
            pytest.mark.xdist_group("cluster" if folder == "cluster" else item.path.name)
        )


def real_data() -> Path:
    """The folder of real data for tests, whether it exists or not."""
    return Path(os.environ.get("WINDLASS_TEST_DATA", REPOSITORY.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def data_files() -> Path:
    """Real data (tiny Shakespeare, SQuAD, HellaSwag, ...); the test is skipped where there is none."""
    folder = real_data()
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set WINDLASS_TEST_DATA")
    return folder


@pytest.fixture(autouse=True)
def no_watchdog_outlives_its_test() -> Iterator[None]:
    """A rank that fails sees to it that its process ends, soon and as failed; a test that fails one on purpose is no rank."""
    yield
    faulthandler.cancel_dump_traceback_later()
    if ranks := sys.modules.get("windlass.parallel.dist"):
        atexit.unregister(ranks.exit_now)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text file that every checkout can make."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words.txt")
