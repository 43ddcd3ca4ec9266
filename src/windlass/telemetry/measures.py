"""Every number that Windlass shows, declared once.

The console, the trackers, tables, charts, the page, scaling studies, model cards and the
documentation select from here. A number of a ledger line has the line's kind and its field; a
measure of a whole run has its name in tables and CSV. A suite of one's own and lm-eval's tasks have
scores that are declared nowhere: `measure` gives them default properties. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from windlass.run import PLACE


@dataclass(frozen=True)
class Measure:
    """A number and how it is shown.

    Attributes:
        name: field of its ledger line, or name in tables and CSV.
        heading: over a column or chart.
        kind: format of the value in tables (see `reports.text.show`): `loss`, `score`, `count`,
            `rate`, `share`, `mb`, `hours`, `duration`, `amount`.
        unit: of the value.
        role: a `score` says how good a model is, and a `derived` number follows from a score;
            `count` is an amount of work; `place` locates the line in the run; `other` is everything
            else, as speeds.
        better: the better direction of a score.
        short: heading in narrow places, as the terminal and the top of the page.
        tracker: name in the trackers; empty: they do not get it.
        terminal: the value in a step's line on the terminal; None: it is not there.
        legend: meaning, for the log's legend and the documentation.
        detail: whether the live line of a terminal leaves it out.
    """

    name: str
    heading: str = ""
    kind: str = "score"
    unit: str = ""
    role: Literal["score", "derived", "other", "count", "place"] = "score"
    better: Literal["higher", "lower", ""] = ""
    short: str = ""
    tracker: str = ""
    terminal: Callable[[float], str] | None = None
    legend: str = ""
    detail: bool = False


def short(number: float) -> str:
    """A count in three or four digits: 950, 15.2k, 3.41M, 10.0B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:#.3g}".rstrip(".") + unit
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """A time in two units: 42s, 3m 05s, 2h 10m, 4d 03h."""
    whole, parts = (
        round(seconds),
        ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")),
    )
    for size, unit, part, smaller in parts:
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // part:02d}{smaller}"
    return f"{whole}s"


def _table(*measures: Measure) -> dict[str, Measure]:
    return {measure.name: measure for measure in measures}


TRAIN = _table(
    Measure(
        *("loss", "Training loss", "loss", "nats/token"),
        better="lower",
        tracker="train/loss",
        terminal=lambda x: f"loss {x:.4f}",
        legend="loss: of this step, nats per token",
    ),
    Measure(
        *("left_s", "Time left", "duration", "s", "place"),
        terminal=lambda x: f"{duration(x)} left",
        legend="left: to the end, with evaluations and saves",
    ),
    Measure(
        *("tokens_per_s", "Throughput", "rate", "tokens/s, all ranks", "other"),
        tracker="throughput/tokens_per_s",
        terminal=lambda x: f"{short(x)} tok/s",
        legend="tok/s: tokens trained per second, all ranks",
    ),
    Measure(
        *("lr", "Learning rate", "score", "", "other"),
        tracker="train/lr",
        terminal=lambda x: f"lr {x:.2e}",
        legend="lr: learning rate",
    ),
    Measure(
        *("epoch", "Epoch", "amount", "", "place"),
        tracker="train/epoch",
        terminal=lambda x: f"epoch {x:.2f}" if x >= 0.1 else f"epoch {x:.2g}",
        legend="epoch: of the training data",
    ),
    Measure(
        *("grad_norm", "Gradient norm", "score", "before clipping", "other"),
        tracker="train/grad_norm",
        terminal=lambda x: f"grad norm {x:.2f}",
        legend="grad norm: before clipping",
    ),
    Measure(
        *("mfu", "Model FLOPs utilisation", "share", "% of the device's peak", "other"),
        tracker="throughput/mfu",
        terminal=lambda x: f"MFU {100 * x:.1f}%",
        legend="MFU: model FLOPs of the device's peak",
    ),
    Measure(
        *("gpu_mem_mb", "GPU memory of rank 0", "mb", "MB", "other"),
        terminal=lambda x: f"GPU mem {x / 1e3:.2f} GB",
        legend="GPU mem: allocated by rank 0",
    ),
    Measure(
        *("rss_mb", "Memory of rank 0's process", "mb", "MB", "other"),
        terminal=lambda x: f"RAM {x / 1e3:.2f} GB",
        legend="RAM: of rank 0",
    ),
    # The names that nanoGPT's descendants print.
    Measure(
        *("step_ms", "Time of a step", "rate", "ms", "other"),
        tracker="time/step_ms",
        terminal=lambda x: f"dt {x:.1f}",
        legend="dt: ms of a step",
        detail=True,
    ),
    Measure(
        *("forward_ms", "Forward pass", "rate", "ms", "other"),
        tracker="time/forward_ms",
        terminal=lambda x: f"dtf {x:.1f}",
        legend="dtf: ms of its forward pass",
        detail=True,
    ),
    Measure(
        *("backward_ms", "Backward pass", "rate", "ms", "other"),
        tracker="time/backward_ms",
        terminal=lambda x: f"dtb {x:.1f}",
        legend="dtb: ms of its backward pass",
        detail=True,
    ),
    Measure("optimizer_ms", "Optimizer", "rate", "ms", "other", tracker="time/optimizer_ms"),
    Measure("data_ms", "Waiting for data", "rate", "ms", "other", tracker="time/data_ms"),
    Measure(
        *("samples_per_s", "Samples per second", "rate", "all ranks", "other"),
        tracker="throughput/samples_per_s",
        terminal=lambda x: f"sps {x:.4g}",
        legend="sps: samples per second, all ranks",
        detail=True,
    ),
    Measure(
        *("mtps", "Million tokens per second", "rate", "all ranks", "other"),
        terminal=lambda x: f"mtps {x:.3g}",
        legend="mtps: million tokens per second, all ranks",
        detail=True,
    ),
    Measure("tokens", "Tokens", "count", "", "count", tracker="train/tokens"),
    Measure("samples", "Samples", "count", "", "count"),
    Measure("loss_scale", "Loss scale", "score", "fp16", "other", tracker="train/loss_scale"),
    Measure("attempt", "Attempt", "count", "", "place", tracker="run/attempt"),
)
"""Fields of `train` lines by priority: a narrow terminal shows the first ones."""

EVAL = _table(
    Measure(
        "train_loss", "Training loss", "loss", "nats/token", better="lower", short="train loss"
    ),
    Measure("loss", "Validation loss", "loss", "nats/token", better="lower", short="val loss"),
    Measure(
        *("full_loss", "Validation loss, all data", "loss", "nats/token"),
        better="lower",
        short="of all data",
    ),
    Measure(
        *("perplexity", "Perplexity", "loss", "", "derived"), better="lower", short="perplexity"
    ),
    Measure("full_perplexity", "Perplexity, all data", "loss", "", "derived", better="lower"),
    Measure("bits_per_byte", "Bits per byte", "loss", "bits", better="lower"),
    Measure("full_bits_per_byte", "Bits per byte, all data", "loss", "bits", better="lower"),
    Measure("acc", "Accuracy", better="higher", short="acc"),
    Measure("acc_norm", "Accuracy, normalised", better="higher", short="acc norm"),
    Measure("acc_per_token", "Accuracy per token", better="higher"),
    Measure("exact_match", "Exact match", unit="%", better="higher", short="exact match"),
    Measure("f1", "F1", unit="%", better="higher", short="f1"),
    Measure("runtime_s", "Time", "duration", "s", "other"),
    Measure("samples_per_s", "Samples/s", "rate", "samples/s", "other"),
    Measure("tokens_per_s", "Tokens/s", "rate", "tokens/s", "other"),
    *(
        Measure(name, heading, "count", "", "count")
        for name, heading in (
            ("items", "Items"),
            ("examples", "Examples"),
            ("batches", "Batches"),
            ("samples", "Samples"),
            ("tokens", "Tokens"),
            ("label_tokens", "Unmasked labels"),
            ("train_tokens", "Tokens of training data"),
            ("train_samples", "Samples of training data"),
            ("full_tokens", "Tokens of all data"),
            ("full_samples", "Samples of all data"),
        )
    ),
    *(
        Measure(name, name.replace("_", " ").capitalize(), "count", "", "place")
        for name in (*PLACE, "event", "index", "hours", "comparable", "first_batch_s", "items_hash")
    ),
)
"""Fields of `eval` lines."""

DEVICE = _table(
    Measure("util_pct", "Utilisation", "rate", "%", "other"),
    Measure("mem_alloc_mb", "Memory allocated", "mb", "MB", "other"),
    Measure("mem_reserved_mb", "Memory reserved", "mb", "MB", "other"),
    Measure("mem_used_mb", "Memory in use by the driver's count", "mb", "MB", "other"),
    Measure("rss_mb", "Resident memory", "mb", "MB", "other"),
    Measure("power_w", "Power", "rate", "W", "other"),
)
"""Fields of the samples of devices; a tracker gets their means between two `train` lines."""

SUMMARY = {
    "final_loss": "final_train_loss",
    "final_eval_loss": "final_val_loss",
    "best_eval_loss": "best_val_loss",
    "tokens_per_s_mean": "tokens_per_s",
    "mfu_mean": "mfu",
    "runtime_s": "duration_s",
    "samples": "samples_trained",
}
"""The trackers' names of fields of the `summary` line; the other fields keep their own."""


def of_eval(name: str) -> Measure:
    """The measure of a field of an `eval` line; a field that is not declared is a score."""
    return EVAL.get(name) or Measure(name, name.replace("_", " ").capitalize())


def is_place(name: str) -> bool:
    """Whether a field locates its line."""
    return of_eval(name).role == "place"


def is_score(name: str) -> bool:
    """Whether a field of an `eval` line measures the model by itself."""
    return of_eval(name).role == "score"
