"""A directory that one of two ranks does not see; tests/cluster/test_two_hosts.py has two hosts."""

from pathlib import Path
from unittest import mock

import pytest
from harness import Join, recipe, run_ranks

from helpers import refused
from windlass.training.directory import check_shared

pytestmark = pytest.mark.dist


def check(join: Join, run: Path, data: Path, hidden: Path) -> None:
    """`check_shared` on every rank, of which rank 1 does not see what is below `hidden`."""
    exists = Path.exists

    def visible(path: Path) -> bool:
        return exists(path) and not (join.rank == 1 and path.is_relative_to(hidden))

    with join(recipe()) as ranks, mock.patch.object(Path, "exists", visible):
        check_shared(ranks, run, [data])


def rejected(join: Join, key: str, folder: Path) -> None:
    with refused(f"{key}: {folder / key}", "(rank 1)", f"{key}=PATH"):
        check(join, folder / "run.dir", folder / "data.dir" / "text", folder / key)


@pytest.mark.parametrize("key", ["run.dir", "data.dir"])
def test_a_directory_that_one_rank_does_not_see_is_one_message(tmp_path, key):
    """Nothing is left behind, also if all ranks see all."""
    for name in ("run.dir", "data.dir"):
        (tmp_path / name).mkdir()
    run_ranks(rejected, 2, key, tmp_path)
    run_ranks(check, 2, tmp_path / "run.dir", tmp_path / "data.dir" / "text", tmp_path / "none")
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["data.dir", "run.dir"]
