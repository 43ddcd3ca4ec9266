"""`windlass checkpoints`: the list, the verdict, the exit code; and a run's model loaded from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from windlass.checkpoint.load import load_model
from windlass.checkpoint.reshard import gather_state
from windlass.checkpoint.save import Saver
from windlass.cli import _register, app
from windlass.errors import UserError
from windlass.model.build import build_model, initialise
from windlass.recipe import Recipe

SMALL = (
    "model.layers=2",
    "model.width=16",
    "model.heads=2",
    "model.context=8",
    "model.position=rope",
    "model.tie_head=true",
    "model.vocab=300",
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three checkpoints, without the training."""
    recipe = Recipe.load("quickstart", SMALL)
    place = tmp_path / "run"
    place.mkdir()
    (place / "recipe.toml").write_text(recipe.toml(), encoding="utf-8")
    model = build_model(recipe, 300, "cpu")
    saver = Saver(place / "checkpoints", background=False)
    for step, loss in ((10, 3.0), (20, 2.0), (30, None)):
        initialise(model, seed=step)
        saver.save(step, gather_state(model), {"step": step}, {"loss": loss})
        assert not saver.poll()[0].error
    return place


def invoke(*arguments: str) -> tuple[int, str]:
    if not any(c.name == "checkpoints" for c in app.registered_commands):
        _register()
    result = CliRunner().invoke(app, ["checkpoints", *arguments])
    return result.exit_code, result.output


def test_the_list(run: Path) -> None:
    code, text = invoke(str(run))
    assert code == 0
    lines = text.splitlines()
    assert lines[0].split() == ["step", "saved", "(UTC)", "size", "loss", "kept", "because", "state"]
    assert [line.split()[0] for line in lines[1:4]] == ["10", "20", "30"]
    assert "2.0000" in lines[2] and "among the last, best" in lines[2] and "whole" in lines[2]
    assert lines[4].startswith("3 checkpoints, ") and "--verify" in lines[4]


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
    assert rows[2]["bytes"] > 0 and rows[2]["kept"] == ["last"] and rows[0]["loss"] == 3.0


def test_one_that_was_never_committed_is_told_and_does_not_count(run: Path) -> None:
    (run / "checkpoints" / "step-00000030" / "COMMITTED").unlink()
    code, text = invoke(str(run))
    assert code == 0
    assert "step-00000030 has no commit marker" in text
    assert "2 checkpoints" in text
    assert json.loads(invoke(str(run), "--json")[1])["uncommitted"] == ["step-00000030"]


def test_no_run_and_no_checkpoints(tmp_path: Path, run: Path) -> None:
    result = CliRunner().invoke(app, ["checkpoints", str(tmp_path / "nothing")])
    assert isinstance(result.exception, UserError) and "no run directory" in str(result.exception)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "recipe.toml").write_text((run / "recipe.toml").read_text())
    code, text = invoke(str(tmp_path / "empty"))
    assert code == 0 and "no checkpoint yet" in text


def test_listing_needs_no_torch(run: Path) -> None:
    code = (
        "import sys; from windlass.cli.checkpoints import table_rows; from pathlib import Path; "
        f"rows = table_rows(Path({str(run)!r}), True); assert len(rows) == 3; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_runs_model(run: Path) -> None:
    recipe = Recipe.load(run)
    for source, seed in (
        (str(run), 30),
        (f"{run}@best", 20),
        (f"{run}@10", 10),
        (str(run / "checkpoints/step-00000020"), 20),
    ):
        model, loaded = load_model(source)
        expected = build_model(recipe, 300, "cpu")
        initialise(expected, seed)
        assert loaded.checkpoint.step == seed and loaded.run.path == run and not model.training
        tokens = torch.arange(8)[None]
        with torch.no_grad():
            assert torch.equal(model(tokens), expected.eval()(tokens))


def test_a_model_from_an_older_checkpoint_says_so(run: Path) -> None:
    (run / "checkpoints" / "step-00000030" / "state.json").write_text("{}")
    _, loaded = load_model(run)
    assert loaded.checkpoint.step == 20 and "step 30 is damaged" in loaded.notes[0]
