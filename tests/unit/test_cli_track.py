import pytest
import typer
from typer.testing import CliRunner

from windlass.cli import track as verb
from windlass.errors import RunFailed, UserError
from windlass.recipe import Recipe
from windlass.telemetry import trackers
from windlass.telemetry.ledger import Ledger
from windlass.telemetry.trackers import Note


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "recipe.toml").write_text(Recipe().toml())
    ledger = Ledger(path / "metrics.jsonl")
    ledger.write("train", 1, loss=1.0)
    ledger.close()
    return path


def call(*arguments):
    app = typer.Typer()
    verb.register(app)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_what_is_wrong_is_said(run, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "recipe.toml").write_text(Recipe().toml())
    for arguments, word in (
        ([run, "--to", "neptune"], "tensorboard, mlflow, wandb"),
        ([tmp_path, "--to", "wandb"], "recipe.toml"),
        ([tmp_path / "empty", "--to", "wandb"], "no ledger yet"),
        ([run, "--to", "wandb", "--timeout", "-1"], "--timeout"),
    ):
        result = call(*arguments)
        assert isinstance(result.exception, UserError) and word in str(result.exception)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "windlass[mlflow]" in str(call(run, "--to", "mlflow").exception)


def test_notes_are_shown_and_troubles_go_to_the_other_stream(run, monkeypatch):
    monkeypatch.setattr(trackers, "replay", lambda *_: iter([Note("look here"), Note("no way", trouble=True)]))
    result = call(run, "--to", "mlflow")
    assert result.stdout == "look here\n" and result.stderr == "no way\n" and result.exit_code == 0


def test_a_tracker_that_does_not_take_it_is_a_failure(run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(run.parent))
    (run.parent / "mlflow").mkdir()
    (run.parent / "mlflow" / "__init__.py").write_text("raise RuntimeError('broken installation')\n")
    result = call(run, "--to", "mlflow")
    assert isinstance(result.exception, RunFailed) and "trackers/mlflow.log" in str(result.exception)
    assert "broken installation" in result.stderr


def test_a_tracker_that_hangs_is_given_up(run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(run.parent))
    (run.parent / "mlflow").mkdir()
    (run.parent / "mlflow" / "__init__.py").write_text("import time\ntime.sleep(3600)\n")
    result = call(run, "--to", "mlflow", "--timeout", "0.3")
    assert isinstance(result.exception, RunFailed)
