"""The proof of mixtures: a run that changes its ranks, is killed, and branches with other weights."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from windlass.data.mixture import BLOCK, MixedSamples, Mixture, Stage
from windlass.data.open import open_data
from windlass.run import last_start
from windlass.verification.bench import SEEN, STEPS, UNSEEN, Bench, Outcome

SAMPLES = BLOCK // 4  # of a step
BRANCH = 8  # the step of the branch, after two blocks; one block follows
WEIGHTS = {"verbs": 0.6, "notes": 0.397, "rare": 0.003}
LATER = {"verbs": 0.2, "notes": 0.797, "rare": 0.003}


def mixture_exact(bench: Bench) -> Outcome:
    """Shares after each block, and every sample of the run, against their definition."""
    text, sources = Path(__file__).read_text(encoding="utf-8"), list[dict[str, Any]]()
    for number, (name, weight) in enumerate(WEIGHTS.items()):
        path = bench.folder / f"{name}.txt"
        path.write_text(text[900 * number : 900 * (number + 1)], encoding="utf-8")
        sources.append({"name": name, "source": str(path), "weight": weight})
    settings = settings_of(bench, sources)
    later = settings | {"data.mix": [s | {"weight": LATER[s["name"]]} for s in sources]}
    read = moved_run(bench, settings, later)
    mixed = open_data(bench.settings("mixed", **settings)).train
    assert isinstance(mixed, MixedSamples)
    counts = off_by(mixed, read)
    whole = not repeats(mixed, read) and not counts
    stages = [Stage(at, tuple(w.values()), (0, 0, 0)) for at, w in _starts()]
    recipe = bench.settings("mixed", **settings)
    expected = Mixture(mixed, stages, recipe.run.seed, recipe.data.order)
    defined = bool((expected.indices(np.arange(len(read))) == np.array(read)).all())
    anew = Mixture(mixed, [Stage(0, tuple(LATER.values()), (0, 0, 0))], recipe.run.seed)
    forgetful = read[: BRANCH * SAMPLES] + anew.indices(np.arange(BLOCK, 2 * BLOCK)).tolist()
    if not repeats(mixed, forgetful):
        return False, f"{UNSEEN}a branch that begins the sources anew"
    second = [i for i, sample in enumerate(read[:BLOCK]) if sample >= mixed.starts[1]]
    moved = [0 if i in second[:2] else sample for i, sample in enumerate(read)]
    if not off_by(mixed, moved):
        return False, f"{UNSEEN}two samples of another source"
    kind = f"{len(read):,} samples of 3 sources, order as defined: {defined}"
    return defined and whole, f"{kind}, shares within one sample: {not counts}{SEEN}"


def settings_of(bench: Bench, sources: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of a tiny training on a mixture, a quarter of a block in each step."""
    return {
        "data.mix": sources,
        "data.dir": str(bench.folder / "mix"),
        "data.tokenizer": "byte",
        "data.packing": "packed",
        "data.format": "text",
        "data.max_tokens": 0,
        "model.context": 16,
        "train.global_batch": SAMPLES,
        "train.micro_batch": SAMPLES // 4,
    }


def _starts() -> list[tuple[int, dict[str, float]]]:
    return [(0, WEIGHTS), (BRANCH * SAMPLES, LATER)]


def moved_run(bench: Bench, settings: dict[str, Any], later: dict[str, Any]) -> list[int]:
    """The samples that a run of STEPS steps reads: two ranks, a kill, one rank, and a branch with
    the settings `later` on the most ranks."""
    two, most = min(2, max(bench.worlds)), max(bench.worlds)
    if two == 1:
        bench.untried.append("2 and 4 ranks (needs them)")
    branch = {"branch_from": f"{bench.folder / 'mixed'}@{BRANCH}"}
    parts: list[tuple[str, int, int, dict[str, Any]]] = [
        ("mixed", two, BRANCH - 2, {"kill_after": BRANCH - 2}),
        ("mixed", 1, BRANCH, {"stop_at": BRANCH}),
        ("branched", most, STEPS, branch),
    ]
    read = list[int]()
    for number, (run, world, stop, task) in enumerate(parts):
        record = str(bench.folder / f"mixed-reads-{number}")
        changed = later if run == "branched" else settings
        started = bench.train(run, world, {"record": record, **task}, **changed)
        first = int(last_start(started.ledger())["step"])
        del read[first * SAMPLES :]  # what the kill lost
        read += recorded(record, world, stop - first)
    return read


def recorded(record: str, world: int, steps: int) -> list[int]:
    """The samples of a start's first steps, in order, from the records of its ranks."""
    ranks = [json.loads(Path(f"{record}-{rank}.json").read_text()) for rank in range(world)]
    # The loader reads ahead: only the samples of steps that were done count.
    turns = list(zip(*ranks, strict=False))[: steps * 4 // world]
    return [i for turn in turns for micro in turn for i in micro]


def off_by(mixed: MixedSamples, read: list[int]) -> list[str]:
    """The blocks and sources whose number of samples differs by one or more from its share."""
    sources, wrong = np.searchsorted(mixed.starts, read, side="right") - 1, list[str]()
    starts = [*_starts(), (len(read), LATER)]
    for (begin, weights), (end, _) in itertools.pairwise(starts):
        exact = [Fraction(str(weight)) for weight in weights.values()]
        for stop in range(begin + BLOCK, end + 1, BLOCK):
            counts = np.bincount(sources[begin:stop], minlength=len(exact)).tolist()
            shares = [(stop - begin) * weight / sum(exact) for weight in exact]
            names = zip(weights, counts, shares, strict=True)
            wrong += [f"{name} at {stop}" for name, n, share in names if abs(n - share) >= 1]
    return wrong


def repeats(mixed: MixedSamples, read: list[int]) -> int:
    """The samples that a source gives twice in one of its epochs."""
    sources, count = np.searchsorted(mixed.starts, read, side="right") - 1, 0
    for number, part in enumerate(mixed.parts):
        own = np.array(read)[sources == number]
        for first in range(0, len(own), len(part)):
            epoch = own[first : first + len(part)]
            count += len(epoch) - len(np.unique(epoch))
    return count
