"""The current lineage of a run: which commits belong to it, and what a reader or a restart takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from windlass.checkpoint.load import choose, find, open_checkpoint
from windlass.checkpoint.reshard import Slice, State
from windlass.checkpoint.retention import LINEAGE, Lineage, lineage_at, read_lineage, write_lineage
from windlass.checkpoint.save import Saver
from windlass.errors import UserError
from windlass.fileio import Files


def saved(run: Path, *steps: int) -> Path:
    saver = Saver(run / "checkpoints", background=False)
    for step in steps:
        saver.save(step, State({"model/x": Slice(torch.ones(4), (4,))}, {}, 16), {"step": step})
        assert not saver.poll()[0].error
    return run


def at(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def back_to(run: Path, step: int) -> Lineage:
    write_lineage(run, lineage_at(run, at(run, step), step, {}), Files())
    lineage = read_lineage(run)
    assert lineage is not None
    return lineage


def chosen(run: Path, up_to: int | None = None) -> int:
    choice = choose(run, up_to=up_to)
    assert choice is not None
    return choice.step


def test_only_later_commits_or_the_one_it_started_from(tmp_path: Path) -> None:
    run = saved(tmp_path, 3, 6, 9)
    assert chosen(run) == 9
    lineage = back_to(run, 3)
    assert (lineage.checkpoint, lineage.step, lineage.serial) == ("checkpoints/step-00000003", 3, 3)
    assert chosen(run) == 3
    saved(run, 5, 6)
    assert (chosen(run), chosen(run, up_to=5), chosen(run, up_to=4)) == (6, 5, 3)
    assert choose(run, up_to=2) is None


def test_a_reader_gets_the_newest_of_the_lineage_too(tmp_path: Path) -> None:
    """`windlass eval RUN` read the end of a lineage that the run had left."""
    run = saved(tmp_path, 3, 6, 9)
    back_to(run, 3)
    assert find(run).step == 3
    saved(run, 4)
    assert find(run).step == 4
    lines = [{"kind": "eval", "step": step, "loss": 10.0 - step} for step in (3, 4, 6)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert find(f"{run}@best").step == 4, "the checkpoint of step 6 is not the model that has this score"


def test_commits_belong_to_the_lineage_though_newer_ones_were_deleted_by_hand(tmp_path: Path) -> None:
    run = saved(tmp_path, 3, 6, 9)
    back_to(run, 3)
    for step in (6, 9):
        shutil.rmtree(at(run, step))
    saved(run, 4)
    assert open_checkpoint(at(run, 4)).manifest.serial == 4 and chosen(run) == 4


def test_where_all_of_a_lineage_is_damaged_the_one_it_started_from_is_left(tmp_path: Path) -> None:
    run = saved(tmp_path, 3, 6)
    back_to(run, 3)
    saved(run, 4)
    [shard] = at(run, 4).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    choice = choose(run)
    assert choice is not None and (choice.step, choice.damaged) == (3, [at(run, 4)]) and "step 4" in choice.notes[0]
    shutil.rmtree(at(run, 3))
    shutil.rmtree(at(run, 4))
    with pytest.raises(UserError) as error:
        choose(run)
    assert str(at(run, 3)) in str(error.value) and "checkpoint.resume=STEP" in str(error.value)


def test_a_lineage_that_cannot_be_read_is_not_guessed(tmp_path: Path) -> None:
    assert read_lineage(tmp_path) is None
    for text in ("", "[]", '{"version": 9, "checkpoint": "", "step": 0, "serial": 0, "job": {}}', '{"step": -1}'):
        (tmp_path / LINEAGE).write_text(text)
        with pytest.raises(UserError, match=LINEAGE):
            read_lineage(tmp_path)
