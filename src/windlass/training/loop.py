"""The story of a training: step, count, log, save, evaluate, until the last step or a stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from windlass.errors import RunFailed, Stopped, UserError
from windlass.optim.schedule import factor
from windlass.parallel.collectives import Agreement
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.training.actions import Actions
from windlass.training.guard import Signals
from windlass.training.policies import Rewind
from windlass.training.rewinding import rewind
from windlass.training.session import Options, Session
from windlass.training.start import resolve_start
from windlass.training.step import StepResult

if TYPE_CHECKING:
    from torch import nn

    from windlass.data.dataset import Data

OnStep = Callable[[int, StepResult], object]
"""Called after every step on every rank with the steps completed and the step's result (tensors on the device)."""


def train(
    recipe: Recipe,
    model: nn.Module | None = None,
    data: Data | None = None,
    on_step: OnStep | None = None,
    *,
    fresh: bool = False,
    extend_to: int = 0,
    branch_from: str = "",
    stop_at: int = 0,
    profile: int = 0,
) -> Run:
    """Train a recipe in this process, as one rank among those of the launcher that started it.

    A run directory that holds a committed checkpoint is resumed; a finished run is returned as it is.

    Args:
        recipe: Everything that defines the run.
        model: A module of the user's own instead of the recipe's: `forward(tokens [B, T], labels [B, T])` gives the sum of
            the loss over labels that are not -100, `blocks()` the list of its repeated parts. Its weights are taken as they
            are. With `vocab` it is checked against the data's, with `new_cache` (as `windlass.model.gpt.GPT`) it is sampled.
        data: Samples of the user's own (see `windlass.data.dataset.Data`); the tokenizer may be None, and then no text is
            generated.
        on_step: Called after every step.
        fresh: Set an existing run directory aside.
        extend_to: Go on to so many steps, past the horizon of the run in the directory.
        branch_from: `RUN@STEP`: begin a new run from that checkpoint.
        stop_at: Save and stop after this step.
        profile: Write a profiler's trace of so many steps.

    Returns:
        The run.

    Raises:
        UserError: The recipe, the data, the directory or the environment are not what they must be.
        RunFailed: The run cannot go on: a non-finite step, a lost rank, a disk that does not take the last checkpoint.
        Stopped: A signal stopped the run and everything is saved; or `stop_at` was reached.
    """
    claimed = resolve_start(recipe, fresh=fresh, extend_to=extend_to, branch_from=branch_from)
    if claimed.finished:
        return claimed.run
    with Signals() as signals, Session(claimed, Options(stop_at, profile), signals) as session:
        actions = Actions(session.open(model, data))
        try:
            fit(session, actions, on_step)
        except (Stopped, UserError):
            raise
        except RunFailed as error:  # found by this rank's own looking: what is being written was good
            actions.let_save_end()
            actions.failed(error)
            raise
        except BaseException as error:
            actions.failed(error)
            raise
    return claimed.run


def fit(session: Session, actions: Actions, on_step: OnStep | None = None) -> None:
    """From the state as it is to the last step; raises Stopped where a signal or `stop_at` ends it before."""
    state, horizon, schedule = session.state, session.horizon, session.recipe.optim.schedule
    agreement = Agreement(session.ranks)
    actions.begin()
    session.together.end()
    while state.step < horizon.steps:
        batches = actions.batches()
        try:
            for batch in batches:
                agreement.post([session.signals.asked])
                result = session.step(batch, factor(schedule, horizon, state.step))
                actions.count(batch, result)
                if on_step is not None:
                    on_step(state.step, result)
                if actions.due_log():
                    actions.log(result)
                if actions.due_save():
                    actions.save()
                cut = actions.due_evaluation() and not actions.evaluate()
                if not cut and actions.due_sample():
                    cut = not actions.sample()
                if (
                    cut
                ):  # by a stop signal, for all ranks alike: the next start makes it up, and so comes to this very step
                    agreement.result()
                    actions.stop()
                actions.look_around()
                last = state.step == horizon.steps
                if any(agreement.result() or ()) or (state.step == session.options.stop_at and not last):
                    actions.stop()
                if last:
                    break
        except Rewind as back:
            agreement.result()
            batches.close(None)
            rewind(actions, back)
        finally:
            batches.close()
    actions.finish()
