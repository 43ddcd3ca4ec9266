"""`windlass plan` from the outside."""

from __future__ import annotations

import json

import pytest
from estimate_fixtures import write_run

from windlass.cli import main


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Call the verb in an empty directory, on a terminal of 80 columns; exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments):
        with pytest.raises(SystemExit) as end:
            main(["plan", *arguments])
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return call


def test_c4_30m(run):
    code, out, _ = run("c4-30m", "--world", "4", "--device", "A100-80GB", "--json")
    result = json.loads(out)
    assert code == 0 and result["size"]["parameters"] == 29_995_520 and result["precision"] == "bf16"
    assert (result["steps"], result["optimal_steps"], result["optimal_tokens"]) == (4576, 4576, 599_910_400)
    assert result["speed"]["basis"] == "assumed" and "assumed MFU" in result["speed"]["detail"]


@pytest.mark.parametrize("name", ["c4-30m", "gpt2-124m", "gpt-squad", "quickstart"])
@pytest.mark.parametrize("columns", [80, 120])
def test_every_line_fits_its_terminal(run, monkeypatch, name, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run(name, "--world", "64", "--device", "A100-40GB", "train.global_batch=4096")
    assert code == 0 and "…" not in out and max(len(line.rstrip()) for line in out.splitlines()) <= columns
    assert "Recommended" in out and "assumed" in out


def test_an_unknown_device_is_unknown(run):
    _, out, _ = run("c4-30m", "--device", "Cerebras")
    assert "unknown: nothing was measured" in " ".join(out.split()) and "--memory GB" in " ".join(out.split())
    result = json.loads(run("c4-30m", "--device", "Cerebras", "--memory", "40", "--json")[1])
    assert result["speed"] is None and result["recommended"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("c4-30m", "--device", "A100"), "A100-80GB"),
        (("c4-30m", "--world", "3"), "train.global_batch"),
        (("quickstart", "parallel.strategy=single", "--world", "2"), "parallel.strategy"),
        (("quickstart", "--from", "nowhere"), "nowhere"),
        (("--device", "cpu"), "RECIPE"),
    ],
)
def test_bad_input_is_one_message(run, arguments, words):
    code, _, error = run(*arguments)
    assert code == 2 and words in error and "Traceback" not in error


def test_speed_from_past_runs_on_two_worlds(run, tmp_path):
    write_run(tmp_path / "one")
    write_run(tmp_path / "two", world=2, step_s=0.0625)
    speed = json.loads(run("quickstart", "--from", "one", "--from", "two", "--world", "4", "--json")[1])["speed"]
    assert speed["basis"] == "at best" and speed["tokens_per_s"] == pytest.approx(20_480 * 1.6 * 2)


def test_a_run(run, tmp_path):
    write_run(tmp_path / "live", until=40)
    assert "step 40 of 100" in run("live")[1]
    write_run(tmp_path / "done")
    code, out, _ = run("done")
    assert code == 0 and "Milestones" not in out
