"""Bad steps, whose loss or gradient is not finite, and the recipe's policies. A CPU looks at every
step before its update. CUDA skips the update itself (`found_inf` of torch's fused optimizers) and
counts bad steps; the host reads the counts when it logs or saves. After a step that ran out of
memory the run starts again with smaller micro-batches."""

from __future__ import annotations

import json
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.errors import OutOfMemory, RunFailed
from windlass.fileio import read_json, write_atomic
from windlass.parallel.ranks import Ranks
from windlass.recipe import BatchPlan, Recipe
from windlass.recipe.settings import TrainSettings
from windlass.run import STARTS, Run
from windlass.training.record import Recorder
from windlass.training.state import LossScaler


class Counts(NamedTuple):
    """Bad steps since the last look, whose updates were skipped."""

    bad: int = 0
    in_a_row: int = 0  # at the end; 0 if the last step was good
    longest: int = 0  # the longest run of bad steps
    loss_bad: bool = False  # whether a loss of this rank was not finite


def decide_nonfinite(
    counts: Counts,
    bad_ranks: list[int],  # whose loss is not finite
    step: int,
    settings: TrainSettings,
    fp16: bool,
) -> tuple[str, str]:
    """`skip` or `stop` after bad steps up to `step`, by `train.on_nonfinite`; and why.
    In fp16 an overflow of the gradient alone halves the loss scale and skips the step."""
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
        self._zero = torch.zeros((), dtype=torch.float32, device=self.ranks.device)
        self._bad = self._count = self._loss_bad = self._zero
        self._in_a_row = self._longest = self._zero + self.state.skips_in_a_row

    def observe(self, loss: Tensor, grad_norm: Tensor, zero: Tensor) -> Tensor:
        """Look at a step before its update: 1.0, on the device, if the update must be skipped.

        `loss` is this rank's, and may be infinite with a finite gradient. `grad_norm` and `zero`
        are equal on all ranks, which must act alike; `zero` is NaN if a rank's loss is not finite.
        """
        bad = (grad_norm * 0 + zero != 0).float()
        if self.deferred or bool(bad):
            self._loss_bad = torch.maximum(self._loss_bad, (loss * 0 != 0).float())
            self._bad = torch.maximum(self._bad, bad) if self._hold_updates else bad
            self._count = self._count + self._bad
            self._in_a_row = (self._in_a_row + 1) * self._bad
            self._longest = torch.maximum(self._longest, self._in_a_row)
        else:
            self._bad, self._in_a_row = bad, self._zero
        return self._bad

    def read(self) -> Counts:
        """The counts since the last call. Waits for the device."""
        if not self.deferred and not bool(self._bad):
            return Counts()
        tensors = [self._count, self._in_a_row, self._longest, self._loss_bad]
        bad, in_a_row, longest, loss_bad = torch.stack(tensors).tolist()
        self._count, self._loss_bad, self._longest = self._zero, self._zero, self._in_a_row
        return Counts(int(bad), int(in_a_row), int(longest), bool(loss_bad))

    def decide(self) -> None:
        """Read the counts and act on bad steps by the policies; all ranks call it after a step."""
        state, counts = self.state, self.read()
        state.skips_in_a_row = counts.in_a_row
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
            problem = (
                f"{counts.longest} updates in a row were skipped, the last because of: {reason}"
            )
            advice = "lower optim.lr, use bf16 or fp32, or raise train.max_skips"
            raise RunFailed(f"{problem}; {advice}")


OUT_OF_MEMORY = "out_of_memory"  # the event: `micro_batch` is the new, smaller one
SMALLER = "micro_batch.json"  # in a run: the micro-batch of later starts with the same world size


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed. torch's allocator for a CPU raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def out_of_memory(recipe: Recipe, run: Run, ranks: Ranks, batch: BatchPlan, step: int) -> RunFailed:
    """The error after memory ran out in a step: OutOfMemory if the next start has a smaller
    micro-batch, else RunFailed with advice."""
    sizes = [n for n in range(1, batch.micro_batch // 2 + 1) if batch.share % n == 0]
    phase, size = ranks.status.phase, f"micro-batches of {batch.micro_batch} sequences"
    problem = f"memory ran out in step {step} ({phase}), with {size} on each rank"
    if sizes and not recipe.train.micro_batch:
        smaller = {"world": ranks.world, "micro_batch": sizes[-1]}
        write_atomic(run.path / SMALLER, json.dumps(smaller))
        return OutOfMemory(f"{problem}: the next start has micro-batches of {sizes[-1]}")
    advice = [f"train.micro_batch={size}" for size in sizes[-1:]]
    if recipe.parallel.activation_checkpointing != "full" and phase != "optimizer":
        advice.append("parallel.activation_checkpointing=full")
    remedy = f"write {' or '.join(advice)}" if advice else "use a device with more"
    return RunFailed(f"{problem}: {remedy}; `windlass plan` shows what each setting needs")


def recorded_micro_batch(run: Run, world: int, starts: bool) -> int:
    """The micro-batch recorded after memory ran out with this world size, or with `starts` the last
    start's, if it had this world size; else 0."""
    lines = [event for event in run.events if starts and event["event"] in STARTS]
    for recorded in (read_json(run.path / SMALLER), *lines[-1:]):
        if recorded.get("world") == world:
            return int(recorded["micro_batch"])
    return 0


def is_new_size(run: Run, micro_batch: int) -> bool:
    """Whether the previous start ran out of memory and could not record the event."""
    reported = [e["micro_batch"] for e in run.events if e["event"] == OUT_OF_MEMORY]
    recorded = read_json(run.path / SMALLER).get("micro_batch")
    return recorded == micro_batch and micro_batch not in reported
