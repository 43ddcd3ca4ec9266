"""Steps that fail: a loss or gradient that is infinite or NaN, and memory that runs out.

A CPU looks at every step before its update. CUDA skips the update itself (`found_inf` of torch's
fused optimizers) and counts such bad steps; the host reads the counts when it logs or saves."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.errors import OutOfMemory, RunFailed
from windlass.fileio import write_atomic
from windlass.recipe import BatchPlan
from windlass.recipe.settings import TrainSettings
from windlass.training.record import Recorder
from windlass.training.state import LossScaler

SMALLER = "micro_batch.json"  # in a run: the micro-batch of later starts with the same world size


class Counts(NamedTuple):
    """Bad steps since the last look, whose updates were skipped."""

    bad: int = 0
    in_a_row: int = 0  # at the end; 0 if the last step was good
    longest: int = 0  # the longest run of bad steps
    loss_bad: bool = False  # whether a loss of this rank was not finite


def check_is_deferred(
    device: torch.device, optimizer: torch.optim.Optimizer, offload: bool
) -> bool:
    """Whether the device decides about the update, and the host looks later."""
    able = getattr(optimizer, "_step_supports_amp_scaling", False)
    # torch copies `found_inf` to offloaded parameters without waiting (`torch/optim/adamw.py`), so
    # their update could read the flag too early.
    return device.type == "cuda" and not offload and able


class BadSteps:
    """Finds and counts bad steps on one rank, and decides by the policies of the recipe."""

    def __init__(
        self, recorder: Recorder, settings: TrainSettings, scaler: LossScaler, deferred: bool
    ):
        self.recorder, self.ranks, self.state = recorder, recorder.ranks, recorder.state
        self.settings, self.scaler, self.deferred = settings, scaler, deferred
        # Whether no update follows a bad step until the host has looked.
        self._hold_updates = settings.on_nonfinite == "stop" and not scaler.enabled
        # An entry [2] on the device for each step since the last look: whether its update was
        # skipped, and whether this rank's loss was not finite
        self._flags = list[Tensor]()

    def observe(self, own_loss: Tensor, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Look at a step before its update: 1.0, on the device, if the update must be skipped.

        `own_loss` is this rank's part of `loss`, which may be infinite with a finite gradient.
        `loss` and `grad_norm` are equal on all ranks, which must act alike.
        """
        bad = (grad_norm * 0 + loss * 0 != 0).float()
        if self._hold_updates and self._flags:
            bad = torch.maximum(bad, self._flags[-1][0])
        self._flags.append(torch.stack([bad, (own_loss * 0 != 0).float()]))
        return bad

    def read(self) -> Counts:
        """The counts since the last call, the row also in the state. Waits for the device."""
        flags = torch.stack(self._flags).tolist() if self._flags else []
        self._flags, loss_bad = [], any(loss_bad for _, loss_bad in flags)
        in_a_row = longest = self.state.skips_in_a_row
        for bad, _ in flags:
            in_a_row = in_a_row + 1 if bad else 0
            longest = max(longest, in_a_row)
        self.state.skips_in_a_row = in_a_row
        return Counts(sum(int(bad) for bad, _ in flags), in_a_row, longest, loss_bad)

    def decide(self) -> None:
        """Read the counts and act on bad steps by the policies; all ranks call it after a step."""
        state, counts = self.state, self.read()
        if not counts.bad:
            return
        flags = self.ranks.all_gather_object("bad steps", counts.loss_bad)
        bad_ranks = [rank for rank, bad in enumerate(flags) if bad]
        fp16 = self.scaler.enabled
        policy, reason = decide_nonfinite(counts, bad_ranks, state.step, self.settings, fp16)
        if policy == "stop":
            raise RunFailed(reason)
        self.recorder.emit(
            "skipped",
            reason=reason,
            count=counts.bad,
            in_a_row=counts.in_a_row,
            loss_scale=self.scaler.scale,
        )
        state.updates_skipped += counts.bad
        if counts.longest >= self.settings.max_skips:
            raise RunFailed(
                f"{counts.longest} updates in a row were skipped, the last because of: {reason}; "
                "lower optim.lr, use bf16 or fp32, or raise train.max_skips"
            )


def decide_nonfinite(
    counts: Counts, bad_ranks: list[int], step: int, settings: TrainSettings, fp16: bool
) -> tuple[str, str]:
    """`skip` or `stop` after bad steps up to `step`, by `train.on_nonfinite`; and why.
    In fp16 an overflow of only the gradient halves the loss scale and skips the step.
    `bad_ranks`: whose loss is not finite."""
    where, problem = f"up to step {step}", "gradient not finite (every rank's loss is finite)"
    if bad_ranks:
        problem = f"loss not finite on rank {', '.join(map(str, bad_ranks))}"
    policy = settings.on_nonfinite if bad_ranks or not fp16 else "skip"
    if policy == "stop":
        if not fp16:  # no update followed the first bad step
            where = f"step {step - counts.bad + 1}"
        advice = "look at its samples, lower optim.lr, or set train.on_nonfinite=skip"
        problem += f". The update was skipped: {advice}"
    return policy, f"{where}: {problem}"


# In the messages of other errors than torch.OutOfMemoryError: of torch's allocator for a CPU, of the
# driver, and of cuBLAS and cuDNN, which allocate outside of torch's allocator.
NO_MEMORY = re.compile(r"DefaultCPUAllocator|CUDA error: out of memory|STATUS_ALLOC_FAILED")


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed on this rank."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None


def out_of_memory(recorder: Recorder, batch: BatchPlan) -> RunFailed:
    """The error after memory ran out in a step. If the recipe leaves the micro-batch open, it is
    OutOfMemory: the next start has a smaller one, which the run directory records."""
    recipe, phase = recorder.recipe, recorder.ranks.status.phase
    problem = (
        f"memory ran out in step {recorder.state.step + 1} ({phase}), with micro-batches of "
        f"{batch.micro_batch} sequences on each rank"
    )
    smaller = [n for n in range(1, batch.micro_batch // 2 + 1) if batch.share % n == 0]
    if smaller and not recipe.train.micro_batch:
        recorded = {"world": recorder.ranks.world, "micro_batch": smaller[-1]}
        write_atomic(recorder.run.path / SMALLER, json.dumps(recorded))
        return OutOfMemory(f"{problem}: the next start has micro-batches of {smaller[-1]}")
    advice = [f"train.micro_batch={smaller[-1]}"] if smaller else []
    if recipe.parallel.activation_checkpointing != "full" and phase != "optimizer":
        advice.append("parallel.activation_checkpointing=full")
    remedy = f"write {' or '.join(advice)}" if advice else "use a device with more"
    return RunFailed(f"{problem}: {remedy}; `windlass plan` shows what each setting needs")
