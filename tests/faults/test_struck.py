"""A rank of a real training raises, is killed or is suspended, in each phase: the run ends, says who and where, and loses nothing."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from saving import tally

from windlass.checkpoint.load import choose
from windlass.launch.local import launch
from windlass.run import Run

pytestmark = pytest.mark.dist
STRUCK = Path(__file__).parent / "struck.py"
PHASES = {"load": "load", "forward@14": "step", "backward@14": "step", "evaluation@9": "evaluation", "save@3": "save"}
"""Where a rank is struck, and the phase that the message names: late enough for a checkpoint to be there."""
HOW = {"raise": "failed with exit code 1", "kill": "was killed by SIGKILL", "stop": "was suspended"}
SAMPLE = [("raise", "evaluation@9", 0), ("kill", "backward@14", 1), ("stop", "save@3", 1)]
MATRIX = list(itertools.product(HOW, PHASES, (0, 1)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With the corpus, and its data prepared by the first run."""
    place = tmp_path_factory.mktemp("corpus")
    draw = random.Random(2)
    (place / "text.txt").write_text("".join(draw.choice("abcdefgh ") for _ in range(1200)))
    return place


def settings(folder: Path, run: Path, **more: object) -> list[str]:
    values = {
        "run.dir": f"'{run}'", "data.source": f"'{folder / 'text.txt'}'", "data.dir": f"'{folder / 'data'}'",
        "data.tokenizer": "char", "model.vocab": 0, "model.layers": 1, "model.heads": 2, "model.width": 16, "model.context": 8,
        "train.steps": 12, "train.global_batch": 4, "train.micro_batch": 1, "checkpoint.every": 3, "eval.every": 2,
        "eval.sample_every": 0, "telemetry.every": 1, "parallel.strategy": "full_shard", **more,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in values.items()]


def strike(folder: Path, run: Path, how: str, phase: str, victim: int) -> tuple[int, str]:
    """The exit code, and what the launcher said."""
    command = [sys.executable, str(STRUCK), how, phase, str(victim), "train", "quickstart", *settings(folder, run)]
    said: list[str] = []
    code = launch(command, 2, say=said.append, stopped_seconds=1.0)
    return code, "\n".join(said)


@pytest.mark.parametrize(
    ("how", "phase", "victim"),
    [*SAMPLE, *(pytest.param(*c, marks=pytest.mark.full) for c in MATRIX if c not in SAMPLE)],
)
def test_the_run_ends_and_goes_on_from_the_last_checkpoint(folder, tmp_path, how, phase, victim):
    run = tmp_path / "run"
    plain = [sys.executable, "-m", "windlass", "train", "quickstart", *settings(folder, run)]
    if phase == "load":
        assert launch([*plain, "--stop-at", "3"], 2) == 75
    code, said = strike(folder, run, how, phase, victim)
    assert code == 1, said
    assert f"rank {victim} of 2 on {socket.gethostname()} {HOW[how]}" in said, said
    assert re.search(rf" at step \d+, phase {PHASES[phase]}; the run has ended", said), said
    if how == "raise":
        assert "ArithmeticError: struck by the test" in said
    assert Run(run).state != "finished"
    there = choose(run, "latest")
    assert there is not None and 2 <= there.step < 12 and not there.notes, "every byte of the last checkpoint is good"
    assert launch(plain, 2) == 0
    assert Run(run).state == "finished"
    assert [line["step"] for line in Run(run).lines("train")] == list(range(1, 13))
    tally(f"one of two ranks: {how} in {PHASES[phase]}", 1)


@pytest.mark.parametrize("world", ["1..2", pytest.param("2", marks=pytest.mark.full)])
def test_a_killed_rank_and_the_run_goes_on_by_itself(folder, tmp_path, world):
    """`--max-restarts 1`: from the last committed checkpoint, with as many ranks as are left where that is allowed."""
    run = Run(tmp_path / "run")
    more = {"train.steps": 300, "checkpoint.every": 5, "eval.every": 0, "parallel.strategy": "ddp"}
    command = [sys.executable, "-m", "windlass", "train", "quickstart", *settings(folder, run.path, **more)]
    process = subprocess.Popen(
        [*command, "--world", world, "--max-restarts", "1"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "WINDLASS_QUIET_END": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(run.checkpoints_dir.glob("step-*")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    victim = next(p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1")
    os.kill(victim.pid, signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "rank 1 of 2" in said and "was killed by SIGKILL" in said
    ranks = 1 if world == "1..2" else 2
    assert f"restart 1 of 1, with {ranks} rank{'s' * (ranks > 1)}" in said
    begun = [(e["attempt"], e["world"], e["step"] > 0) for e in run.events if e["event"] in ("started", "resumed")]
    assert begun == [(0, 2, False), (1, ranks, True)]
    assert run.state == "finished"
    assert [line["step"] for line in run.lines("train")] == list(range(1, 301))
    assert [line["samples"] for line in run.lines("train")] == [4 * step for step in range(1, 301)]
