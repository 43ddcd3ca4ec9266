"""The five answers at the top of a report: did it work, how good is it, how fast was it, what did
it cost, what went wrong."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from windlass.errors import by_text, plural
from windlass.ledger import ENDINGS
from windlass.reports.law import LawView
from windlass.reports.study import DESCRIPTIONS, StudyView
from windlass.reports.view import RunView
from windlass.study.comparable import common_measure
from windlass.study.numbers import BITS, divergence
from windlass.study.results import NO_BEST
from windlass.telemetry.measures import LOSS, show, title_of

WORKED, GOOD, FAST = "Did it work?", "How good is it?", "How fast was it?"
COST, WRONG = "What did it cost?", "What went wrong?"

# the measure of the best of several runs, by what they have in common
BEST = {LOSS: "best_eval_loss", BITS: "best_bits_per_byte"}
PROBLEMS = {  # of the ledger's events, by name
    "failed": "failure",
    "preempted": "unsaved stop",  # a stop with a save loses nothing
    "stopped": "unsaved stop",
    "save_failed": "failed save",
    "skipped": "skipped step",
    "out_of_memory": "out-of-memory error",
}


class Answer(NamedTuple):
    question: str
    text: str
    remark: str = ""
    mark: str = ""  # `good`, `bad`, `warn` or `open`
    more: Sequence[str] = ()  # a line for each problem


class Problem(NamedTuple):
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
    notes: str = ""  # `run.notes`


def head_of(views: Sequence[RunView], study: StudyView | None, law: LawView | None) -> Head:
    if study:
        return _study_head(study, law)
    if len(views) == 1:
        view, parts = views[0], list[str]()
        if "network" in view.values:
            parts.append(str(view.values["network"]))
        if "trainable" in view.values:
            parts.append(f"{view.values['trainable']} trained")
        elif "parameters" in view.values:
            parts.append(f"{show(view.values['parameters'], 'count')} parameters")
        if "tokens" in view.values:
            parts.append(f"{show(view.values['tokens'], 'count')} tokens")
        answers = [worked(view), good(view), fast(view), cost([view]), wrong(problems_of(view))]
        return Head("A run", view.label, ", ".join(parts), answers, view.settings["run.notes"])
    others = [f"{view.label}: {view.state}" for view in views if view.state != "finished"]
    text = f"{len(views) - len(others)} of {len(views)} runs finished"
    answers = [Answer(WORKED, text, ", ".join(others), "open" if others else "good")]
    answers += [_best_run(views), _fastest(views), cost(views)]
    answers.append(wrong([t for view in views for t in problems_of(view, view.label)]))
    return Head("A comparison of runs", f"{len(views)} runs", "", answers)


def _sentence(*parts: str) -> str:
    text = ", ".join(filter(None, parts))
    return text[:1].upper() + text[1:]


# ---------------------------------------------------------------- one run


def worked(view: RunView) -> Answer:
    step = view.numbers.step
    done = f"{step:,} of {plural(int(view.start.get('steps', step)), 'step')}"
    killed = kills(view)
    match view.state:
        case "finished" if divergence(view.train["loss"].tolist()):
            text, mark = f"No: the loss diverged, {done}", "bad"
        case "finished":
            text, mark = f"Yes: finished {done}", "good"
        case "failed":
            text, mark = f"No: failed after {done}", "bad"
        case "running":
            text, mark = f"Not yet: running, {done}", "open"
        case "new":
            text, mark = "Not yet: no step", "open"
        case state:
            text, mark = f"Not yet: {state} after {done}", "open"
    starts = plural(view.numbers.starts, "start")
    remark = _sentence(starts, plural(len(killed), "kill"))
    return Answer(WORKED, text, remark, mark)


def kills(view: RunView) -> list[int]:
    """The attempts that ended without an event: they were killed, or their machine was."""
    events: dict[int, set[str]] = {}
    for event in view.events:
        events.setdefault(int(event.get("attempt", 0)), set()).add(str(event["event"]))
    running = max(events, default=0) if view.state == "running" else None
    return [
        number
        for number, own in sorted(events.items())
        if not own & set(ENDINGS) and number != running
    ]


def good(view: RunView) -> Answer:
    values, track, parts = view.values, view.evals.get(LOSS), list[str]()
    if track is None or "eval_loss" not in values:
        if "train_loss" not in values:
            return Answer(GOOD, "Unknown: no step is in the ledger")
        loss = show(values["train_loss"], "loss")
        return Answer(GOOD, f"Training loss {loss} nats per token", "No evaluation")
    text = f"validation loss {show(values['eval_loss'], 'loss')} nats per token"
    measure, score = str(values.get("best_measure", LOSS)), values.get("best_score")
    if measure != LOSS:
        parts, step = [text], values["best_score_step"]
        text = f"best {title_of(measure)} {show(score, 'score')} at step {step:,}"
    if values.get("best_eval_step", track["step"][-1]) != track["step"][-1]:
        lowest, step = show(values["best_eval_loss"], "loss"), values["best_eval_step"]
        parts.append(f"lowest loss {lowest} at step {step:,}")
    if track["step"][0] == 0 and track["loss"][0] < float(values.get("best_eval_loss", math.nan)):
        parts.append(f"lower before training: {show(track['loss'][0], 'loss')}")
    return Answer(GOOD, _sentence(text), _sentence(*parts))


def fast(view: RunView) -> Answer:
    speed = view.numbers.speed
    if not speed:
        return Answer(FAST, "Unknown: no step was timed")
    ms = 1e3 / speed.steps_per_s
    step = f"{show(ms, 'rate')} ms a step" if ms < 1e4 else f"{show(ms / 1e3, 'duration')} a step"
    device = f" on {view.start['device']}" if "device" in view.start else ""
    ranks = plural(int(view.start.get("world", 1)), "rank") + device
    mfu = f"MFU {show(speed.mfu, 'share')}" if speed.mfu is not None else ""
    text = f"{show(speed.tokens_per_s, 'count')} tokens/s"
    return Answer(FAST, text, _sentence(step, ranks, view.sizes.layout, mfu))


def cost(views: Sequence[RunView]) -> Answer:
    """The cost of all runs together."""
    wall, hours, kwh, tokens = (
        sum(float(view.values.get(name) or 0) for view in views)
        for name in ("runtime_s", "device_hours", "energy_kwh", "tokens")
    )
    if not wall:
        return Answer(COST, "Unknown: no time is in the ledger")
    goodput = show(sum(view.numbers.wall["train"] for view in views) / wall, "share")
    parts = [f"{show(kwh, 'hours')} kWh of the devices"] if kwh else []
    parts.append(f"goodput {goodput} (time in training steps)")
    text, more = f"{show(wall, 'duration')} of wall time", f"{show(hours, 'hours')} device-hours"
    if len(views) == 1:
        return Answer(COST, text, _sentence(more, *parts))
    # runs that shared the time count twice in the sum of their wall times
    parts.append(f"{show(tokens, 'count')} tokens")
    return Answer(COST, more, _sentence(f"{text} in all runs together", *parts))


def problems_of(view: RunView, label: str = "") -> list[Problem]:
    """What went wrong in a run, in the order of time."""
    diverged = divergence(view.train["loss"].tolist())
    problems = [Problem("divergence", diverged)] if diverged else []
    for number in kills(view):
        step = view.reached[number]
        text = f"start {number + 1} was killed, or its host was lost, after step {step:,}"
        problems.append(Problem("kill", text))
    for event in sorted(view.events, key=lambda line: str(line["time"])):
        name = PROBLEMS.get(str(event["event"]))
        if name and not event.get("saved"):
            text = str(event.get("reason") or name)
            if not text.startswith(("step ", "rank ")):
                text = f"step {event['step']:,}: {text}"
            problems.append(Problem(name, text, int(event.get("count", 1))))
    return [problem._replace(label=label) for problem in problems]


def wrong(problems: Sequence[Problem]) -> Answer:
    counted = Counter[str]()
    for problem in problems:
        counted[problem.name] += problem.times
    if not counted:
        return Answer(WRONG, "Nothing", mark="good")
    text = _sentence(*(plural(count, name) for name, count in counted.items()))
    texts = by_text((problem.label, problem.text) for problem in problems)
    remark, more = (texts[0], ()) if len(texts) == 1 else ("", texts)
    return Answer(WRONG, text, remark, "warn", more)


# ---------------------------------------------------------------- several runs


def _best_run(views: Sequence[RunView]) -> Answer:
    measure, remark = common_measure([view.validation for view in views])
    if not measure:
        return Answer(GOOD, "Windlass names no best run", remark)
    scores = [(x, v.label) for v in views if isinstance(x := v.values.get(BEST[measure]), float)]
    ranked = sorted(one for one in scores if not math.isnan(one[0]))
    if not ranked:
        return Answer(GOOD, "Unknown: no evaluation")
    score, label = ranked[0]
    best = f"Best {title_of(measure)} {show(score, 'loss')}"
    if measure == LOSS:
        best += " nats per token"
    return Answer(GOOD, f"{best}: {label}", remark)


def _fastest(views: Sequence[RunView]) -> Answer:
    speeds = sorted((v.numbers.speed.tokens_per_s, v.label) for v in views if v.numbers.speed)
    if not speeds:
        return Answer(FAST, "Unknown: no step was timed")
    low, median, high = speeds[0], statistics.median(speed for speed, _ in speeds), speeds[-1]
    text = f"{show(median, 'count')} tokens/s, median of the runs"
    if len(speeds) == 1:
        return Answer(FAST, text)
    ends = f"{show(low[0], 'count')} ({low[1]}) to {show(high[0], 'count')} ({high[1]})"
    return Answer(FAST, text, ends)


def _study_head(seen: StudyView, law: LawView | None) -> Head:
    states = [result.state for result in seen.results]
    text = f"{states.count('finished')} of {plural(len(states), 'cell')} finished"
    counted = Counter(state for state in states if state != "finished")
    others = ", ".join(f"{count} {state}" for state, count in counted.items())
    answers = [Answer(WORKED, text, others, "open" if others else "good")]
    scaling, path = seen.study.scaling, seen.study.path.resolve()
    if scaling:
        kicker, subtitle = "A scaling study", DESCRIPTIONS[scaling.kind]
        answers += _scaling(seen)
    else:
        kicker = "A ladder" if law else "A study"
        subtitle = "; ".join(f"{key}: {', '.join(map(show, x))}" for key, x in seen.swept.items())
        quality = _best_cell(seen)
        if law:
            quality = Answer("How good is the law?", law.summary or "Unknown", law.remark)
        answers += [quality, _fastest(seen.views)]
    bad = {r.run.path: r for r in seen.results if r.state == "failed"}
    problems = [
        Problem("failed cell", r.reason or "failed", label=r.cell.label) for r in bad.values()
    ]
    for view in seen.views:  # the reason of a bad cell says how it ended
        ends = ("failure", "divergence", "kill") if view.run.path in bad else ()
        problems += [one for one in problems_of(view, view.label) if one.name not in ends]
    answers += [cost(seen.views), wrong(problems)]
    return Head(kicker, path.name, subtitle, answers)


def _best_cell(seen: StudyView) -> Answer:
    if not seen.winners.groups:
        return Answer(GOOD, NO_BEST, seen.winners.remark.removeprefix(f"{NO_BEST}: "))
    best, *others = seen.winners.groups
    text = f"Best {seen.title} {show(best.median, 'loss')} {seen.unit}".rstrip()
    parts = [best.label]
    if best.seeds:
        parts.append(f"median of {best.seeds}")
    parts += [f"{group.label}: {show(group.median, 'loss')}" for group in others]
    return Answer(GOOD, text, ", ".join(filter(None, [*parts, seen.winners.remark])))


def _scaling(seen: StudyView) -> list[Answer]:
    """How well it scales, and how fast it was."""
    question = "How well does it scale?"
    measured = [setup for setup in seen.setups if setup.measured]
    if not measured:
        reasons = dict.fromkeys(s.missing.get("step_ms", "not run yet") for s in seen.setups)
        return [Answer(question, f"Unknown: {'; '.join(reasons)}"), Answer(FAST, "Unknown")]
    largest = max(measured, key=lambda setup: setup.world)
    fastest = max(measured, key=lambda setup: setup.values["samples_per_s"])
    if seen.recommendations:
        best = seen.recommendations[0]
        quality = Answer("Which setup is best?", best.name, best.why)
    elif "efficiency" in largest.values and len({setup.world for setup in measured}) > 1:
        efficiency = show(largest.values["efficiency"], "share")
        text = f"Efficiency {efficiency} on {plural(largest.world, 'rank')}"
        quality = Answer(question, text, f"Speed-up {show(largest.values['speedup'], 'hours')}")
    else:
        alone = f"only {plural(largest.world, 'rank')} measured"
        quality = Answer(question, f"Unknown: {largest.missing.get('efficiency', alone)}")
    step = show(fastest.values["step_ms"], "rate")
    text = f"{show(fastest.values['samples_per_s'], 'rate')} samples/s"
    remark = f"{fastest.name}, the fastest setup: {step} ms a step"
    return [quality, Answer(FAST, text, remark)]
