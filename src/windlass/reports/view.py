"""A run as a report sees it: its curves, restarts and samples, and its measures by name. No torch.

A run that was killed and resumed is one curve, because the ledger is the effective one. `hours` are
hours of training: without pauses between attempts, their start-up, and steps that were done twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from windlass.errors import plural
from windlass.model.size import describe_network, trainable
from windlass.recipe import typed
from windlass.recipe.strategies import Sizes
from windlass.reports.tracks import STARTS, Clock, Track, interpolate, rank_tracks, track_of
from windlass.run import Line, Run, effective, last_start, read_lines
from windlass.study.results import BITS, validation_data
from windlass.telemetry.measures import EPOCH_LOSS, RUN, Measure
from windlass.telemetry.scores import LOSS, scores_by_step
from windlass.telemetry.timing import device_hours, evaluation_speed, throughput, wall_time
from windlass.variables import scrub

Value = float | int | str | None
ROWS = 100_000  # of `train` lines in a report, over all its runs; a run with more is thinned


class Restart(NamedTuple):
    """The start of an attempt after the first one."""

    what: str  # one of the words in STARTS, `extended`, or `settings changed`
    step: float
    tokens: float
    hours: float
    time: str  # of day, as in the ledger
    text: str  # the same for people, with the settings that changed


class RunView:
    """A run as a report sees it, also one without a step.

    Args:
        rows: of the curves, about; a longer run keeps the extremes of each measure.

    Raises:
        UserError: its recipe is unreadable.
    """

    def __init__(self, run: Run, label: str = "", rows: int = ROWS):
        raw = list(read_lines(run.metrics_path))
        self.run, self.label, self.state = run, scrub(label or run.name), run.state_by(raw)
        self.settings: Mapping[str, Any] = scrub(run.recipe.flat())
        # effective, without secrets: only texts can hold one, and most lines have numbers alone
        texts = ("event", "sample")
        every = [scrub(x) if x["kind"] in texts else x for x in effective(raw)]
        # The lines of steps are nearly all of a ledger; `train` has their numbers.
        self.ledger = [x for x in every if x["kind"] != "train"]
        self.events, self.start = self.lines("event"), last_start(self.ledger)
        self.sizes = Sizes(**self.start.get("mesh", {}))  # of the mesh
        self.summary = [{}, *self.lines("summary")][-1]
        self.samples = [x for x in self.lines("sample") if x.get("text") is not None]
        clock = Clock(every)
        train = track_of([x for x in every if x["kind"] == "train"], clock)
        self.evals = _evals(self.lines("eval"), train, clock)  # by suite
        # what callbacks logged
        self.logged = _with_tokens(track_of(self.lines("log"), clock), train).thinned(rows)
        self.train = train.thinned(rows)
        self.ranks = rank_tracks(run.devices_dir, clock)
        # the last step of each start, with steps that a later start did again
        self.reached = {int(x.get("attempt", 0)): int(x["step"]) for x in raw}
        self.restarts = _restarts(self.events, train, clock)
        self.validation = validation_data(run, run.recipe, self.ledger)
        self.speed = throughput(every)
        self.wall = wall_time(raw)  # seconds by phase over all starts, and their `total`
        self.device_hours = device_hours(raw) or None

    def lines(self, kind: str) -> list[Line]:
        return [line for line in self.ledger if line["kind"] == kind]

    @property
    def step(self) -> int:
        """Steps done."""
        ends = (x for x in self.events if x.get("event") in ("finished", "checkpoint"))
        return max([0, *(int(x["step"]) for x in ends), *(int(s) for s in self.train["step"][-1:])])

    @cached_property
    def values(self) -> dict[str, Value]:
        """The run's measures by name, without missing ones."""
        return _values(self)


def views(runs: Sequence[Run]) -> list[RunView]:
    """Read several runs, each labelled by its name, or by its path if another run has that name."""
    names = [run.name for run in runs]
    labels = [r.name if names.count(r.name) == 1 else str(r.path) for r in runs]
    return [RunView(*pair, ROWS // len(runs)) for pair in zip(runs, labels, strict=True)]


def _with_tokens(track: Track, train: Track) -> Track:
    """A track whose `tokens` are the trained ones; an `eval` line's own count what it evaluated."""
    tokens = interpolate(train, "step", track["step"], "tokens")
    return Track({**track.columns, "tokens": tokens})


def _evals(evaluations: Sequence[Line], train: Track, clock: Clock) -> dict[str, Track]:
    """The evaluations by suite."""
    suites: dict[str, list[Line]] = {}
    for line in evaluations:
        suites.setdefault(line.get("suite", LOSS), []).append(line)
    return {name: _with_tokens(track_of(own, clock), train) for name, own in suites.items()}


def _restarts(events: Sequence[Line], train: Track, clock: Clock) -> list[Restart]:
    starts = {int(x.get("attempt", 0)): x for x in reversed(events) if x.get("event") in STARTS}
    restarts = []
    for attempt in clock.attempts[1:]:
        if attempt.number not in starts:
            continue
        start = starts[attempt.number]
        step, before = float(start["step"]), start.get("extended_from")
        tokens = float(interpolate(train, "step", np.array([step]), "tokens")[0])
        own = [x for x in events if x.get("attempt") == attempt.number]
        changed = [x["settings"] for x in own if x.get("event") == "settings_changed"]
        changes = {key: values for one in changed for key, values in one.items()}
        what = text = STARTS[start["event"]]
        if before:
            what, text = "extended", f"extended from {before:,} to {plural(start['steps'], 'step')}"
        elif changes:
            what = "settings changed"
        for key, (old, new) in changes.items():
            text += f"; {key} = {typed(new)} from here on, not {typed(old)}"
        restarts.append(Restart(what, step, tokens, attempt.before / 3600, start["time"], text))
    return restarts


def _values(v: RunView) -> dict[str, Value]:
    """Every measure of a run, speeds over the whole run; `SUITE_SCORE` for other suites' scores."""
    start, loss, speed = v.start, v.evals.get(LOSS), v.speed
    measure = str(v.settings["checkpoint.best"])
    score, score_step = best(v, measure) if measure != LOSS else (None, None)
    best_loss, best_step = best(v, LOSS)
    total, trained = start.get("parameters"), start.get("trained")
    batch = max(1, start.get("global_batch", 1))
    per_epoch = first((start.get("samples_per_epoch") or math.nan) / batch)
    peaks = (float(np.nanmax(t["peak_alloc_mb"])) for t in v.ranks if t.has("peak_alloc_mb"))
    computed: dict[str, Value] = {
        "state": v.state,
        "steps": v.step,
        "trainable": trainable(trained, total) if total and trained not in (None, total) else None,
        "network": describe_network(start["network"]) if start.get("network") else None,
        "layout": v.sizes.layout or None,
        "best_eval_loss": best_loss,
        "best_eval_step": best_step,
        "best_bits_per_byte": best(v, BITS)[0],
        "best_measure": measure if score is not None else None,
        "best_score": score,
        "best_score_step": score_step,
        "train_samples_per_s": (speed and speed.samples_per_s) or None,
        "train_tokens_per_s": speed and speed.tokens_per_s,
        "train_steps_per_s": speed and speed.steps_per_s,
        "eval_samples_per_s": evaluation_speed(v.ledger).get("eval_samples_per_s"),
        "steps_per_epoch": per_epoch,
        "peak_mem_mb": first(v.summary.get("peak_mem_mb"), max(peaks, default=None)),
        "mfu": speed and speed.mfu,
        "goodput": v.wall["train"] / v.wall["total"] if v.wall["total"] else None,
        "runtime_s": v.wall["total"] or None,
        "device_hours": v.device_hours,
        "energy_kwh": energy_kwh(v),
        "starts": 1 + len(v.restarts),
    }
    values = {m.name: _read(v, m) if m.source else computed[m.name] for m in RUN.values()}
    values |= {f"{EPOCH_LOSS}{n}": x for n, x in losses_by_epoch(loss, per_epoch).items()}
    for suite, track in v.evals.items():
        scores = track.scores() if suite != LOSS else ()
        values |= {f"{suite}_{name}": last_value(track, name) for name in scores}
    return {name: value for name, value in values.items() if value is not None}


def _read(v: RunView, measure: Measure) -> Any:
    """The value of a measure in the ledger; NaN only for a loss, as it must not be hidden."""
    for source in measure.source.split():
        line, _, field = source.partition(".")
        match line:
            case "train" | "eval":
                value = last_value(v.train if line == "train" else v.evals.get(LOSS), field)
            case "device":
                value = on_ranks(v, field)
            case "summary" | "start":
                value = (v.summary if line == "summary" else v.start).get(field)
            case event:
                value = next(
                    (x.get(field) for x in reversed(v.events) if x["event"] == event), None
                )
        if isinstance(value, str) or measure.kind == "loss" or first(value) is not None:
            return value
    return None


def losses_by_epoch(track: Track | None, steps_per_epoch: float | None) -> dict[int, float]:
    """The validation loss at the end of each whole epoch.

    It is the loss of the first step at or past the end, or of the run's last step if that is less
    than a step before the end.
    """
    losses = dict[int, float]()
    if track is None or steps_per_epoch is None:
        return losses
    epoch = math.nan
    for epoch, loss in zip(track["epoch"].tolist(), track["loss"].tolist(), strict=True):
        if epoch >= 1 and epoch % 1 < 1 / steps_per_epoch:
            losses.setdefault(int(epoch), loss)
    if -epoch % 1 < 1 / steps_per_epoch:
        losses.setdefault(math.ceil(epoch), loss)
    return losses


def best(view: RunView, measure: str) -> tuple[float | None, int | None]:
    """The best value of a measure (`loss` or `SUITE.NAME`), and its step."""
    scores = scores_by_step(view.lines("eval"), measure)
    return scores.best, scores.best_step


def first(*values: Any) -> float | None:
    """The first finite number."""
    return next((x for x in values if isinstance(x, (int, float)) and math.isfinite(x)), None)


def last_value(track: Track | None, name: str) -> float | None:
    """The value in the last line, also if it is NaN: an earlier good value hides no bad end."""
    if track is None or not len(track) or name not in track.columns:
        return None
    return float(track[name][-1])


def on_ranks(view: RunView, name: str) -> float | None:
    """The mean of a device field over all ranks' samples in training steps."""
    names = ("gpu_util_pct", "cpu_util_pct") if name == "util_pct" else (name,)
    parts = [t[name][np.isfinite(t[name]) & (t["training"] > 0)] for t in view.ranks]
    values = np.concatenate([[], *parts])
    measured = values.mean() if len(values) else None
    return first(*(view.summary.get(f"avg_{name}") for name in names), measured)


def energy_kwh(view: RunView) -> float | None:
    """The mean measured power of the devices times their hours; None if none was measured."""
    power = np.concatenate([[], *(track["power_w"] for track in view.ranks)])
    measured = power[np.isfinite(power)]
    if not len(measured) or not view.device_hours:
        return None
    return float(measured.mean()) * view.device_hours / 1e3
