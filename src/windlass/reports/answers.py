"""What a report says first: did it work, how good, how fast, what did it cost, what went wrong."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from windlass.checkpoint.retention import LOSS
from windlass.errors import by_text, plural
from windlass.reports.scaling import ScalingView
from windlass.reports.study import StudyView
from windlass.reports.text import show
from windlass.reports.view import RunView
from windlass.run import ENDINGS, STARTS, Line
from windlass.study.results import BITS, common_measure, diverged
from windlass.telemetry.measures import SETUP, of_eval, title_of

WORKED, GOOD, FAST = "Did it work?", "How good is it?", "How fast was it?"
COST, WRONG = "What did it cost?", "What went wrong?"

BEST = {LOSS: "best_eval_loss", BITS: "best_bits_per_byte"}
"""The measure of the best of several runs, by what they have in common."""

TROUBLES = {
    "failed": "failure",
    "preempted": "unsaved stop",  # a stop with a save loses nothing
    "stopped": "unsaved stop",
    "save_failed": "failed save",
    "rewound": "rewind",
    "skipped": "skipped step",
    "spike": "loss spike",
    "out_of_memory": "out-of-memory error",
    "warning": "warning",
}
"""Events of the ledger that are troubles, in the order of an answer, each with its name."""


class Answer(NamedTuple):
    question: str
    text: str
    remark: str = ""
    mark: str = ""  # `good`, `bad`, `warn` or `open`
    more: Sequence[str] = ()  # a line for each trouble


class Trouble(NamedTuple):
    name: str
    text: str
    times: int = 1
    label: str = ""  # of the run or cell, if there are several


@dataclass(frozen=True)
class Head:
    kicker: str
    title: str
    lede: str
    answers: list[Answer]
    place: str  # the directory of the run or study
    state: str = ""
    notes: str = ""  # `run.notes`


def head_of(views: Sequence[RunView], study: StudyView | None, scaled: ScalingView | None) -> Head:
    if study:
        return _study_head(study, scaled)
    return _comparison_head(views) if len(views) > 1 else _run_head(views[0])


def text_of(answer: Answer) -> str:
    return "; ".join(filter(None, [answer.text, answer.remark]))


def _sentence(*parts: str) -> str:
    """The parts that are not empty, with a capital letter."""
    text = ", ".join(filter(None, parts))
    return text[:1].upper() + text[1:]


# ---------------------------------------------------------------- one run


def _run_head(view: RunView) -> Head:
    values, parts = view.values, list[str]()
    if "network" in values:
        parts.append(str(values["network"]))
    if "trainable" in values:
        parts.append(f"{values['trainable']} trained")
    elif "parameters" in values:
        parts.append(f"{show(values['parameters'], 'count')} parameters")
    if "tokens" in values:
        parts.append(f"{show(values['tokens'], 'count')} tokens")
    parts += [restart.text for restart in view.restarts if restart.what == "extended"]
    troubles = troubles_of(view)
    answers = [worked(view), good(view), fast(view), cost([view]), wrong(troubles)]
    place, notes = str(view.run.path.resolve()), view.settings["run.notes"]
    return Head("A run", view.label, ", ".join(parts), answers, place, view.state, notes=notes)


def worked(view: RunView) -> Answer:
    total = int(view.start.get("steps", view.step))
    done = f"{view.step:,} of {plural(total, 'step')}"
    text, mark = {
        "finished": (f"Yes: finished {done}", "good"),
        "failed": (
            f"No: {'killed' if killed(view)[-1:] == [True] else 'failed'} after {done}",
            "bad",
        ),
        "running": (f"Not yet: running, {done}", "open"),
        "new": ("Not yet: no step", "open"),
    }.get(view.state, (f"Not yet: {view.state} after {done}", "open"))
    if view.state == "finished" and divergence(view):
        text, mark = f"No: the loss diverged, {done}", "bad"
    reason = str(view.values.get("ended_early") or "")
    starts = 1 + sum(restart.what != "rewound" for restart in view.restarts)
    remark = _sentence(reason, plural(starts, "start"), plural(sum(killed(view)), "kill"))
    return Answer(WORKED, text, remark, mark)


def killed(view: RunView) -> list[bool]:
    """Whether each start of the run ended without a word: it was killed, or its machine was."""
    attempts: dict[int, list[str]] = {}
    for event in sorted(view.events, key=lambda line: str(line["time"])):
        attempts.setdefault(int(event.get("attempt", 0)), []).append(str(event["event"]))
    own = [attempts.get(number, []) for number in range(max(attempts, default=-1) + 1)]
    # a rewind is a new attempt of the same process
    goes_on = [*("rewound" in events[:1] for events in own[1:]), view.state == "running"]
    return [
        bool(events) and not (goes_on[i] or set(events) & set(ENDINGS))
        for i, events in enumerate(own)
    ]


def divergence(view: RunView) -> str:
    """How the training loss diverged; empty if it did not."""
    losses = view.train["loss"].tolist()
    if not losses or not diverged(losses[0], losses[-1]):
        return ""
    first, last = show(losses[0], "loss"), show(losses[-1], "loss")
    return f"the training loss went from {first} to {last}"


def good(view: RunView) -> Answer:
    values, track, parts = view.values, view.evals.get(LOSS), list[str]()
    if track is None or "eval_loss" not in values:
        loss = values.get("train_loss")
        text = f"Training loss {show(loss, 'loss')} nats per token" if loss is not None else ""
        return Answer(
            GOOD, text or "Not known: no step is in the ledger", "no evaluation" * bool(text)
        )
    text = f"Validation loss {show(values['eval_loss'], 'loss')} nats per token"
    measure, score = values.get("best_measure"), values.get("best_score")
    if measure not in (None, LOSS):
        parts, step = [text[0].lower() + text[1:]], values["best_score_step"]
        text = f"Best {title_of(str(measure))} {show(score, 'score')} at step {step:,}"
    if "eval_perplexity" in values:
        parts.append(f"perplexity {show(values['eval_perplexity'], 'score')}")
    if track["step"][-1] == 0 < view.step:
        parts.append("evaluated before training only")
    elif track["step"][0] == 0 < track["step"][-1]:
        parts.append(f"loss {show(float(track['loss'][0]), 'loss')} before training")
    if values.get("best_eval_step", track["step"][-1]) != track["step"][-1]:
        lowest, step = show(values["best_eval_loss"], "loss"), values["best_eval_step"]
        parts.append(f"lowest loss {lowest} at step {step:,}")
    for suite, own in view.evals.items():
        for name in (
            own.scores()[-2:] if suite != LOSS and suite != str(measure).split(".")[0] else ()
        ):
            kind = of_eval(name).kind
            before = f" ({show(float(own[name][0]), kind)} at step {own['step'][0]:,.0f})" * (
                len(own) > 1
            )
            parts.append(f"{suite} {of_eval(name).text} {show(float(own[name][-1]), kind)}{before}")
    return Answer(GOOD, text, _sentence(*parts[:5]))


def fast(view: RunView) -> Answer:
    if not view.speed:
        return Answer(FAST, "Not known: no step was timed")
    ms = 1e3 / view.speed.steps_per_s
    step = f"{show(ms, 'rate')} ms a step" if ms < 1e4 else f"{show(ms / 1e3, 'duration')} a step"
    device = f" on {view.start['device']}" if "device" in view.start else ""
    ranks = plural(int(view.start.get("world", 1)), "rank") + device
    ranks += f", {view.sizes.layout}" * bool(view.sizes.layout)
    mfu = f"MFU {show(view.speed.mfu, 'share')}" if view.speed.mfu is not None else ""
    profiles = [" and ".join(e["files"]) for e in view.events if e.get("files")]
    text = f"{show(view.speed.tokens_per_s, 'count')} tokens/s"
    profile = f"profile in {profiles[-1]}" if profiles else ""
    return Answer(FAST, text, _sentence(step, ranks, mfu, profile))


def cost(views: Sequence[RunView]) -> Answer:
    """The cost of all runs together."""
    wall, hours, kwh = (
        sum(float(view.values.get(name) or 0) for view in views)
        for name in ("runtime_s", "device_hours", "energy_kwh")
    )
    if not wall:
        return Answer(COST, "Not known: no time is in the ledger")
    text, more = f"{show(wall, 'duration')} of wall time", f"{show(hours, 'hours')} device-hours"
    if len(views) > 1:  # runs that shared the time count twice in the sum of their wall times
        text, more = more, f"{show(wall, 'duration')} of wall time in all runs together"
    tokens = sum(float(view.values.get("tokens") or 0) for view in views)
    share = show(sum(view.wall["train"] for view in views) / wall, "share")
    parts = [more, f"{show(kwh, 'hours')} kWh of the devices" * (kwh > 0)]
    parts += [f"goodput {share} (time in training steps)", f"{show(tokens, 'count')} tokens"]
    return Answer(COST, text, _sentence(*parts[: 3 + (len(views) > 1)]))


def troubles_of(view: RunView) -> list[Trouble]:
    """What went wrong in a run, in the order of time."""
    found = [Trouble("divergence", divergence(view))] if divergence(view) else []
    resumed = {int(x.get("attempt", 0)): x["step"] for x in view.events if x["event"] in STARTS}
    for number, was_killed in enumerate(killed(view)):
        if was_killed:
            step = view.reached[number]
            text = f"start {number + 1} was killed, or its host was lost, after step {step:,}"
            if lost := max(0, step - resumed.get(number + 1, step)):
                text += f"; {plural(lost, 'step')} {'was' if lost == 1 else 'were'} done again"
            found.append(Trouble("kill", text))
    for event in sorted(view.events, key=lambda line: str(line["time"])):
        name = TROUBLES.get(str(event["event"]))
        if name and not event.get("saved"):
            found.append(Trouble(name, _text(event, name), int(event.get("count", 1))))
    return found


def _text(event: Line, name: str) -> str:
    reason, step = str(event.get("reason") or name), f"step {event['step']:,}: "
    return reason if reason.startswith(("step ", "rank ")) else step + reason


def wrong(troubles: Sequence[Trouble]) -> Answer:
    counts = Counter[str]()
    for trouble in troubles:
        counts[trouble.name] += trouble.times
    parts = [plural(count, name) for name, count in counts.items()]
    if not parts:
        return Answer(WRONG, "Nothing", mark="good")
    texts = by_text((trouble.label, trouble.text) for trouble in troubles)
    remark, more = (texts[0], ()) if len(texts) == 1 else ("", texts)
    return Answer(WRONG, _sentence(*parts), remark, "warn", more)


# ---------------------------------------------------------------- several runs


def _comparison_head(views: Sequence[RunView]) -> Head:
    states = counts(view.state for view in views)
    finished = sum(view.state == "finished" for view in views)
    others = [f"{view.label}: {view.state}" for view in views if view.state != "finished"]
    first = Answer(
        WORKED, f"{finished} of {len(views)} runs finished", ", ".join(others), _mark(others)
    )
    measure, remark = common_measure([view.validation for view in views])
    quality = Answer(GOOD, "There is no best run", remark)
    if name := BEST.get(measure):
        scores = [(x, v.label) for v in views if isinstance(x := v.values.get(name), float)]
        ranked = sorted(one for one in scores if not math.isnan(one[0]))
        if ranked:
            title = "Best bits per byte" if measure == BITS else "Best validation loss"
            unit = " nats per token" * (measure == LOSS)
            text = f"{title} {show(ranked[0][0], 'loss')}{unit}: {ranked[0][1]}"
            quality = Answer(GOOD, text, _sentence(_margin(ranked), remark))
        else:
            quality = Answer(GOOD, "Not known: no evaluation")
    troubles = [
        trouble._replace(label=view.label) for view in views for trouble in troubles_of(view)
    ]
    answers = [first, quality, _fastest(views), cost(views), wrong(troubles)]
    place = ", ".join(str(view.run.path.resolve()) for view in views)
    title = f"{len(views)} runs"
    return Head("A comparison of runs", title, states, answers, place)


def _margin(ranked: Sequence[tuple[float, str]]) -> str:
    if len(ranked) < 2:
        return ""
    (best, _), (second, label) = ranked[:2]
    if second == best:
        return f"as good as the next, {label}"
    return f"{show(abs(second - best), 'loss')} better than the next, {label}"


def _fastest(views: Sequence[RunView]) -> Answer:
    speeds = sorted((v.speed.tokens_per_s, v.label) for v in views if v.speed)
    if not speeds:
        return Answer(FAST, "Not known: no step was timed")
    low, median, high = speeds[0], statistics.median(speed for speed, _ in speeds), speeds[-1]
    ends = f"{show(low[0], 'count')} ({low[1]}) to {show(high[0], 'count')} ({high[1]})"
    text = f"{show(median, 'count')} tokens/s, median of the runs"
    return Answer(FAST, text, ends * (len(speeds) > 1))


def _study_head(seen: StudyView, scaled: ScalingView | None) -> Head:
    states = [result.state for result in seen.results]
    kicker = "A study"
    lede = "; ".join(f"{key}: {', '.join(map(show, x))}" for key, x in seen.swept.items())
    text = f"{states.count('finished')} of {plural(len(states), 'cell')} finished"
    others = counts(state for state in states if state != "finished")
    quality, speed = _best_cell(seen), _fastest(seen.views)
    if scaled:
        kicker, lede = "A scaling study", scaled.lede
        quality, speed = _scaling(scaled)
    bad = [r for r in seen.results if r.state in ("failed", "diverged")]
    unlucky = {r.run.path for r in bad}
    troubles = [
        Trouble(f"{r.state} cell", r.reason or r.divergence or r.state, label=r.cell.label)
        for r in bad
    ]
    for view in seen.views:
        own = troubles_of(view)
        if view.run.path in unlucky:  # the reason of the cell says it
            own = [one for one in own if one.name not in ("failure", "divergence", "kill")]
        troubles += [one._replace(label=view.label) for one in own]
    answers = [Answer(WORKED, text, others, _mark(others)), quality, speed, cost(seen.views)]
    answers.append(wrong(troubles))
    path = seen.study.path.resolve()
    return Head(kicker, path.name, lede, answers, str(path))


def _best_cell(seen: StudyView) -> Answer:
    scored = [(group.median, group.label) for group in seen.groups if group.median is not None]
    if not seen.best:
        return Answer(GOOD, "There is no best cell", seen.remark)
    best = seen.best[0]
    lower = any(result.lower for result in seen.results)
    ranked = sorted(scored, key=lambda one: one[0] if lower else -one[0])
    text = f"Best {seen.title} {show(best.median, 'loss')}"
    text += f" {seen.unit}" * bool(seen.unit)
    more = [f"{g.label}: {show(g.median, 'loss')}" for g in seen.best[1:]]
    margin = "" if more or not ranked or ranked[0][1] != best.label else _margin(ranked)
    remark = ", ".join(filter(None, [best.label, best.seeds, margin, *more, seen.remark]))
    return Answer(GOOD, text, remark)


def _scaling(scaled: ScalingView) -> tuple[Answer, Answer]:
    """How well it scales, and how fast it was."""
    question = "How well does it scale?"
    measured = [row for row in scaled.rows if row.measured]
    if not measured:
        reasons = dict.fromkeys(row.missing.get("step_ms", "not run yet") for row in scaled.rows)
        return Answer(question, f"Not known: {'; '.join(reasons)}"), Answer(FAST, "Not known")
    largest = max(measured, key=lambda row: row.world)
    fastest = max(measured, key=lambda row: row.values["samples_per_s"])
    if scaled.winners:
        name, _, why = scaled.winners[0].text.partition(": ")
        quality = Answer("Which setup is best?", name, why)
    elif "efficiency" in largest.values:
        efficiency, speedup = (
            show(largest.values.get(name), SETUP[name].kind) for name in ("efficiency", "speedup")
        )
        text = f"Efficiency {efficiency} on {plural(largest.world, 'rank')}"
        quality = Answer(question, text, f"Speed-up {speedup}")
    else:
        quality = Answer(question, "Not known: one number of ranks")
    step = show(fastest.values["step_ms"], "rate")
    text = f"{show(fastest.values['samples_per_s'], 'rate')} samples/s"
    return quality, Answer(FAST, text, f"{fastest.name}, the fastest setup: {step} ms a step")


def _mark(others: Sequence[str]) -> str:
    return "open" if others else "good"


def counts(states: Iterable[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(states).items())
