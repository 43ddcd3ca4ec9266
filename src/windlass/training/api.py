"""`train`: one rank of a training in this process, or all ranks as local processes. No torch."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from windlass.data.open import Data, own_data
from windlass.data.prepare import prepare
from windlass.errors import (
    BAD_INPUT,
    DONE,
    INTERRUPTED,
    STOPPED,
    RunFailed,
    Stopped,
    UserError,
    argument,
    plural,
)
from windlass.launch.local import launch
from windlass.parallel.env import detect_env
from windlass.processes import QUIET_END, WINDLASS
from windlass.recipe import Recipe, as_recipe, typed
from windlass.run import Run
from windlass.telemetry.terminal import message
from windlass.training.start import Start, resolve_start
from windlass.training.stop import StopSignals

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from windlass.training.callbacks import Callback, Measuring


def train(
    recipe: Recipe | Run | str | Path,
    model: nn.Module | None = None,
    data: Data | Dataset[Any] | tuple[Dataset[Any], Dataset[Any]] | None = None,
    *,
    world: int = 0,
    callbacks: Sequence[Callback] = (),
    suites: Mapping[str, Measuring] | None = None,
    fresh: bool = False,
    extend_to: int | str = 0,
    branch_from: str = "",
    stop_at: int = 0,
) -> Run:
    """Train a recipe and return the run.

    Windlass resumes a run with a committed checkpoint, and returns a finished run unchanged. A
    signal before step 1 ends the process with exit code 75 (in a notebook: KeyboardInterrupt).

    Args:
        recipe: A recipe, a preset's name, a `.toml` file, or a run.
        model: Your own module, trained from its present weights. `forward(tokens [B, T], labels
            [B, T])` returns the loss summed over labels that are not -100. FSDP2, activation
            checkpointing, compilation and Muon need `blocks()`, a list of repeated parts. With
            `vocab` Windlass compares it with the data; with `new_cache` (as in `GPT`) it samples.
            A causal language model of `transformers` works as it is.
        data: Your own samples, or a map-style `torch.utils.data.Dataset` of integer token
            tensors [T + 1] for `model.context` T, or a pair of these, for training and validation.
            Windlass generates no text without a tokenizer.
        world: Local processes to start; by default this process trains, alone or under a launcher.
        callbacks: Objects of `windlass.Callback`, called in order.
        suites: Your own suites by name. `f(model, step)` returns a dictionary of numbers at each
            evaluation; `windlass.Suite(f, lower=[NAME])` says that less of a number is better.
        fresh: Rename an existing run directory first.
        extend_to: Continue to this many steps or epochs (`"3 epochs"`), past the run's horizon.
        branch_from: `RUN@STEP` or `RUN@best`: begin a new run from that checkpoint.
        stop_at: Save, stop and return after this step.

    Raises:
        UserError: The recipe, the data, the directory or the environment is wrong.
        RunFailed: The run cannot continue: a non-finite step, a lost rank, a full disk.
        Stopped: A signal stopped the run, which can be resumed.
    """
    from windlass.training.callbacks import UserCode

    env, wanted = detect_env(), as_recipe(recipe)
    options = {"fresh": fresh, "extend_to": extend_to, "branch_from": branch_from}
    if env.launcher != "none" and world not in (0, env.world):
        problem = f"this process is one of {env.world} ({env.launcher})"
        raise UserError(f"{argument('world', world)}: {problem}; leave it out")
    if env.launcher == "none" and world not in (0, 1):
        if model is not None or data is not None or callbacks or suites:
            problem = "local processes cannot receive your own model, data, callbacks or suites"
            raise UserError(f"world={world}: {problem}; run the script under torchrun instead")
        return train_local_ranks(wanted, world, stop_at, options)
    with StopSignals() as stop:
        start = resolve_start(wanted, **options)  # type: ignore[arg-type]
        if start.finished:
            say_finished(start)
            return start.run
        if not gc.isenabled():  # `windlass train` has turned it off: its imports count
            start = replace(start, began=psutil.Process().create_time())
        check_start(start.recipe, env.world, own_model=model is not None)
        start.recipe.check_packages()
        user = UserCode(model, own_data(data, start.recipe), callbacks, suites or {})
        user.check(start.recipe)
        from windlass.training.rank import train_rank

        train_rank(start, user, stop, stop_at)
    gc.collect()  # the parts refer to each other: free the device's memory, files and sockets now
    return Run(start.run.path)  # with the recipe that an extension has changed


def check_start(recipe: Recipe, world: int, own_model: bool = False) -> None:
    """Raise UserError if `world` ranks cannot train the recipe, before any of them starts."""
    if world < 1:
        raise UserError(f"{argument('world', world)}: write 1 or more ranks")
    recipe.batch(world)
    layout = recipe.parallel
    if own_model and layout.model_ranks > 1:
        problem = f"{layout.layout}: Windlass divides the model of a recipe"
        raise UserError(f"{problem}, not your module: use data parallelism")
    if recipe.optim.options:
        from windlass.optim.build import library_optimizer

        library_optimizer(recipe.optim)  # raises for a wrong one


def say_finished(start: Start) -> None:
    if detect_env().rank == 0:
        done = plural(start.run.summary.get("steps", 0), "step")
        text = f"{start.run.path} is finished: the run has done its {done}; extend it to train on"
        print(message(text, sys.stdout))


def train_local_ranks(recipe: Recipe, world: int, stop_at: int, options: dict[str, Any]) -> Run:
    """Train with `world` local processes; raises as the first rank that ended."""
    with tempfile.TemporaryDirectory(prefix="windlass-") as folder:
        path, place = Path(folder, "recipe.toml"), recipe.run_dir.absolute()
        path.write_text(recipe.toml(), encoding="utf-8")
        command = ["train", str(path), f"run.dir={typed(str(place))}"]
        for name, value in {**options, "stop_at": stop_at}.items():
            option = f"--{name.replace('_', '-')}"
            command += [option if value is True else f"{option}={value}"] if value else []
        code = launch_ranks(recipe, world, command, options)
    if code in (STOPPED, INTERRUPTED):
        saved = "everything is saved" if code == STOPPED else "the last steps were not saved"
        raise Stopped(f"a signal stopped the {world} ranks; {saved}")
    if code == BAD_INPUT:
        raise UserError(f"the {world} ranks rejected their input (see the message above)")
    if code != DONE:
        raise RunFailed(f"training with {world} ranks failed (see the message above)")
    return Run(recipe.run_dir)


def launch_ranks(
    recipe: Recipe,
    world: int,
    command: Sequence[str],
    options: Mapping[str, Any],
    max_restarts: int = 0,
) -> int:
    """Prepare the data, and train by a `windlass` command as local ranks, which leave the end of
    the run to this process; returns the exit code. `options`: of `resolve_start`."""
    start = resolve_start(recipe, **options)
    if start.finished:
        say_finished(start)
        return DONE
    check_start(start.recipe, world)
    start.recipe.check_packages()
    with StopSignals():
        prepare(start.recipe, resuming=start.from_checkpoint)
    is_ours = QUIET_END not in os.environ
    os.environ[QUIET_END] = "1"
    try:
        return launch([*WINDLASS, *command], world, max_restarts)
    finally:
        if is_ours:
            del os.environ[QUIET_END]
