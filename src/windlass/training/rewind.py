"""The way back to the last good checkpoint after a non-finite step or a loss spike
(`train.on_nonfinite`, `train.on_spike`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from windlass.checkpoint.load import candidates, open_checkpoint, rename_damaged
from windlass.checkpoint.save import Saver
from windlass.checkpoint.state_dict import restore
from windlass.data.order import step_samples
from windlass.errors import RunFailed
from windlass.training.nonfinite import BadSteps
from windlass.training.record import Recorder
from windlass.training.start import choose_undamaged, decide_on_rank_0
from windlass.training.state import LossScaler, LossSum, TrainState

MAX_REWINDS = 3  # how often a run returns to the same checkpoint before it gives up


@dataclass
class Rewinder:
    """Returns model, optimizer and counters to a checkpoint. All ranks call it after the same
    step."""

    saver: Saver
    model: nn.Module
    optimizer: Optimizer
    scaler: LossScaler | None
    losses: LossSum
    recorder: Recorder
    bad_steps: BadSteps
    times: dict[int, int] = field(default_factory=dict)  # how often the run returned to a step

    def rewind(self, reason: str, stop_sample: int) -> None:
        """Return to the last good checkpoint, and leave out the samples from there up to
        `stop_sample`."""
        recorder, run, state = self.recorder, self.recorder.run, self.recorder.state
        choice = choose_undamaged(recorder.ranks, lambda: candidates(run.path))
        if choice is None:
            raise RunFailed(f"{reason}; there is no checkpoint yet to return to")
        for note in choice.notes:
            recorder.console.warning(note)
        decide_on_rank_0(recorder.ranks, "set aside", lambda: rename_damaged(choice, run.path))
        checkpoint = open_checkpoint(choice.path, deep=False)
        self.times[checkpoint.step] = self.times.get(checkpoint.step, 0) + 1
        if self.times[checkpoint.step] > MAX_REWINDS:
            advice = "resume from an earlier one (checkpoint.resume=STEP) with a lower optim.lr"
            raise RunFailed(
                f"{reason}; the run returned to step {checkpoint.step} {MAX_REWINDS} times: {advice}"
            )
        self.losses.reset()
        restore(checkpoint, self.model, self.optimizer)
        saved = TrainState.from_json(checkpoint.counters)
        start = int(step_samples(saved.step, recorder.horizon.samples_per_step, saved.skipped)[0])
        state.return_to(saved, left_out=(start, stop_sample))
        self.bad_steps.reset()
        if self.scaler is not None:
            self.scaler.load(state)
        self.saver.resume_from(state.step)
        recorder.rewound(reason, start, stop_sample)
