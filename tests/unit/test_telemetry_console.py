import io
import os
import pty
import re
import select
from pathlib import Path

import pytest

from helpers import tiny_recipe, wait_for
from windlass import train
from windlass.telemetry import console as module
from windlass.telemetry.console import Console

STEP = (
    "step 100/200 | loss 2.5123 | 15.2k tok/s | lr 3.00e-04 | epoch 2.93 | grad norm 0.91 | MFU 41.2 % | GPU mem 1.23 GB"
    " | dt 100.0 | dtf 31.2 | dtb 62.5 | sps 952.1 | mtps 0.0152"
)


def show(console, log):
    console.open_log(log)
    facts = {"run": "runs/x", "threads": "", "hosts": "n1: rank 0, 1 x cpu\nn2: rank 1, 1 x cpu"}
    console.header(facts, first_step=50)
    console.tick(99)
    line = {"loss": 2.51234, "lr": 3e-4, "grad_norm": 0.913, "epoch": 2.926, "mfu": 0.412}
    line |= {"tokens_per_s": 15_234.0, "samples_per_s": 952.125, "gpu_mem_mb": 1234.0}
    line |= {"step_ms": 100.0, "forward_ms": 31.24, "backward_ms": 62.5}
    console.step({"kind": "train", "step": 100, **line})
    scores = {"suite": "loss", "loss": 2.4, "perplexity": 11.02, "runtime_s": 3.25}
    console.eval({"kind": "eval", "step": 100, **scores})
    console.eval({"kind": "eval", "step": 100, "suite": "hellaswag", "acc_norm": 0.2955})
    console.saved(Path("checkpoints/step-00000100"), 0.5, 100)
    console.sample("To be\nor not \x1b[31mto\x07 be" + "  -x-" * 40, 100)
    console.warning("mlflow: no way")
    console.close()
    console.close()


def plain(log):
    lines = log.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z ", line) for line in lines)
    return [line.partition(" ")[2] for line in lines]


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    out = io.StringIO()
    show(Console(200, stream=out), tmp_path / "log.txt")
    lines = out.getvalue().splitlines()
    for line in (
        STEP,
        "eval 100/200 | val loss 2.4000 | perplexity 11.0200 | 3.2 s",
        "eval 100/200 | hellaswag | acc norm 0.2955",
        "saved 100/200 | checkpoints/step-00000100 | 0.50 s",
        "warning: mlflow: no way",
        r"  | or not \x1b[31mto\x07 be" + "  -x-" * 40,
        "run     runs/x",
        "hosts   n1: rank 0, 1 x cpu",
        "        n2: rank 1, 1 x cpu",
    ):
        assert line in lines
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()
    assert plain(tmp_path / "log.txt") == lines


def test_other_ranks_show_their_own_warnings_alone(tmp_path, capsys):
    out = io.StringIO()
    show(console := Console(200, rank=3, stream=out), tmp_path / "log.txt")
    console.warning("no space", own=True)
    assert out.getvalue() == "" and not (tmp_path / "log.txt").exists()
    assert capsys.readouterr().err == "rank 3: warning: no space\n"


def in_terminal(log):
    """What a terminal receives of `show`, raw and without its control sequences."""
    terminal, inner = pty.openpty()
    with open(inner, "w", encoding="utf-8") as stream:
        show(Console(200, stream=stream), log)
        shown = b""
        while select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 65536)
    os.close(terminal)
    return shown.decode(), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


@pytest.fixture
def columns(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return lambda number: monkeypatch.setenv("COLUMNS", str(number))


def test_a_live_line_in_a_terminal_and_all_lines_in_the_log(tmp_path, columns):
    columns(160)
    raw, text = in_terminal(tmp_path / "log.txt")
    assert STEP.partition(" | dt")[0] in text
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in text
    assert "eval 100/200 | val loss 2.4000" in text
    assert "\x1b[31mto" not in raw, "a generated text does not colour the terminal"
    assert raw.count("\x1b[?25l") == raw.count("\x1b[?25h") == 1, "the cursor comes back"
    log = plain(tmp_path / "log.txt")
    assert STEP in log and "dt 100" not in text, "the live line leaves room for its bar"
    assert not any(f" {name} " in text for name in ("dtf", "dtb", "sps", "mtps"))


@pytest.mark.parametrize(
    ("width", "last"),
    [
        (50, "15.2k tok/s"),
        (64, "lr 3.00e-04"),
        (80, "epoch 2.93"),
        (105, "MFU 41.2 %"),
        (130, "GPU mem 1.23 GB"),
    ],
)
def test_a_narrow_terminal_loses_the_last_fields_and_no_line_is_wider(
    tmp_path, columns, width, last
):
    columns(width)
    lines = re.findall("[^\r\n]+", in_terminal(tmp_path / "log.txt")[1])
    live = [line.rstrip() for line in lines if line.startswith("step ")]
    steps = [line.partition(" ━")[0] for line in live if line.startswith("step 100/200")]
    assert any(line.endswith(last) for line in steps)
    assert all(STEP.startswith(line) for line in steps)
    assert max(map(len, lines)) <= width, "what stays in the terminal is wrapped, too"
    assert max(map(len, live)) <= width - 2, "an echoed ^C stays on the line, which is redrawn"
    assert STEP in plain(tmp_path / "log.txt")


def test_progress_of_an_evaluation(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = io.StringIO()
    console = Console(200, stream=out)
    for done in range(50):
        now[0] += 1
        console.progress("evaluating loss", done, 1500)
    console.eval({"step": 0, "loss": 1.0})
    shown = [line.partition(" | ")[2] for line in out.getvalue().splitlines()[:-1]]
    assert shown == [f"evaluating loss {done}/1,500" for done in (10, 21, 32, 43)]


@pytest.mark.parametrize("live", [False, True])
def test_a_terminal_that_goes_away_does_not_end_the_run(tmp_path, monkeypatch, live):
    monkeypatch.setenv("TERM", "xterm")
    for log in (tmp_path / "log.txt", tmp_path / "log.txt" / "no-directory"):
        reader, writer = pty.openpty() if live else os.pipe()
        with open(writer, "w") as stream:
            console = Console(200, stream=stream)
            os.close(reader)
            show(console, log)
    assert "saved 100/200 | checkpoints/step-00000100 | 0.50 s" in plain(tmp_path / "log.txt")


def test_the_time_left_counts_evaluations_but_not_the_time_before_the_first_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = io.StringIO()
    console = Console(1000, stream=out)
    now[0] += 3600
    # slow: it compiles; there will be none like it
    console.eval({"step": 0, "loss": 5.0, "runtime_s": 3600.0})
    for step in range(10, 60, 10):
        # a tenth of a second a step, and an evaluation of 4 s within these 50
        now[0] += 1 + (step == 30) * 4
        console.step({"step": step, "loss": 1.0, "step_ms": 100.0})
    shown = [line.split(" | ")[-2] for line in out.getvalue().splitlines()[1:]]
    # 950 steps of 0.1 s, and 4 s in each 40; one line alone may have compiled
    assert shown == ["loss 1.0000", "1m 38s left", "4m 51s left", "3m 44s left", "3m 10s left"]


def test_a_phase_of_the_start_that_lasts_is_named(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "LASTS_SECONDS", 0.01)
    out = io.StringIO()
    console = Console(200, stream=out)
    console.begin("first")
    wait_for(lambda: out.getvalue() == "first ...\n")
    monkeypatch.setattr(module, "LASTS_SECONDS", 0.2)
    console.begin("next")
    console.done()
    named = list[str]()
    monkeypatch.setattr(Console, "begin", lambda _, doing: named.append(doing))
    train(tiny_recipe(corpus, tmp_path / "run", train__steps=2))
    assert "building the model" in str(named) and "first step: 1 x 8 x 32" in str(named)
    assert out.getvalue() == "first ...\n"
