"""How fast a run is and where its time goes: throughput, wall time, device hours, MFU, each
computed here alone.

`StepTimer` (milliseconds of a step by phase) and `Goodput` (seconds of the process by phase)
measure inside the training process. What they measure is written into the ledger, and the functions
below compute from its lines, so that a killed and resumed run has right numbers too. No torch:
plans and reports use this file.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from windlass.run import STARTS, Line

STEP_PHASES = ("data", "forward", "backward", "optimizer")
RUN_PHASES = (
    "startup",
    "compile",
    "data",
    "train",
    "eval",
    "save",
    "sample",
)  # of a process's wall time
BEGINS = (*STARTS, "rewound")  # events from whose step steps are counted on

Seconds = dict[str, float]


class StepTimer:
    """Milliseconds of a step by phase, averaged from one `read` to the next.

    On CUDA the phases are measured with events and nothing waits for the device before `read`,
    which the loop calls when it logs and has to wait for the loss anyway. Waiting for data is host
    time on every device. `new_event` makes what is recorded on the device; None: a CUDA event on
    CUDA, the host's clock elsewhere.
    """

    def __init__(
        self,
        device: Any = "cpu",
        goodput: Goodput | None = None,
        new_event: Callable[[], Any] | None = None,
    ):
        if new_event is None and str(device).startswith("cuda"):
            new_event = lambda: sys.modules["torch"].cuda.Event(enable_timing=True)  # noqa: E731 - loaded by the training
        self._new_event, self._goodput = new_event, goodput
        self._marks: list[tuple[str, Any, Any]] = []  # phase, its first mark, its last mark
        self._steps = 0
        self._begin = self._mark()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one of STEP_PHASES, of which the last ends the step, or `outside` (an evaluation, a
        save), which counts in none."""
        data = name == "data"
        first = self._mark(host=data)
        try:
            with (
                self._goodput.phase("data") if data and self._goodput else contextlib.nullcontext()
            ):
                yield
            self._steps += name == "optimizer"
        finally:
            self._marks.append((name, first, self._mark(host=data)))

    def read(self) -> dict[str, float]:
        """`step_ms` and `<phase>_ms` of a step, averaged since the last `read`, which this resets.
        Waits for the device."""
        end = self._mark()
        if self._new_event:
            end.synchronize()  # and so everything recorded before it
        ms: Seconds = {}
        for name, first, last in [("step", self._begin, end), *self._marks]:
            took = (last - first) * 1e3 if isinstance(first, float) else first.elapsed_time(last)
            ms[name] = ms.get(name, 0.0) + took
        ms["step"] = max(ms["step"] - ms.get("outside", 0.0), 0.0)
        steps, self._steps, self._marks, self._begin = self._steps, 0, [], end
        return {
            f"{name}_ms": ms[name] / steps
            for name in ("step", *STEP_PHASES)
            if name in ms and steps
        }

    def _mark(self, host: bool = False) -> Any:
        """Now, on the host's clock in seconds, or as an event at the present end of the current
        stream."""
        if host or self._new_event is None:
            return time.perf_counter()
        event = self._new_event()
        event.record()
        return event


class Goodput:
    """Wall time of one process by phase, of which there is always one; the parts sum to the whole,
    to the nanosecond.

    The clock starts with the process (or `before` seconds before the constructor): imports count as
    `startup`.
    """

    def __init__(self, before: float | None = None):
        self._since = time.perf_counter_ns()
        self._phase = "startup"
        self._ns = dict.fromkeys(RUN_PHASES, 0)
        if before is None:
            import psutil

            before = max(time.time() - psutil.Process().create_time(), 0.0)
        self._ns["startup"] = int(before * 1e9)

    def enter(self, name: str) -> str:
        """From now on time counts as `name`; returns the phase that ended."""
        now = time.perf_counter_ns()
        self._ns[self._phase] += now - self._since
        before, self._phase, self._since = self._phase, name, now
        return before

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> Seconds:
        """Seconds in each phase so far that had any, to the millisecond. From any thread."""
        spent = self._ns | {
            self._phase: self._ns[self._phase] + time.perf_counter_ns() - self._since
        }
        return {name: round(ns / 1e9, 3) for name, ns in spent.items() if ns}


class Throughput(NamedTuple):
    """Work divided by the time of the steps that did it: no evaluation, no save, no start in it."""

    steps_per_s: float
    samples_per_s: float
    tokens_per_s: float  # padding not counted
    mfu: float | None  # None without a peak of the device


def throughput(ledger: Iterable[Line]) -> Throughput | None:
    """The speed over a run from its effective ledger; None where nothing was timed.

    A `train` line holds means over the steps since the line or start before it, and counts by their
    time. The first line of each start is left out (caches, compilation) where there are others.
    """
    windows = [
        (line, line["step_ms"] / 1e3 * steps)
        for line, steps in timed(ledger)
        if "tokens_per_s" in line
    ]
    total = sum(seconds for _, seconds in windows)
    if not total:
        return None
    steps = sum(1e3 / line["step_ms"] * seconds for line, seconds in windows) / total
    samples, tokens, share = (
        sum(line.get(field, 0.0) * seconds for line, seconds in windows) / total
        for field in ("samples_per_s", "tokens_per_s", "mfu")
    )
    return Throughput(
        steps, samples, tokens, share if all("mfu" in line for line, _ in windows) else None
    )


def timed(ledger: Iterable[Line]) -> list[tuple[Line, int]]:
    """The `train` lines that speeds are computed from, each with the number of its steps."""
    windows: list[tuple[Line, int, bool]] = []  # a line, its steps, whether it is the start's first
    step, first = 0, True
    for line in ledger:
        if line["kind"] == "event" and line.get("event") in BEGINS:
            step, first = line["step"], True
        elif line["kind"] == "train":
            if line.get("step_ms"):
                windows.append((line, max(line["step"] - step, 1), first))
            step, first = line["step"], False
    return [
        (line, steps)
        for line, steps, _ in [window for window in windows if not window[2]] or windows
    ]


def step_times(ledger: Iterable[Line]) -> dict[str, float]:
    """`step_ms_mean`, `forward_ms_mean` … of the steps that `throughput` counts."""
    windows, means = timed(ledger), dict[str, float]()
    for name in (f"{phase}_ms" for phase in ("step", *STEP_PHASES)):
        if own := [(line[name], steps) for line, steps in windows if name in line]:
            means[f"{name}_mean"] = sum(ms * steps for ms, steps in own) / sum(
                steps for _, steps in own
            )
    return means


def evaluation_speed(ledger: Iterable[Line]) -> dict[str, float]:
    """Seconds of all evaluations of the loss, and their samples divided by them; empty without
    one."""
    seconds = samples = 0.0
    for line in ledger:
        if line["kind"] == "eval" and line.get("suite", "loss") == "loss" and line.get("runtime_s"):
            seconds += line["runtime_s"]
            samples += max(line.get("samples", 0), line.get("full_samples", 0)) + line.get(
                "train_samples", 0
            )
    return (
        {"eval_runtime_s": seconds, "eval_samples_per_s": samples / seconds}
        if seconds and samples
        else {}
    )


def averages(ledger: Sequence[Line]) -> dict[str, float]:
    """What the `summary` line has of speeds: `throughput`, `step_times`, `evaluation_speed`, and
    `startup_s`."""
    speed = throughput(ledger)
    means = (
        {f"{name}_mean": value for name, value in speed._asdict().items() if value is not None}
        if speed
        else {}
    )
    starts = [line["startup_s"] for line in ledger if line.get("event") == "first_step"]
    means |= {"startup_s": starts[0]} if starts else {}
    return means | step_times(ledger) | evaluation_speed(ledger)


def wall_time(lines: Iterable[Line]) -> Seconds:
    """Seconds by phase over all starts of a run, from the raw ledger (`run.read_lines`): with
    `lost`, and `total`.

    Each line's `seconds` are those of its process so far. Where an attempt resumes from step *s*,
    what those before it did after step *s* counts as `lost`. The parts sum to `total`. Time between
    an attempt's last line and its death is in no line.
    """
    attempts = _attempts(lines)
    totals = dict.fromkeys((*RUN_PHASES, "lost"), 0.0)
    for number, own in attempts.items():
        resumed_at = min(
            (later[0][0] for other, later in attempts.items() if other > number),
            default=float("inf"),
        )
        # up to the first line beyond that step: the event of a checkpoint that is written in the
        # background may come later, and does not count
        before = [
            seconds
            for _, seconds in takewhile(lambda line, last=resumed_at: line[0] <= last, own)  # type: ignore[misc]
        ]
        last, useful = own[-1][1], before[-1] if before else {}
        for name in last:
            totals[name] = totals.get(name, 0.0) + useful.get(name, 0.0)
            totals["lost"] += last[name] - useful.get(name, 0.0)
    rounded = {name: round(value, 3) for name, value in totals.items()}
    return rounded | {"total": round(sum(rounded.values()), 3)}


def device_hours(lines: Iterable[Line]) -> float:
    """Hours of wall time times ranks, over all starts of a run, from the raw ledger.

    `world` is in the events of starting, and holds until an event names another: a rewind names
    none.
    """
    lines = list(lines)
    worlds = {
        int(line.get("attempt", 0)): line["world"]
        for line in lines
        if isinstance(line.get("world"), int)
    }
    hours, ranks = 0.0, 1
    for number, own in sorted(_attempts(lines).items()):
        ranks = worlds.get(number, ranks)
        hours += sum(own[-1][1].values()) * ranks / 3600
    return hours


def _attempts(lines: Iterable[Line]) -> dict[int, list[tuple[float, Seconds]]]:
    """Step and seconds of each line by attempt."""
    attempts: dict[int, list[tuple[float, Seconds]]] = {}
    base: Seconds = {}
    for line in lines:
        seconds = line.get("seconds")
        if not isinstance(seconds, dict):
            continue
        number = int(line.get("attempt", 0))
        if number not in attempts:
            # a rewind begins a new attempt in the same process, whose clock runs on: what it shows
            # by then belongs to the attempt before, at a step beyond every step that stays
            rewound = line.get("event") == "rewound" and bool(attempts)
            if rewound:
                attempts[max(attempts)].append(
                    (float("inf"), {n: s - base.get(n, 0.0) for n, s in seconds.items()})
                )
            base = seconds if rewound else {}
            attempts[number] = []
        attempts[number].append(
            (line["step"], {name: value - base.get(name, 0.0) for name, value in seconds.items()})
        )
    return attempts


def mfu(
    tokens_per_s: float, flops_per_token: float, peak_flops: float | None, devices: int
) -> float | None:
    """Model FLOPs utilisation, a fraction (arXiv 2204.02311): model FLOPs a second over the
    devices' peak.

    `flops_per_token`: forward and backward by the 6N convention plus attention, no recomputation.
    None without a peak.
    """
    return tokens_per_s * flops_per_token / (peak_flops * devices) if peak_flops else None


def peak_flops(name: str, precision: str, tf32: bool = False) -> float | None:
    """FLOP/s that one device can do at most, by its name as torch or NVML gives it; None for
    others.

    `tf32`: fp32 products may be done in TF32 (`torch.backends.cuda.matmul.allow_tf32`).
    """
    column = "tf32" if tf32 and precision == "fp32" else precision
    for pattern, row in PEAKS:
        if re.search(pattern, name, re.IGNORECASE):
            return row[column] * 1e12 if column in row else None
    return None


PEAKS: tuple[tuple[str, Mapping[str, float]], ...] = (
    # The first pattern that matches in the device's name holds. TFLOP/s, dense (never the doubled
    # "with sparsity"), for products that accumulate in fp32, at boost clock: datasheets and
    # architecture whitepapers of NVIDIA and AMD. A precision that is not listed has no published
    # peak, or is not done in hardware.
    (r"\bMIG\b", {}),  # a slice of a GPU has a share of its peak that its name does not tell
    (r"GB200", {"bf16": 2500, "fp16": 2500, "tf32": 1250, "fp32": 80}),
    (r"\bB200\b", {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75}),
    (r"\bH[12]00 NVL", {"bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60}),
    (r"\bH100 PCIe", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    (r"\bG?H200\b|\bH[18]00\b.*(SXM|HBM3)", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    (r"\bA[18]00\b", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    (r"\bA30\b", {"bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3}),
    (r"\bA40\b", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    (r"\bA10\b", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    (r"RTX A6000", {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7}),
    (r"\bL40S\b", {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    (r"\bL40\b", {"bf16": 181, "fp16": 181, "tf32": 90.5, "fp32": 90.5}),
    (r"\bL4\b", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    (r"V100.*(SXM|NVLink)", {"fp16": 125, "fp32": 15.7}),
    (r"V100.*PCIe?", {"fp16": 112, "fp32": 14}),
    (r"\bT4\b", {"fp16": 65, "fp32": 8.1}),
    (r"RTX 5090\b(?! D| Laptop)", {"bf16": 209.5, "fp16": 209.5, "tf32": 104.8, "fp32": 104.8}),
    (r"RTX 4090\b(?! D| Laptop)", {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
    (r"RTX 3090\b(?! Ti)", {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}),
    (r"MI300X", {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4}),
)
