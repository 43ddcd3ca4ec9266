"""The cluster, a tiny corpus, and what two local ranks make of it: the reference for every other launcher."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_cluster
from launching import DDP, TRAIN, launched

from windlass.run import Run


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm_cluster.Cluster]:
    """Two nodes of SLURM on this machine; skipped where the programs are not installed."""
    if missing := slurm_cluster.missing():
        pytest.skip(f"no {', '.join(missing)} on this machine (Debian's packages slurm-wlm and munge)")
    with slurm_cluster.cluster() as made:
        yield made


@pytest.fixture(scope="session")
def settings(tmp_path_factory) -> Callable[..., list[str]]:
    """The overrides of a run of 12 steps in the given directory, over a text of made-up words."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefgh") for _ in range(draw.randint(2, 6))) for _ in range(400)]
    (folder / "text.txt").write_text(" ".join(words)[:787])

    def overrides(run: Path | None, **more: object) -> list[str]:
        values = {
            "data.source": f"'{folder / 'text.txt'}'", "data.dir": f"'{folder / 'data'}'", "data.tokenizer": "char",
            "model.vocab": 0, "model.layers": 2, "model.heads": 2, "model.width": 16, "model.context": 16,
            "train.steps": 12, "train.global_batch": 8, "checkpoint.every": 6, "eval.every": 6, "eval.sample_every": 0,
            "telemetry.every": 1, "parallel.timeout_seconds": 60, "parallel.startup_timeout_seconds": 60,
        }  # fmt: skip
        values |= {"run.dir": f"'{run}'"} if run else {}
        return [f"{key}={value}" for key, value in (values | more).items()]

    return overrides


@pytest.fixture(scope="session")
def two_local_ranks(settings, tmp_path_factory) -> Run:
    """The same recipe, started with --world 2."""
    place = tmp_path_factory.mktemp("reference") / "run"
    done = launched([*TRAIN, "--world", "2", *settings(place, **DDP)])
    assert done.returncode == 0, done.stdout
    return Run(place)


@pytest.fixture
def same_as_two_local_ranks(two_local_ranks) -> Callable[[Path], None]:
    """The check of another run of that recipe: two ranks, every step, and the losses equal to rounding."""

    def check(place: Path) -> None:
        run = Run(place)
        assert run.state == "finished"
        assert set(worlds(run)) == set(worlds(two_local_ranks)) == {2}
        for kind in ("train", "eval"):
            mine, theirs = run.lines(kind), two_local_ranks.lines(kind)
            assert [(x["step"], x["tokens"]) for x in mine] == [(x["step"], x["tokens"]) for x in theirs]
            assert [x["loss"] for x in mine] == pytest.approx([x["loss"] for x in theirs], rel=1e-6)
        assert [x["step"] for x in run.lines("train")] == list(range(1, 13))

    return check


def worlds(run: Run) -> list[int]:
    """The number of ranks of each attempt."""
    return [event["world"] for event in run.events if event["event"] in ("started", "resumed")]
