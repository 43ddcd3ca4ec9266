"""What all tests share: where the real data lies, and a quiet environment."""

import atexit
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from helpers import write_corpus

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("WANDB_SILENT", "true")
# cuBLAS reads it once, at the process's first product
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# tests run side by side on few cores, and small tensors gain nothing from two
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile(
    "windlass", deadline=None, database=None, derandomize=True, max_examples=50
)
hypothesis.settings.load_profile("windlass")

# A child that collects garbage of its parent may join threads that it does not have, and abort.
os.register_at_fork(after_in_child=gc.freeze)

# under nohup or in the background of a shell they are ignored, by children too
for _signal, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, _handler)

REPOSITORY = Path(__file__).parent.parent


FOLDERS = ["cluster", "faults", "e2e", "dist", "parity", "gpu", "unit"]
"""The order of the folders: the longest files first, so that no worker ends with a long one alone.
"""


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs in `make test`: a fork cannot use CUDA after its parent has."""
    if "not gpu" in config.option.markexpr and Path("/dev/nvidiactl").exists():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FOLDERS.index(item.path.parent.name))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a worker a whole file, whose fixtures are then set up once, and one worker all of
    `cluster`; tests on a GPU one at a time.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "cluster" if "/cluster/" in path else nodeid if "/gpu/" in path else path

    config.option.loadscopereorder = False  # keep the order of the folders
    return Files(config, log)


def real_data() -> Path:
    """The folder of real data for tests, whether it exists or not."""
    return Path(os.environ.get("WINDLASS_TEST_DATA", REPOSITORY.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def data_files() -> Path:
    """Real data (tiny Shakespeare, SQuAD, HellaSwag, ...); without it the test is skipped."""
    folder = real_data()
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set WINDLASS_TEST_DATA")
    return folder


@pytest.fixture(autouse=True)
def no_watchdog_outlives_its_test() -> Iterator[None]:
    """Cancel the timers with which a failed rank ends its process: here that process is pytest."""
    yield
    faulthandler.cancel_dump_traceback_later()
    if ranks := sys.modules.get("windlass.parallel.ranks"):
        atexit.unregister(ranks.exit_now)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Call `windlass WORDS` here, which ends with `code`: gives standard output and error."""
    from windlass.cli import main

    def run(*words: object, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        output, errors = capsys.readouterr()
        assert (ended.value.code or 0) == code, errors
        return output, errors

    return run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text file that every checkout can make."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words.txt")
