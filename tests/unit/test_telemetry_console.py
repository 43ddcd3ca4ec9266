import io
import os
import pty
import re
import select

import pytest

from windlass.telemetry.console import Console

STEP = "step 100/200 | loss 2.5123 | lr 3.00e-04 | norm 0.91 | 15.2k tok/s | mfu 41.2% | mem 1.23 GB | eta 10s"


def show(console):
    console.header(
        run="runs/x", recipe="quickstart", config_hash="0123abcd", device="cpu", world=2, strategy="ddp",
        precision="fp32", parameters=10_745_088, tokens_per_step=4096, first_step=50,
        data={"data": "wiki.txt", "training": "4,096 tokens", "validation": "none", "tokenizer": "byte, 257 ids"}, epochs=2.0,
    )  # fmt: skip
    console.tick(99)
    line = {"loss": 2.51234, "lr": 3e-4, "grad_norm": 0.913, "tokens_per_s": 15_234.0, "mfu": 0.412, "mem_mb": 1234.0}
    console.step({"kind": "train", "step": 100, "step_ms": 100.0, **line})
    console.eval({"kind": "eval", "step": 100, "suite": "loss", "loss": 2.4, "perplexity": 11.02, "runtime_s": 3.25})
    console.eval({"kind": "eval", "step": 100, "suite": "hellaswag", "acc_norm": 0.2955})
    console.event("saved checkpoints/step-00000100 in 0.50 s", 100)
    console.sample("To be\nor not \x1b[31mto\x07 be", 100)
    console.warning("mlflow: no way")
    console.close()
    console.close()


def plain(log):
    """A log without the time at the front of each line."""
    lines = log.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z ", line) for line in lines)
    return [line.partition(" ")[2] for line in lines]


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    out = io.StringIO()
    show(Console(200, log_path=tmp_path / "log.txt", stream=out))
    lines = out.getvalue().splitlines()
    for line in (
        STEP,
        "eval 100/200 | loss | loss 2.4000 | perplexity 11.0200 | 3.2 s",
        "eval 100/200 | hellaswag | acc_norm 0.2955",
        "step 100/200 | saved checkpoints/step-00000100 in 0.50 s",
        "warning: mlflow: no way",
        "  | or not \N{REPLACEMENT CHARACTER}[31mto\N{REPLACEMENT CHARACTER} be",
        "ranks   2 ranks x cpu, ddp, fp32",
        "work    200 steps x 4,096 tokens = 819k tokens, resumed after step 50",
    ):
        assert line in lines
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()
    assert plain(tmp_path / "log.txt") == lines


def test_other_ranks_show_warnings_alone(tmp_path, capsys):
    out = io.StringIO()
    show(Console(200, rank=3, log_path=tmp_path / "log.txt", stream=out))
    assert out.getvalue() == "" and not (tmp_path / "log.txt").exists()
    assert capsys.readouterr().err == "rank 3: warning: mlflow: no way\n"


def test_a_bar_in_a_terminal_and_all_lines_in_the_log(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, inner = pty.openpty()
    with open(inner, "w") as stream:
        show(Console(200, log_path=tmp_path / "log.txt", stream=stream))
        shown = b""
        while select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 65536)
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "100/200" in text and "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in text
    assert STEP.partition(" | ")[2] in text and "eval 100/200 | loss | loss 2.4000" in text
    assert "\x1b[31mto" not in shown.decode(), "a generated text does not colour the terminal"
    assert shown.decode().count("\x1b[?25l") == shown.decode().count("\x1b[?25h") == 1, "the cursor comes back"
    assert STEP in plain(tmp_path / "log.txt")


@pytest.mark.parametrize("live", [False, True])
def test_a_terminal_that_goes_away_does_not_end_the_run(tmp_path, monkeypatch, live):
    class Gone(io.StringIO):
        def isatty(self):
            return live

        def write(self, text):
            raise OSError("Input/output error")

    monkeypatch.setenv("TERM", "xterm")
    show(Console(200, log_path=tmp_path / "log.txt", stream=Gone()))
    assert "step 100/200 | saved checkpoints/step-00000100 in 0.50 s" in plain(tmp_path / "log.txt")
    show(Console(200, log_path=tmp_path / "log.txt" / "no-directory", stream=Gone()))


def test_the_time_left_counts_evaluations_at_their_share_and_not_what_came_before_the_first_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = io.StringIO()
    console = Console(1000, stream=out)
    now[0] += 3600
    console.eval({"step": 0, "loss": 5.0, "runtime_s": 3600.0})  # slow: it compiles; there will be none like it
    for step in range(10, 60, 10):
        now[0] += 1 + (step == 30) * 4  # a tenth of a second a step, and an evaluation of 4 s within these 50
        console.step({"step": step, "loss": 1.0, "step_ms": 100.0})
    left = [line.rpartition("eta ")[2] for line in out.getvalue().splitlines()[1:]]
    assert left == ["1m 39s", "1m 38s", "4m 51s", "3m 44s", "3m 10s"]  # 950 steps of 0.1 s, and 4 s in each 40
