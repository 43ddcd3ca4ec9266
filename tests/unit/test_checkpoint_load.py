"""Which checkpoint a reader or a restart takes, the current lineage of a run, and `windlass
checkpoints`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import kept, refused
from windlass.checkpoint.choose import (
    Lineage,
    choose_checkpoint,
    find_checkpoint,
    lineage_at,
    read_lineage,
    write_lineage,
)
from windlass.checkpoint.listing import list_checkpoints
from windlass.checkpoint.save import Writer
from windlass.checkpoint.state_dict import shard_of
from windlass.errors import UserError
from windlass.fileio import Files
from windlass.recipe import Recipe
from windlass.recipe.layers import LINEAGE
from windlass.recipe.settings import CheckpointSettings


def saved(run: Path, *steps: int, **how: Any) -> Path:
    """Save steps one after the other, with further arguments of `Writer` in `how`."""
    writer = Writer(run / "checkpoints", **how)
    for step in steps:
        writer.write(step, shard_of({"model/x": torch.ones(50)}), {"step": step})
        assert not writer.wait()[0].error
    return run


def at(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def damage(checkpoint: Path) -> None:
    [shard] = checkpoint.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 4
    shard.write_bytes(data)


def evaluated(run: Path, losses: dict[int, float], *lines: dict[str, Any]) -> None:
    """Write a ledger with the loss of each step, and further lines."""
    losses_of = ({"kind": "eval", "step": step, "loss": loss} for step, loss in losses.items())
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, (*lines, *losses_of))) + "\n")


def test_a_damaged_checkpoint_takes_no_place_of_a_good_one(tmp_path):
    run = saved(tmp_path / "run", 5, 10)
    damage(at(run, 10))
    choice = choose_checkpoint(run)
    assert choice is not None and choice.step == 5
    settings, damaged = CheckpointSettings(keep_last=2), {one.serial for one in choice.passed_over}
    for step, left in ((15, [5, 10, 15]), (20, [10, 15, 20])):
        saved(run, step, settings=settings, damaged=damaged)
        assert sorted((run / "checkpoints").iterdir()) == [at(run, one) for one in left]


def back_to(run: Path, step: int) -> Lineage:
    write_lineage(run, lineage_at(run, at(run, step), step, {}), Files())
    lineage = read_lineage(run)
    assert lineage is not None
    return lineage


def chosen(run: Path, resume: str = "latest", **options: Any) -> int:
    choice = choose_checkpoint(run, resume, **options)
    assert choice is not None
    return choice.step


def test_what_resume_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    assert choose_checkpoint(run) is None
    saved(run, 5, 10, 20, 15)
    scores = {"kind": "eval", "suite": "hellaswag"}
    scores_of = ({**scores, "step": step, "acc": acc} for step, acc in ((5, 0.2), (10, 0.9)))
    evaluated(run, {5: 1.0, 10: 2.0, 20: float("nan")}, *scores_of)
    assert chosen(run) == 15, "the newest commit, not the highest step"
    assert chosen(run, "best") == 5 and chosen(run, "best", measure="hellaswag.acc") == 10
    assert chosen(run, "5") == 5 and chosen(run, up_to=12) == 10
    with refused("5, 10, 15, 20"):
        choose_checkpoint(run, "7")
    for source, step in ((run, 15), (f"{run}@5", 5), (f"{run}@best", 5), (at(run, 10), 10)):
        assert find_checkpoint(source).step == step
    for word in ("never", "bset", "rank-00000", ""):
        with refused("RUN@STEP", "RUN@best", "RUN@latest"):
            find_checkpoint(f"{run}@{word}")
    assert find_checkpoint(f"{run}@latest").step == 15
    for missing in (tmp_path / "nothing", f"{run}@6"):
        with pytest.raises(UserError):
            find_checkpoint(missing)
    monkeypatch.setenv("HOME", str(run.parent))
    assert find_checkpoint(f"~/{run.name}@15").step == 15


# -- lineage


@pytest.mark.parametrize("deleted", [(), (6, 9)], ids=["", "newer ones deleted by hand"])
def test_only_later_commits_or_the_one_it_started_from(tmp_path, deleted):
    run = saved(tmp_path, 3, 6, 9)
    lineage = back_to(run, 3)
    assert (lineage.checkpoint, lineage.step, lineage.serial) == ("checkpoints/step-00000003", 3, 3)
    assert chosen(run) == find_checkpoint(run).step == 3
    for step in deleted:
        shutil.rmtree(at(run, step))
    saved(run, 4, 5)
    evaluated(run, {3: 7.0, 4: 6.0, 6: 4.0})
    assert find_checkpoint(f"{run}@best").step == 4, (
        "the checkpoint of step 6 is not the model that has this score"
    )
    saved(run, 6)
    assert (chosen(run), chosen(run, up_to=5), chosen(run, up_to=3)) == (6, 5, 3)
    assert choose_checkpoint(run, up_to=2) is None


def test_where_all_of_a_lineage_is_damaged_the_one_it_started_from_is_left(tmp_path: Path) -> None:
    run = saved(tmp_path, 3, 6)
    back_to(run, 3)
    damage(at(saved(run, 4), 4))
    choice = choose_checkpoint(run)
    assert choice is not None
    assert (choice.step, [c.path for c in choice.passed_over]) == (3, [at(run, 4)])
    assert "step 4" in choice.notes[0]
    shutil.rmtree(at(run, 3))
    shutil.rmtree(at(run, 4))
    with refused(str(at(run, 3)), "checkpoint.resume=STEP"):
        choose_checkpoint(run)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 9, "step": 0}', '{"step": -1}'])
def test_a_lineage_that_cannot_be_read_is_not_guessed(tmp_path: Path, text: str) -> None:
    assert read_lineage(tmp_path) is None
    (tmp_path / LINEAGE).write_text(text)
    with pytest.raises(UserError, match=LINEAGE):
        read_lineage(tmp_path)


# -- `windlass checkpoints`


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = saved(tmp_path / "run", 10, 20, 30)
    keep = {"keep_every": 20, "keep_last": 1}
    recipe = Recipe.load("quickstart", {"checkpoint": keep, "train.global_batch": 4})
    (run / "recipe.toml").write_text(recipe.toml(), encoding="utf-8")
    started = {"kind": "event", "event": "started", "step": 0}
    evaluated(run, {10: 2.0, 20: 3.0, 25: 1.0}, started | {"steps": 40, "samples_per_epoch": 100})
    return run


def test_the_list_says_why_each_is_kept_and_verify_what_is_damaged(run: Path, call: Any) -> None:
    assert kept(run) == {10: ["best"], 20: ["every"], 30: ["last"]}
    damage(at(run, 20))
    lines = call("checkpoints", run)[0].splitlines()
    assert lines[0].split() == "step saved (UTC) size loss kept because state".split()
    assert [line.split()[0] for line in lines[1:4]] == ["10", "20", "30"]
    assert all(word in lines[1] for word in ("2.0000", "best", "whole"))
    assert "--verify" in lines[4]
    text, _ = call("checkpoints", run, "--verify", code=1)
    assert "BAD" in text and text.count("every byte good") == 2
    rows = json.loads(call("checkpoints", run, "--verify", "--json", code=1)[0])["checkpoints"]
    assert [bool(row["problem"]) for row in rows] == [False, True, False]
    assert rows[2]["bytes"] > 0 and rows[2]["kept"] == ["last"]
    assert rows[0]["scores"] == {"loss": 2.0}
    assert rows[2]["scores"] == {"loss": None}, "of step 30 there is no evaluation"


def test_temporary_directories_do_not_count(run: Path, call: Any) -> None:
    (at(run, 30) / "manifest.sha256").unlink()
    (run / "checkpoints" / ".saving-00000040-a-1").mkdir()
    listed = list_checkpoints(run)
    assert [row["step"] for row in listed.checkpoints] == [10, 20]
    assert "2 checkpoints" in call("checkpoints", run)[0]
    call("checkpoints", run.parent / "nothing", code=2)
    shutil.rmtree(run / "checkpoints")
    assert "no checkpoint yet" in call("checkpoints", run)[0]
