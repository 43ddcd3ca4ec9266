"""Every number that Windlass shows, declared once: a new one is a line of a table below. `show` is
the one formatter. No torch. Fields of callbacks, lm-eval or users' suites need no declaration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from windlass.ledger import PLACE
from windlass.recipe.settings import LOSS_SUITE
from windlass.variables import scrub

LOSS = LOSS_SUITE  # as a measure: the suite's number of the same name


@dataclass(frozen=True)
class Measure:
    """A number and how it is shown; an empty attribute says that it is not shown there."""

    name: str  # the field of its ledger line, or the name in tables and CSV
    heading: str = ""  # the title of a column or chart; empty: the name in words
    # the format in tables (see `show`): `loss`, `score`, `count`, `rate`, `share`,
    # `mb`, `hours`, `duration`, `amount`, `giga`; empty: text
    kind: str = "score"
    unit: str = ""  # of the raw value, or of a chart's axis
    # In `eval` lines, a `score` says how good the model is, and a `derived` number follows from a
    # score. `other` numbers, as speeds, and a `count` of work say nothing about the model. `place`
    # locates the line in the run.
    role: str = "score"
    better: str = ""  # the better direction of a score, `higher` or `lower`
    words: str = ""  # the name in a sentence, a legend, and an evaluation's line of the terminal
    short: str = ""  # the heading in the terminal; empty: the heading
    console: str = ""  # the text in a step's line, with a format or a kind of `show`
    log_only: bool = False  # whether the live line of a terminal lacks that text
    tracker: str = ""  # the group of its name in the trackers, as `train` of `train/loss`
    chart: str = ""  # the chart that draws it; a chart's first measure gives its title and unit
    principal: bool = False  # whether people see it in a table of several runs, beside the CSV
    only: str = ""  # the scaling studies in whose table people see it: see SETUP
    gpu: bool = False  # whether only a GPU has it
    source: str = ""  # `LINE.FIELD` in the ledger or `devices/`; the first with a value counts
    meaning: str = ""  # a definition for the documentation; empty: the heading says it

    @property
    def title(self) -> str:
        return self.heading or self.name.replace("_", " ").capitalize()

    @property
    def text(self) -> str:
        return self.words or self.name.replace("_", " ")


class Shown(float):
    """A number whose format, as in `{:share}`, may be a kind of `show`."""

    def __format__(self, kind: str) -> str:
        return show(float(self), kind) if kind.isalpha() else super().__format__(kind)


MISSING = "–"
DECIMALS = {"loss": 4, "score": 4, "rate": 1, "mb": 0, "hours": 3}  # by kind of number


def show(value: Any, kind: str = "", missing: str = MISSING) -> str:
    """A value of a recipe or a ledger for a reader; `missing` for None.

    `kind`: a key of DECIMALS, `count`, `short` (15.2k), `amount` (with a fraction), `share` (a
    fraction, shown as %), `gb` (from MB), `giga` (in units of 10^9), `duration` (seconds), `digits`
    (three, all of those before the point); empty: six significant digits.
    """
    if value is None or value == "":
        return missing
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(show(v) for v in value) or "none"
    if isinstance(value, dict):
        return " ".join(f"{key} {show(v)}" for key, v in value.items())
    if not isinstance(value, (int, float)):
        return str(scrub(str(value)))
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    match kind:
        case "gb":
            return f"{value / 1e3:.2f} GB"
        case "giga":
            return show(value / 1e9, "hours")
        case "duration":
            return f"{value:.1f}s" if value < 10 else duration(value)
        case "share":
            return f"{100 * value:.1f} %"
        case "short":
            return short(value)
        case "digits":
            return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
        case "count":
            return f"{value:,.0f}"
        case "amount":
            return f"{value:,.3f}".rstrip("0").rstrip(".")
    if kind in DECIMALS:
        decimals = DECIMALS[kind]
        if 0 < abs(value) < 10**-decimals * 100 or abs(value) >= 1e12:
            return f"{value:.3g}"
        return f"{value:,.{decimals}f}" if value else "0"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def short(number: float) -> str:
    """A count in three or four digits: 950, 15.2k, 3.41M, 10.0B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:#.3g}".rstrip(".") + unit
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """A time in two units: 42s, 3m 05s, 2h 10m, 4d 03h."""
    whole = round(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s"))
    for size, unit, part, smaller in units:
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // part:02d}{smaller}"
    return f"{whole}s"


FLAGS = ("principal", "gpu", "log_only")


def _table(fields: str, text: str, **same: Any) -> dict[str, Measure]:
    """Measures from a table: a line for each, with the given fields between bars."""
    names, measures = fields.split(), {}
    for row in text.strip().splitlines():
        cells: dict[str, Any] = dict(zip(names, map(str.strip, row.split("|")), strict=False))
        cells |= {name: cells[name] == "yes" for name in FLAGS if name in cells}
        measures[cells["name"]] = Measure(**(same | cells))
    return measures


TRAIN = _table(
    "name words kind tracker console chart heading unit log_only",
    """
loss | training loss | loss | train | loss {:.4f} | | Training loss | nats per token
left_s | time left | duration | | {:duration} left
tokens_per_s | tokens/s | rate | throughput | {:short} tok/s | throughput\
 | Throughput | tokens/s, all ranks
lr | learning rate | score | train | lr {:.2e} | lr | Learning rate
epoch | epochs done | amount | train | epoch {:digits}
grad_norm | gradient norm | score | train | grad norm {:.2f} | grad_norm\
 | Gradient norm | before clipping
mfu | MFU | share | throughput | MFU {:share} | mfu | Model FLOPs utilisation | % of the peak
gpu_mem_mb | memory allocated on the GPU | mb | | GPU mem {:gb}
rss_mb | resident memory of rank 0 | mb | | RAM {:gb}
step_ms | whole step | rate | time | dt {:.1f} | step_time | Time of a step | ms | yes
forward_ms | forward | rate | time | dtf {:.1f} | step_time | | | yes
backward_ms | backward | rate | time | dtb {:.1f} | step_time | | | yes
optimizer_ms | optimizer | rate | time | | step_time
data_ms | waiting for data | rate | time | | step_time
samples_per_s | samples/s | rate | throughput | sps {:.4g} | | | | yes
mtps | million tokens/s | rate | | mtps {:.3g} | | | | yes
tokens | tokens so far | count | train
loss_scale | loss scale of fp16 | score | train
attempt | start of the run, from 0 | count | run
""",
    role="other",
)
"""Fields of `train` lines in order of priority: a narrow terminal shows the first ones."""

SOURCE = _table(
    "name kind better role words heading unit meaning",
    """
loss | loss | lower | score | loss | Loss by source | nats per token | loss on a source
full_loss | loss | lower | score | | | nats per token | the same on all validation data
samples | count | | other | samples | | | samples of a source so far
epochs | amount | | other | epochs | | | epochs of a source so far
""",
)
"""Numbers of a mixture's sources, in fields `source.NAME.MEASURE` of `train` and `eval` lines."""

EVAL = {
    **_table(
        "name role better unit words heading meaning",
        """
train_loss | score | lower | nats per token | train loss | | loss on samples of the training data
loss | score | lower | nats per token | val loss | | loss on the validation data
full_loss | score | lower | nats per token | of all data | Loss, all data | on all validation data
average_loss | score | lower | nats per token | average | | loss of the averaged weights
full_average_loss | score | lower | nats per token | | Average loss, all data | the same, all data
perplexity | derived | lower | | perplexity | | perplexity, e^loss
full_perplexity | derived | lower | | | Perplexity, all data
bits_per_byte | score | lower | | | | bits per byte, loss / ln 2 x tokens / bytes
full_bits_per_byte | score | lower | | | Bits per byte, all data
word_perplexity | score | lower
byte_perplexity | score | lower
""",
        kind="loss",
    ),
    **_table(
        "name role kind words heading better meaning",
        """
acc | score | loss | acc | | higher | share of items with the likeliest choice right
acc_norm | score | loss | acc norm | | higher | the same with likelihoods per byte
acc_per_token | score | loss | | | higher | the same with likelihoods per token
exact_match | score | loss | exact match | | higher | SQuAD's exact match, in %
f1 | score | loss | f1 | F1 | higher | SQuAD's F1, in %
unanswerable | other | loss | unanswerable | | lower | SQuAD's questions without an answer in the window, in %
samples_per_s | other | rate | | Samples/s
tokens_per_s | other | rate | | Tokens/s
runtime_s | other | duration | | Time
items | count | count
examples | count | count
""",
    ),
    **{
        name: Measure(name, kind="count", role="place")
        for name in (
            *(*PLACE, "samples", "tokens", "label_tokens", "train_samples", "train_tokens"),
            *("full_samples", "full_tokens", "batches", "items_hash"),
            *("event", "index", "hours", "lower"),
        )
    },
}
"""Fields of `eval` lines in the order in which the terminal shows the ones with `words`."""

DEVICE = _table(
    "name tracker kind chart words heading unit meaning",
    """
mem_alloc_mb | device | mb | memory | allocated | Device memory of each rank | MB | in use by torch
mem_reserved_mb | device | mb | memory | reserved | | | reserved by torch
mem_used_mb | device | mb | | | | | memory in use on the device, by the driver's count
peak_alloc_mb | | mb | | | | | highest mem_alloc_mb so far
rss_mb | device | mb | resident | resident | Memory of each rank's process | MB | resident memory
util_pct | device | rate | utilisation | utilisation | Utilisation of each rank | % in training
power_w | device | rate | power | power | Power of each device | W
""",
    role="other",
)
"""Fields of the samples of each rank's device; trackers get means between two `train` lines."""

PHASES = _table(
    "name words",
    """
train | training steps
data | waiting for data
eval | evaluation
save | saving
sample | generating samples
compile | compiling
lost | steps done again after a failure
startup | start-up
""",
    kind="duration",
    role="other",
)

RUN = _table(
    "name kind source heading principal gpu",
    """
state | | | State | yes
steps | count | | Steps | yes
epochs | amount | train.epoch | Epochs
tokens | count | summary.tokens train.tokens | Tokens | yes
label_tokens | count | summary.label_tokens train.label_tokens | Tokens that count in the loss
samples | count | summary.samples train.samples | Samples
parameters | count | summary.parameters start.parameters | Parameters
trainable | | | Trainable parameters
network | | | Network
world | count | summary.world start.world | Ranks
layout | | | Layout of the ranks
train_loss | loss | train.loss | Final training loss | yes
train_loss_mean | loss | summary.train_loss_mean | Training loss, mean of all steps of the run
eval_loss | loss | eval.loss | Final validation loss | yes
full_eval_loss | loss | eval.full_loss | Final validation loss, all data
average_eval_loss | loss | eval.average_loss | Final validation loss, averaged weights | yes
full_average_eval_loss | loss | eval.full_average_loss |\
 Final validation loss, averaged weights, all data
eval_perplexity | loss | eval.perplexity | Final perplexity
best_eval_loss | loss | | Best validation loss | yes
best_eval_step | count | | Step of the best evaluation
eval_bits_per_byte | loss | eval.bits_per_byte | Final bits per byte
best_bits_per_byte | loss | | Best bits per byte | yes
best_measure | | | Best checkpoint by | yes
best_score | score | | Best score of that measure | yes
best_score_step | count | | Step of that score
train_samples_per_s | rate | | Training speed (samples/s)
samples_per_s_whole_run | rate | summary.samples_per_s_whole_run |\
 Training speed of the whole run, evaluations and saves included (samples/s)
train_tokens_per_s | rate | | Training speed (tokens/s) | yes
train_steps_per_s | rate | | Training speed (steps/s)
eval_samples_per_s | rate | | Evaluation speed (samples/s)
steps_per_epoch | amount | | Steps per epoch
mem_alloc_mb | mb | summary.avg_mem_alloc_mb device.mem_alloc_mb |\
 Memory allocated per rank, mean (MB) | | yes
mem_reserved_mb | mb | summary.avg_mem_reserved_mb device.mem_reserved_mb |\
 Memory reserved per rank, mean (MB) | | yes
driver_mem_mb | mb | summary.avg_mem_used_mb device.mem_used_mb |\
 Memory in use by the driver's count, per device, mean (MB) | | yes
peak_mem_mb | mb | | Peak memory, fullest rank (MB) | yes
rss_mb | mb | summary.avg_rss_mb device.rss_mb | Resident memory per rank, mean (MB)
util_pct | rate | summary.avg_gpu_util_pct summary.avg_cpu_util_pct device.util_pct |\
 Device utilisation while training, mean (%) | yes
mfu | share | | Model FLOPs utilisation | yes
goodput | share | | Goodput | yes
runtime_s | duration | | Runtime | yes
startup_s | rate | first_step.startup_s |\
 Start-up (s): from the start of the command to its first evaluation or step
device_hours | hours | | Device-hours | yes
energy_kwh | hours | | Energy of the devices (kWh): mean power × device-hours | | yes
starts | count | | Starts
""",
)
"""Numbers of a whole run by the name in CSV; `reports.view` computes those without a source."""

EPOCH_LOSS = "eval_loss_epoch_"  # and the number of the epoch: the loss at its end

SETUP = _table(
    "name kind short heading meaning words only",
    """
layers | count | layers | Layers | | | varied
batch_per_device | amount | batch/rank | Samples of a rank in a step | | | varied
global_batch | count | batch | Samples of a step | | | varied
parameters | count | parameters | Parameters | | | varied
flops_per_device | giga | GFLOP/rank | GFLOP of a rank's step | FLOPs of a rank in a step | | varied
step_ms | rate | step ms | Step (ms) | time of a step after the warm-up: the windows' median
samples_per_s | rate | samples/s | Samples/s | samples in a step over its time
tokens_per_s | rate | tok/s | Tokens/s | tokens a second, all ranks | | strategies
steps_per_s | hours | steps/s | Steps/s | steps a second, after the warm-up | | strategies
util_pct | rate | util. % | Utilisation (%) | mean utilisation of the device in training steps\
 | | strategies
exact_match | rate | EM | Exact match | SQuAD's exact match at the last evaluation | | optional
f1 | rate | F1 | F1 | SQuAD's F1 at the last evaluation | | optional
peak_mem_mb | mb | memory MB | Peak memory, fullest rank (MB)\
 | highest memory of the fullest rank, allocated on a GPU, else resident
recommended | | best | Recommended | whether it is the recommended setup | | strategies
tokens_per_s_per_device | count | tok/s/rank | Tokens/s of a rank | tokens a second per rank
mfu | share | MFU | MFU | Model FLOPs utilisation
speedup | hours | speed-up | Speed-up\
 | throughput over the baseline's; weak: efficiency times N / N0 | | compared
efficiency | share | eff. | Efficiency | T(N0) N0 / (T(N) N); weak: FLOPs / T over N0's | | compared
ratio | share | runtime÷ | Runtime ÷ baseline's | this runtime over the baseline's | | compared
compute_ms | rate | compute | Computing (ms)\
 | computing in a step: the probe's passes and update | computing
exposed_ms | rate | comm. | Exposed communication (ms)\
 | communication in a step that computing does not hide | communication
data_ms | rate | data | Waiting for data (ms) | | waiting for data
host_ms | rate | host | Host (ms) | the rest of a step | the host
train_loss_mean | loss | loss | Training loss, mean | mean training loss of the run's steps
runtime_s | rate | runtime s | Runtime (s) | wall time of the whole run
startup_s | rate | start-up s | Start-up (s) | time from the start of the command to its first step
compile_s | rate | compile s | Compiling (s) | | | optional
world | count | | | ranks
nodes | count | | | hosts
samples_factor | hours | | | samples/s over the baseline's | | compared
runtime_factor | hours | | | the baseline's runtime over this one's | | compared
samples_per_s_whole_run | rate | | | all samples over the run's wall time without its start-up
train_loss | loss | | | the last training loss
""",
)
"""Numbers of a setup of a scaling study by the name in CSV; people see those with a heading.

`only`: a `varied` number is shown if it differs between the setups; `strategies` are for studies
of strategies or layouts, and `compared` ones for the studies with a baseline; a missing `optional`
one needs no explanation.
"""

STEP_PARTS = ("compute_ms", "exposed_ms", "data_ms", "host_ms")  # of a setup's `step_ms`


def of_result(name: str) -> Measure:
    """A measure of a whole run by its name, also the loss of an epoch or the score of a suite."""
    if name.startswith(EPOCH_LOSS):
        epoch = name.removeprefix(EPOCH_LOSS)
        return Measure(name, f"Validation loss, epoch {epoch}", "loss", principal=True)
    return RUN.get(name) or Measure(name, name.replace("_", " "), principal=True)


def of_source(name: str) -> Measure | None:
    """The measure of a field `source.NAME.MEASURE`; None for another field."""
    start, _, rest = name.partition(".")
    source, _, measure = rest.rpartition(".")
    if start != "source" or measure not in SOURCE:
        return None
    words = f"{source} {SOURCE[measure].words}" if SOURCE[measure].words else ""
    heading = f"{source}: {SOURCE[measure].text}"
    return replace(SOURCE[measure], name=name, words=words, heading=heading)


def of_eval(name: str) -> Measure:
    """The measure of an `eval` line's field, which is `TASK/METRIC` for lm-eval.

    A field that is not declared is a score, of which more is better.
    """
    if source := of_source(name):
        return source
    task, _, metric = name.rpartition("/")
    measure = EVAL.get(metric) or Measure(name, better="higher")
    return replace(measure, name=name, heading="", words="") if task else measure


def lower_is_better(measure: str, lines: Iterable[Mapping[str, Any]] = ()) -> bool:
    """Whether less is better for a value of `checkpoint.best`: `loss`, or `SUITE.NAME`.

    A user's own suite says so in the field `lower` of its `eval` lines, a list of names.
    """
    suite, _, name = measure.partition(".")
    if any(name in x.get("lower", ()) for x in lines if x.get("suite") == suite):
        return True
    return suite == LOSS_SUITE or of_eval(name).better == "lower"


def title_of(measure: str) -> str:
    titles = {LOSS_SUITE: "validation loss", f"{LOSS_SUITE}.bits_per_byte": "bits per byte"}
    titles[f"{LOSS_SUITE}.average_loss"] = "validation loss of the averaged weights"
    return titles.get(measure, measure)


def by_chart(measures: Mapping[str, Measure]) -> dict[str, list[Measure]]:
    """The measures that are drawn, by chart."""
    charts: dict[str, list[Measure]] = {}
    for measure in measures.values():
        if measure.chart:
            charts.setdefault(measure.chart, []).append(measure)
    return charts
