"""A rank raises or is killed in each phase: the run ends in time and loses nothing."""

import itertools
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from saving import tally

import helpers
from forked import Forked
from windlass import train
from windlass.checkpoint.choose import choose_checkpoint
from windlass.launch import local
from windlass.parallel.ranks import EXIT_SECONDS
from windlass.recipe import Recipe, dotted
from windlass.run import Run

pytestmark = pytest.mark.dist
STRUCK = Path(__file__).parent / "struck.py"
PHASES = ("load", "forward@14", "backward@14", "evaluation@9", "save@4")
"""Where a rank is struck (the message names the phase), late enough for a checkpoint to be there.
"""
HOW = {"raise": "failed", "kill": "was killed by SIGKILL"}
END_SECONDS = 10.0  # documented: the launcher ends within it after a rank ended
STATED = {"raise": EXIT_SECONDS + END_SECONDS, "kill": END_SECONDS}
"""Within so many seconds of the strike the launcher has ended, as docs/evidence/reliability.md says."""
SAMPLE = [
    ("raise", "forward@14", 0, "full_shard"),
    ("kill", "backward@14", 1, "ddp"),
    ("kill", "load", 1, "full_shard"),
    ("kill", "save@4", 1, "tensor"),
]
MATRIX = list(itertools.product(HOW, PHASES, (0, 1), ("ddp", "full_shard", "tensor")))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return helpers.write_corpus(tmp_path_factory.mktemp("corpus") / "text.txt", words=340)


def settings(text: Path, run: Path, **more: object) -> list[str]:
    data = {"source": str(text), "dir": str(text.parent / "data"), "tokenizer": "char"}
    small = {
        "run.dir": str(run),
        "data": data,
        "model": {"vocab": 0, "layers": 1, "width": 16, "context": 8},
        "train": {"global_batch": 4, "micro_batch": 1},
        "checkpoint.every": 3,
        "eval.every": 2,
        "optim.lr": 3e-3,
    }
    return helpers.overrides({**helpers.TINY, **dotted(small), **more})


def strike(
    overrides: list[str], folder: Path, how: str, phase: str, victim: int
) -> tuple[int, str, float]:
    """The exit code, the launcher's log, and the seconds from the strike to its end."""
    rank = [sys.executable, str(STRUCK), how, phase, str(victim), "train", "quickstart", *overrides]
    here, output = folder / "here", folder / "output"

    def launch_both() -> None:
        sys.exit(local.launch(rank, 2))

    with output.open("w") as out:
        process = Forked(
            [launch_both],
            env={**os.environ, "STRUCK_HERE": str(here)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            helpers.wait_for(lambda: here.exists() or process.poll() is not None, 120)
            began = time.monotonic()
            code = process.wait(timeout=STATED[how])
        finally:
            process.kill()
            process.wait()
    return code, output.read_text(), time.monotonic() - began


@pytest.mark.parametrize(
    ("how", "phase", "victim", "strategy"),
    [*SAMPLE, *(pytest.param(*c, marks=pytest.mark.full) for c in MATRIX if c not in SAMPLE)],
)
def test_run_ends_and_resumes_from_last_checkpoint(text, tmp_path, how, phase, victim, strategy):
    run = Run(tmp_path / "run")
    recipe = Recipe.load("quickstart", settings(text, run.path))
    if phase == "load":
        train(recipe, stop_at=3)
    divided = strategy == "tensor"
    how_divided = {"parallel.tensor": 2} if divided else {"parallel.strategy": strategy}
    overrides = settings(text, run.path, **how_divided)
    code, output, seconds = strike(overrides, tmp_path, how, phase, victim)
    assert code == 1, output
    done = max(line["step"] for line in run.lines("train"))
    phase = phase.partition("@")[0]
    step = done + 1 if phase in ("forward", "backward") else done
    place = f" (tp {victim})" * divided
    where = f"rank {victim}{place} of 2 on {socket.gethostname()} {HOW[how]}"
    ending = rf"{re.escape(where)}.* at step {step}, phase {phase}; the run has ended"
    assert re.search(ending, output), output
    if how == "raise":
        assert "ArithmeticError: struck by the test" in output
    assert run.state != "finished"
    there = choose_checkpoint(run.path, "latest")
    assert there is not None and 2 <= there.step < 12
    assert not there.notes, "a byte of the last checkpoint is wrong"
    assert train(recipe).state == "finished"
    assert [line["step"] for line in run.lines("train")] == list(range(1, 13))
    tally(f"one of two ranks, {strategy}: {how} in {phase}", 1, seconds=round(seconds, 2))


def test_a_killed_rank_and_the_run_restarts_by_itself(text, tmp_path):
    """`--max-restarts 1`: from the last committed checkpoint."""
    run = Run(tmp_path / "run")
    more = {"train.steps": 150, "checkpoint.every": 25, "eval.every": 0, "parallel.strategy": "ddp"}
    words = ["train", "quickstart", "--world", "2", "--max-restarts", "1"]
    quiet = {"WINDLASS_QUIET_END": "1"}
    process = helpers.start(*words, *settings(text, run.path, **more), env=quiet)

    def saved() -> bool:
        return any(run.checkpoints_dir.glob("step-*"))

    helpers.wait_for(lambda: saved() or process.poll() is not None, 120)
    max(psutil.Process(process.pid).children(), key=lambda rank: rank.pid).kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "rank 1 of 2" in output and "was killed by SIGKILL" in output
    assert "restart 1 of 1" in output
    events = [e for e in run.events if e["event"] in ("started", "resumed")]
    starts = [(e["attempt"], e["world"], e["step"] > 0) for e in events]
    assert starts == [(0, 2, False), (1, 2, True)]
    assert run.state == "finished"
    assert helpers.curve(run, "samples") == [(step, 4 * step) for step in range(1, 151)]
