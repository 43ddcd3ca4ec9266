"""`windlass checkpoints`: the list, what is bad in it, the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from helpers import kept
from windlass.checkpoint.load import list_checkpoints
from windlass.checkpoint.reshard import Slice, State
from windlass.checkpoint.save import Saver
from windlass.cli.checkpoints import checkpoints
from windlass.errors import UserError
from windlass.recipe import Recipe


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three checkpoints, without the training."""
    place = tmp_path / "run"
    place.mkdir()
    recipe = Recipe.load("quickstart", ["checkpoint.keep_every=20", "checkpoint.keep_last=1", "train.global_batch=4"])
    (place / "recipe.toml").write_text(recipe.toml(), encoding="utf-8")
    saver = Saver(place / "checkpoints", background=False)
    for step in (10, 20, 30):
        saver.save(step, State({"model/x": Slice(torch.ones(50), (50,))}, {}, 200), {"step": step})
        assert not saver.poll()[0].error
    started = {"kind": "event", "event": "started", "step": 0, "steps": 40, "samples_per_epoch": 100}
    lines = [started, *({"kind": "eval", "step": s, "loss": loss} for s, loss in ((10, 2.0), (20, 3.0), (25, 1.0)))]
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def invoke(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(checkpoints)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_the_list_says_why_each_is_kept(run: Path) -> None:
    assert kept(run) == {10: ["best"], 20: ["every"], 30: ["last"]}
    code, text = invoke(str(run))
    lines = text.splitlines()
    assert code == 0 and lines[0].split() == ["step", "saved", "(UTC)", "size", "loss", "kept", "because", "state"]
    assert [line.split()[0] for line in lines[1:4]] == ["10", "20", "30"]
    assert "2.0000" in lines[1] and "best" in lines[1] and "whole" in lines[1] and "--verify" in lines[4]


def test_verify_finds_what_the_list_does_not(run: Path) -> None:
    shard = run / "checkpoints" / "step-00000020" / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 4
    shard.write_bytes(data)
    assert invoke(str(run))[0] == 0
    code, text = invoke(str(run), "--verify")
    assert code == 1 and "BAD" in text and text.count("every byte good") == 2
    code, text = invoke(str(run), "--verify", "--json")
    rows = json.loads(text)["checkpoints"]
    assert code == 1 and [bool(row["problem"]) for row in rows] == [False, True, False]
    assert rows[2]["bytes"] > 0 and rows[2]["kept"] == ["last"] and rows[0]["scores"] == {"loss": 2.0}


def test_temporary_directories_are_told_and_do_not_count(run: Path) -> None:
    (run / "checkpoints" / "step-00000030" / "manifest.sha256").unlink()
    (run / "checkpoints" / ".saving-00000040-a-1").mkdir()
    (run / "checkpoints" / "bad-step-00000005").mkdir()
    listed = list_checkpoints(run)
    assert [row.step for row in listed.checkpoints] == [10, 20]
    assert listed.temporary == [".saving-00000040-a-1", "step-00000030"] and listed.set_aside == ["bad-step-00000005"]
    code, text = invoke(str(run))
    assert code == 0 and "step-00000030 is being written or removed" in text and "2 checkpoints" in text


def test_no_run_and_no_checkpoints(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UserError):
        list_checkpoints(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "recipe.toml").write_text((run / "recipe.toml").read_text())
    code, text = invoke(str(tmp_path / "empty"))
    assert code == 0 and "no checkpoint yet" in text


def test_listing_needs_no_torch(run: Path) -> None:
    code = (
        "import sys; from windlass.checkpoint.load import list_checkpoints; "
        f"assert len(list_checkpoints({str(run)!r}, verify=True).checkpoints) == 3; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
