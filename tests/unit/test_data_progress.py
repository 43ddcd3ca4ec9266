"""What a preparation shows, and what its verb says and returns."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from data_fixtures import documents, jsonl

from windlass.data import progress


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_plain_lines_come_now_and_then(monkeypatch):
    clock, out = Clock(monkeypatch), io.StringIO()
    lines = progress.Lines(out)
    for _ in range(100):
        clock.now += 0.5
        lines.update("training data", (clock.now - 100) / 50, int(1e6 * (clock.now - 100)))
    lines.update("checking SHA-256", None, 0)
    lines.note("something")
    lines.close()
    shown = out.getvalue().splitlines()
    assert shown[0] == "data: training data: 2%, 1,000,000 tokens, 1.00 M tokens/s"  # the rate since the first update
    assert len(shown) == 6 and shown[-1] == "data: something"


def test_what_is_over_at_once_shows_nothing(monkeypatch, capsys):
    Clock(monkeypatch)
    for shown in (progress.Lines(), progress.Bar(), progress.Silent()):
        shown.update("training data", 0.5, 10)
        shown.close()
    assert capsys.readouterr() == ("", "")


def test_a_bar_in_a_terminal(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar = progress.console()
    assert isinstance(bar, progress.Bar)
    bar.note("before")
    clock.now += 2
    bar.update("training data", 0.25, 1000)
    bar._bar.refresh()  # it does so ten times a second by itself
    bar.note("[between]")
    bar.update("validation data", None, 2000)
    bar.close()
    bar.close()
    shown = capsys.readouterr().err
    assert "before" in shown and "[between]" in shown and "1,000 tokens" in shown and "25%" in shown


def windlass(*arguments):
    command = [sys.executable, "-m", "windlass", "prepare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_the_verb(tmp_path):
    source = jsonl(tmp_path / "x.jsonl", documents(60))
    arguments = ["quickstart", f"data.source={source}", f"data.dir={tmp_path / 'data'}"]
    first, second = windlass(*arguments), windlass(*arguments)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == second.stdout
    names = [line.split()[0] for line in first.stdout.splitlines()]
    assert names == ["directory", "training", "validation", "tokenizer", "fingerprint"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.source=nowhere.txt"], "there is no file nowhere.txt"),
        (["data.tokenizer=wordpiece", "data.source={x}"], "there is no tokenizer 'wordpiece'"),
        (["data.source=https://example.org/x.txt"], "a source that is downloaded needs the SHA-256"),
        (["data.source={x}", "data.text_key=content"], "x.jsonl, line 1 has no 'content'; it has 'text'"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(tmp_path, overrides, message):
    source = jsonl(tmp_path / "x.jsonl", documents(60))
    given = [o.format(x=source) for o in overrides]
    done = windlass("quickstart", f"data.dir={tmp_path / 'data'}", *given)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
