"""The cluster, a tiny corpus, and what two local ranks make of it: the reference for every other
launcher.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_cluster
from launching import DDP, TRAIN, launched

import helpers
from windlass.run import Run


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm_cluster.Cluster]:
    """Two nodes of SLURM on this machine; skipped if the programs are not installed."""
    if missing := slurm_cluster.missing():
        programs = ", ".join(missing)
        pytest.skip(f"no {programs} on this machine (Debian's packages slurm-wlm and munge)")
    with slurm_cluster.cluster() as made:
        yield made


@pytest.fixture(scope="session")
def settings(tmp_path_factory) -> Callable[..., list[str]]:
    """The overrides of a run of 12 steps in the given directory."""
    folder = tmp_path_factory.mktemp("corpus")
    text = helpers.write_corpus(folder / "text.txt", words=400)

    def overrides(run: Path | None, **more: object) -> list[str]:
        values = helpers.TINY | {
            "data.source": str(text),
            "data.dir": str(folder / "data"),
            "data.tokenizer": "char",
            "model.vocab": 0,
            "model.width": 16,
            "model.context": 16,
            "checkpoint.every": 6,
            "eval.every": 6,
            "parallel.timeout_seconds": 60,
            "parallel.startup_timeout_seconds": 60,
            "optim.lr": 3e-3,
        }
        values |= {"run.dir": str(run)} if run else {}
        return helpers.overrides(values | more)

    return overrides


@pytest.fixture(scope="session")
def two_local_ranks(settings, tmp_path_factory) -> Run:
    """The same recipe, started with --world 2."""
    run = tmp_path_factory.mktemp("reference") / "run"
    launched([*TRAIN, "--world", "2", *settings(run, **DDP)])
    return Run(run)
