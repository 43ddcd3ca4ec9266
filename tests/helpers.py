"""What many tests need: the command line in a process of its own, a small corpus, a run's numbers."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import forked
from windlass import Recipe
from windlass.errors import UserError
from windlass.run import Run

TINY = {
    "model.layers": 2,
    "model.heads": 2,
    "model.width": 32,
    "model.context": 32,
    "train.steps": 12,
    "train.global_batch": 8,
    "optim.lr": 1e-2,
    "eval.every": 0,
    "eval.sample_every": 0,
    "telemetry.every": 1,
    "telemetry.trackers": [],
}
"""Settings of a run that takes a second or two on one core."""


def windlass(
    *arguments: str | Path,
    code: int | None = 0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run `windlass ARGUMENTS` in a process of its own; fails if it exits with another code (None:
    any will do).
    """
    done = forked.run(
        command(*arguments),
        cwd=cwd,
        env={**os.environ, **(env or {})},
        timeout=timeout,
        capture_output=True,
        text=True,
    )
    shown = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert code is None or done.returncode == code, shown
    return done


def start(
    *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start `windlass WORDS` in the background; stdout and stderr come through one pipe."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return forked.Forked(command(*words), cwd=cwd, env={**os.environ, **(env or {})}, **pipes)


def command(*arguments: str | Path) -> list[str]:
    """The words of a `windlass` command that runs this checkout's code."""
    return [sys.executable, "-m", "windlass", *map(str, arguments)]


def overrides(settings: Mapping[str, Any]) -> list[str]:
    from windlass.recipe import typed

    return [f"{key}={typed(value)}" for key, value in settings.items()]


def tiny_recipe(corpus: Path, run: Path, **settings: Any) -> Recipe:
    """A recipe that trains in a second or two; settings as `optim__lr=1e-3`."""
    more = {key.replace("__", "."): value for key, value in settings.items()}
    paths = {"data.source": str(corpus), "data.dir": str(run.parent / "data"), "run.dir": str(run)}
    return Recipe.load("quickstart", overrides({**TINY, **paths, **more}))


def write_corpus(path: Path, words: int = 8000, seed: int = 0) -> Path:
    """A text of common words in random order, the same for the same seed: learnable, and nobody's."""
    rng, lines = random.Random(seed), list[str]()
    lexicon = "the of and a to in is was he for it with as his on be at by had not are but from or "
    lexicon += "have an they which one you"
    for _ in range(words // 8):
        chosen = [rng.choice(lexicon.split()) for _ in range(rng.randint(4, 12))]
        lines.append(" ".join(chosen) + ".")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def kept(run: Run | Path) -> dict[int, list[str]]:
    """Why each checkpoint of a run is kept, by step."""
    from windlass.checkpoint.listing import list_checkpoints

    rows = list_checkpoints(run.path if isinstance(run, Run) else run).checkpoints
    return {row["step"]: row["kept"] for row in rows}


def best_step(run: Run | Path) -> int | None:
    return next((step for step, why in kept(run).items() if "best" in why), None)


def curve(run: Run | Path, *fields: str) -> list[tuple[Any, ...]]:
    """Step and fields (loss, gradient norm and learning rate by default) of each `train` line of
    the effective ledger.
    """
    run = run if isinstance(run, Run) else Run(run)
    names = ("step", *(fields or ("loss", "grad_norm", "lr")))
    return [tuple(line[name] for name in names) for line in run.lines("train")]


def losses(run: Run | Path) -> list[float]:
    """The loss of each `train` line of the effective ledger."""
    return [loss for _, loss in curve(run, "loss")]


def write_ledger(run: Run, *lines: Mapping[str, Any]) -> None:
    """Append lines to the ledger of a run that has no trainer, a second apart unless they have a
    time.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    with run.metrics_path.open("a") as file:
        for second, line in enumerate(lines):
            time = f"2026-03-01T09:00:{second:02d}.000Z"
            file.write(json.dumps({"step": 0, "attempt": 0, "time": time} | dict(line)) + "\n")


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Return as soon as a condition holds; fails if that takes longer."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"it did not happen within {seconds:.0f} s"
        time.sleep(0.01)


def programs(folder: Path, patch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Shell scripts by name, which every process started from now on finds first on its PATH."""
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        (folder / name).write_text(script if script[:2] == "#!" else f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def process_state(pid: int) -> str:
    """The kernel's letter for a process: `T`: suspended, `Z`: ended; empty: gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def gone(pid: int) -> bool:
    return process_state(pid) in ("", "Z")


@contextmanager
def refused(*words: str, error: type[Exception] = UserError) -> Iterator[None]:
    """The block raises the error, whose message has all these words: what, where, what to do."""
    with pytest.raises(error) as caught:
        yield
    lacking = [word for word in words if word not in str(caught.value)]
    assert not lacking, (lacking, str(caught.value))


def kill_when(words, condition):
    """Start a verb in a process group of its own and kill the group when the condition holds."""
    process = forked.Forked(command(*words), stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None and not condition():
        time.sleep(0.01)
    assert process.poll() is None, "it ended before the condition held"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def each_step(call: Callable[[Any], object]) -> Any:
    """A callback that calls a function after each step."""
    from windlass import Callback

    class EachStep(Callback):
        def on_step(self, now: Any) -> None:
            call(now)

    return EachStep()


def train_on_ranks(recipe: Recipe, world: int = 2, **how: Any) -> Run:
    """The run of `train` on forked ranks, which share the imports of this process."""
    from windlass import train

    assert forked.launch([lambda: train(recipe, **how)], world) == 0
    return Run(recipe.run_dir)


def record_trainers(patch: pytest.MonkeyPatch) -> list[Any]:
    """The trainers that `train` makes from now on in this process, the newest last."""
    from windlass.training.trainer import Trainer

    trainers, make = list[Any](), Trainer.__init__

    def record(self: Any, *parts: Any, **more: Any) -> None:
        make(self, *parts, **more)
        trainers.append(self)

    patch.setattr(Trainer, "__init__", record)
    return trainers
