"""`train`: one rank of a training in this process, or all ranks as local processes. No torch."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

    env, code = detect_env(), UserCode(callbacks, suites or {})
    if env.launcher != "none" and world not in (0, env.world):
        problem = f"this process is one of {env.world} ({env.launcher})"
        raise UserError(f"{argument('world', world)}: {problem}; leave it out")
    local = env.launcher == "none" and world not in (0, 1)
    if local and (model is not None or data is not None or callbacks or suites):
        problem = "local processes cannot receive your own model, data, callbacks or suites"
        raise UserError(f"world={world}: {problem}; run the script under torchrun instead")
    with StopSignals() as stop:
        wanted = as_recipe(recipe)
        start = resolve_start(wanted, fresh=fresh, extend_to=extend_to, branch_from=branch_from)
        if start.finished:
            return finished_run(start)
        check_start(start.recipe, world if local else env.world, own_model=model is not None)
        start.recipe.check_packages()
        code.check(start.recipe)
        if not local:
            from windlass.training.rank import train_rank

            train_rank(start, code, stop, model, own_data(data, start.recipe), stop_at)
    if local:
        options = {"extend-to": extend_to, "branch-from": branch_from, "stop-at": stop_at}
        train_local_ranks(start, wanted, world, fresh, options)
    # The parts refer to each other: free the device's memory, files and sockets now.
    gc.collect()
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


def finished_run(start: Start) -> Run:
    """Print why the run is finished; returns it."""
    if detect_env().rank == 0:
        done = plural(start.run.summary.get("steps", 0), "step")
        text = f"{start.run.path} is finished: the run has done its {done}; extend it to train on"
        print(message(text, sys.stdout))
    return start.run


def train_local_ranks(
    start: Start, wanted: Recipe, world: int, fresh: bool, options: Mapping[str, Any]
) -> None:
    """Train with `world` local processes; raises as the first rank that ended."""
    arguments = [f"--{name}={value}" for name, value in options.items() if value]
    with tempfile.TemporaryDirectory(prefix="windlass-") as folder:
        path, place = Path(folder, "recipe.toml"), wanted.run_dir.absolute()
        path.write_text(wanted.toml(), encoding="utf-8")
        arguments.append(f"run.dir={typed(str(place))}")
        if fresh:
            arguments.append("--fresh")
        command = ["train", str(path), *arguments]
        code = launch_ranks(start.recipe, command, world, resuming=start.from_checkpoint)
    if code in (STOPPED, INTERRUPTED):
        saved = "everything is saved" if code == STOPPED else "the last steps were not saved"
        raise Stopped(f"a signal stopped the {world} ranks; {saved}")
    if code == BAD_INPUT:
        raise UserError(f"the {world} ranks rejected their input (see the message above)")
    if code != DONE:
        raise RunFailed(f"training with {world} ranks failed (see the message above)")


def launch_ranks(
    recipe: Recipe,
    command: Sequence[str],
    world: int,
    max_restarts: int = 0,
    resuming: bool = False,
) -> int:
    """Prepare the data of `recipe` and train it by a `windlass` command as local ranks, which leave
    the end of the run to this process; returns the exit code."""
    with StopSignals():
        prepare(recipe, resuming=resuming)
    before = os.environ.get(QUIET_END)
    os.environ[QUIET_END] = "1"
    try:
        return launch([*WINDLASS, *command], world, max_restarts)
    finally:
        os.environ.pop(QUIET_END)
        if before:
            os.environ[QUIET_END] = before
