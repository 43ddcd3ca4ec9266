"""Going back to the last good checkpoint, past the samples that did harm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from windlass.checkpoint import load as checkpoints
from windlass.checkpoint.reshard import restore
from windlass.data.order import step_samples
from windlass.errors import RunFailed
from windlass.training.state import TrainState

if TYPE_CHECKING:
    from windlass.training.actions import Actions
    from windlass.training.policies import Rewind
    from windlass.training.session import Session

REWINDS = 3
"""How often a run goes back to the same checkpoint before it gives up."""


def rewind(actions: Actions, back: Rewind) -> None:
    """Return to the last good checkpoint and leave out the samples since then."""
    s, state = actions.s, actions.state
    actions.saves.wait()

    def choose() -> str:
        choice = checkpoints.choose(s.run.path)
        if choice is None:
            raise RunFailed(f"{back.reason}; there is no checkpoint yet to go back to")
        for note in choice.notes:
            s.console.warning(note)
        checkpoints.set_aside(choice, s.run.path)
        return str(choice.path)

    checkpoint = checkpoints.open_checkpoint(Path(s.agreed("rewind", choose)), deep=False)
    actions.rewinds[checkpoint.step] = actions.rewinds.get(checkpoint.step, 0) + 1
    if actions.rewinds[checkpoint.step] > REWINDS:
        raise RunFailed(
            f"{back.reason}; the run went back to step {checkpoint.step} {REWINDS} times already: the samples are not what is "
            f"wrong. Resume from an earlier checkpoint (checkpoint.resume=STEP) with a lower optim.lr"
        )
    restore(checkpoint, s.model, s.optimizer)
    old = TrainState.from_json(checkpoint.counters)
    begin = _first_sample(s, old)
    old.skipped = [*state.skipped, (begin, back.stop_sample)]
    vars(state).update(vars(old))
    s.step.load(state)
    s.step.bad.zero_()
    actions.saves.step = state.step
    actions.logged_samples, actions.logged_tokens, actions.padded_since_log = state.samples, state.tokens, 0
    s.attempt = s.ledger.attempt = s.attempt + 1
    if s.sampler is not None:
        s.sampler.attempt = s.attempt
    actions.event("rewound", reason=back.reason, left_out=[begin, back.stop_sample])
    actions.restore_best()
    s.console.warning(f"{back.reason}: back to step {state.step}, samples {begin} to {back.stop_sample} left out")
    s.timer.read()


def _first_sample(session: Session, state: TrainState) -> int:
    """The global number of the first sample of the step after `state`."""
    return int(step_samples(state.step, session.batch.global_batch, state.skipped)[0])
