"""The script that runs Windlass beside its peers, with commands that stand for the two sides, and
the script for a machine with a GPU, on a CPU.
"""

import importlib
import sys
import time
from pathlib import Path

import psutil
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("peers")


def test_both_sides_run_in_turn_and_a_row_has_the_ratios_of_the_rounds(peers, tmp_path):
    bench = peers.Bench(peers.parse(["small", "--threads", "1"]), tmp_path)
    order = []

    def side(name, speeds):
        def run():
            order.append(name)
            code = f"print('{{\"tokens/s\": {next(speeds)}}}')"
            child = bench.child([sys.executable, "-S", "-c", code])
            assert child.seconds > 0 and child.peak_gb > 0  # at least that of this process
            return child.result

        return run

    sides = {"ours": side("ours", iter((300, 200))), "theirs": side("theirs", iter((100, 200)))}
    results = peers.interleave(sides, rounds=2)
    assert order == ["ours", "theirs", "theirs", "ours"]
    goals = [peers.Goal("tokens/s", "ours", "theirs", bound) for bound in (2.0, 2.5)]
    met, missed = peers.rows("small", goals, results, others=0.25)
    assert "| ≥ 2 | 2.000 (1.000 to 3.000) | 250 | 150 | yes | 0.2 |" in met
    assert "| ≥ 2.5 |" in missed and "| no |" in missed


def test_a_failing_side_shows_its_output(peers, tmp_path):
    bench = peers.Bench(peers.parse(["small"]), tmp_path)
    with pytest.raises(SystemExit, match=r"(?s)no such peer.*exit code 3"):
        bench.child([sys.executable, "-S", "-c", "print('no such peer'); raise SystemExit(3)"])


def test_the_speed_is_without_the_warm_up(peers):
    shape = peers.Shape(1, 1, 8, 16, 4, steps=6, warm=2, window=2)
    assert shape.speed_of_steps([9, 9, 0.5, 1.5, 2, 2]) == 64 / 1.5
    text = "iter 0: loss 4.2, time 5000.00ms, mfu -100.00%\niter 1: loss nan, time 250.00ms, mfu"
    assert peers.nanogpt_seconds(text) == [5.0, 0.25]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.setenv("SMALL", "1")
    monkeypatch.syspath_prepend(str(FOLDER))
    sys.modules.pop("gpu", None)
    return importlib.import_module("gpu")


def test_a_command_that_is_cut_off_leaves_no_process_and_keeps_its_output(gpu, tmp_path):
    (tmp_path / "work").mkdir()
    bench = gpu.Bench(tmp_path, tmp_path / "work")
    bench.end = time.monotonic() + 5.5
    sleep = "import time; time.sleep(600)"
    child = f"subprocess.Popen([sys.executable, '-c', {sleep!r}], start_new_session=True).pid"
    code = f"import subprocess, sys; print({child}, flush=True); {sleep}"
    text, problem = bench.run("slow", [sys.executable, "-c", code], 600)
    assert problem.startswith("killed after")
    assert not psutil.pid_exists(int(text)) or psutil.Process(int(text)).status() == "zombie"
    assert bench.run("late", [sys.executable, "-c", ""], 600) == ("", "not run: no time was left")
    bench.add("speed", "a | b", problem)
    bench.add("versions", "torch", "2.13")
    bench.add("speed", "a | b", "done", [*gpu.WINDLASS, "train", tmp_path / "work" / "x"])
    rows = (tmp_path / "gpu.md").read_text().splitlines()[2:]
    assert rows == [
        "| versions | torch | 2.13 |  |",
        "| speed | a \\| b | done | `windlass train x` |",
    ]
    files = {"gpu.md", "logs.tgz", "rows.json", "session.log", "work"}
    assert {path.name for path in tmp_path.iterdir()} == files


@pytest.mark.full  # 5 s
def test_the_profile_of_three_steps(gpu, tmp_path):
    (tmp_path / "work").mkdir()
    bench = gpu.Bench(tmp_path, tmp_path / "work")
    gpu.profile(bench, ["eager"])
    assert "Self CPU time total: " in bench.rows[0][2], bench.rows
    assert "aten::mm" in (tmp_path / "profile-eager.txt").read_text()
    assert not list((tmp_path / "work").glob("runs/*/checkpoints"))
