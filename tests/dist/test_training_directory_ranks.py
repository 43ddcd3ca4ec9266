"""A directory that one of two ranks does not see; tests/cluster/test_two_hosts.py has two hosts."""

from pathlib import Path
from unittest import mock

import pytest
from harness import Join, recipe, run_ranks

from helpers import refused
from windlass.training.directory import check_same_data, check_shared

pytestmark = pytest.mark.dist


def check(join: Join, run: Path, hidden: Path) -> None:
    """`check_shared` on every rank, of which rank 1 does not see what is below `hidden`."""
    exists = Path.exists

    def visible(path: Path) -> bool:
        return exists(path) and not (join.rank == 1 and path.is_relative_to(hidden))

    with join(recipe()) as ranks, mock.patch.object(Path, "exists", visible):
        check_shared(ranks, run)


def rejected(join: Join, run: Path) -> None:
    with refused(f"run.dir: {run}", "(rank 1)", "run.dir=PATH"):
        check(join, run, run.parent)


def test_a_directory_that_one_rank_does_not_see_is_one_message(tmp_path):
    """Nothing is left behind, also if all ranks see all."""
    run_ranks(rejected, 2, tmp_path / "run")
    run_ranks(check, 2, tmp_path / "run", tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def other_data(join: Join) -> None:
    with refused("rank 1 has other data than rank 0", "data.dir"), join(recipe()) as ranks:
        check_same_data(ranks, f"copy-{join.rank}")


def test_hosts_with_other_data_are_rejected():
    run_ranks(other_data, 2)
