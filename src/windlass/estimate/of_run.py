"""The plan of a run that was begun, from its own directory alone: the same files give the same plan, on any machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass.errors import UserError
from windlass.estimate.devices import Device, find_device
from windlass.estimate.optimum import vocab_of
from windlass.estimate.plan import Facts, Setting, plan
from windlass.estimate.predict import predicted_beside_measured, sizes_in
from windlass.estimate.time import measured_speed
from windlass.recipe import Horizon

if TYPE_CHECKING:
    from windlass.run import Line, Run

UNREAD = (
    "A Hugging Face model whose parameters, FLOPs and memory the run has not written down; `windlass plan` reads them from "
    "the model's configuration."
)


def plan_of_run(run: Run) -> dict[str, Any]:
    """What `windlass.estimate.plan.plan` says of the whole of a run, its first step to its last, at the speed it showed.

    `predicted_and_measured` is in it as far as there is something. Nothing outside of the directory is asked, neither this
    machine's devices nor the prepared data. Of a CPU it is not known how much memory there was.

    Raises:
        UserError: the run has not started yet, or its recipe cannot be planned.
    """
    started = next((e for e in reversed(run.lines("event")) if "world" in e and "steps" in e), None)
    if started is None:
        raise UserError("the run has not started yet: `windlass plan` makes its plan from the recipe")
    recipe, samples = run.recipe, int(started.get("samples_per_epoch", 0))
    train = run.lines("train")
    last = train[-1] if train else {}
    per_sample = last["tokens"] / last["samples"] if last.get("samples") and last.get("tokens") else None
    facts = Facts(vocab_of(recipe, _parameters(started)), samples, per_sample)
    device = _device(started)
    hf = sizes_in(run)
    precision = str(started.get("precision") or {"cpu": "fp32", "cuda": "bf16"}[device.kind])
    setting = Setting(recipe, int(started["world"]), device, precision, facts, hf=hf, note=UNREAD)
    speed = measured_speed(run)
    made = plan(setting, [speed] if speed else [], Horizon(int(started["steps"]), samples, recipe.train.global_batch))
    if "model" in made and made["model"].get("trained", made["model"]["parameters"]) != _parameters(started):
        made = {k: v for k, v in made.items() if k not in ("model", "flops", "memory", "recommendation", "disk")}
        made["note"] = "The network is none that the recipe describes: its parameters and memory are not known."
    return made | {"predicted_and_measured": predicted_beside_measured(run, hf)}


def _parameters(started: Line) -> int | None:
    return int(started["parameters"]) if "parameters" in started else None


def _device(started: Line) -> Device:
    name = str(started.get("device") or "")
    if not name or name.upper() == "CPU":
        return Device("CPU", "cpu", None)
    try:
        return find_device(name)
    except UserError:
        return Device(name, "cuda", None)
