"""Scaling studies: from a mode and numbers of ranks to cells, and the work through them on this machine. No torch.

A scaling study is a study like that of a sweep, and killed and resumed like one. Beside the cells' runs it has `probes/<cell>/`
and `machine.json` (study/probe.py), and in `study.json` what it measures. `study/scaling.py` computes its numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windlass.data.prepare import prepare
from windlass.errors import UserError, argument, did_you_mean
from windlass.estimate.optimum import resolve_steps
from windlass.estimate.plan import assemble, subject_of
from windlass.processes import usable_cores, visible_gpus
from windlass.recipe import Recipe
from windlass.recipe.strategies import STRATEGIES
from windlass.study import probe
from windlass.study.grid import MODES, NODES, REPEAT, WORLD, Assignment, Cell, Scaling
from windlass.study.presets import load_study
from windlass.study.study import Study
from windlass.study.sweep import Sweep

WINDOWS = 20  # `train` lines that a cell has at least


def scale(
    recipe: Recipe | str | Path,
    worlds: Sequence[int] = (),
    *,
    mode: str = "",
    grow: str = "",
    nodes: Sequence[int] = (),
    repeats: int | None = None,
    warmup: int | None = None,
    project: Sequence[int] = (),
    precisions: Sequence[str] = (),
    path: str | Path | None = None,
    preset: str = "",
    probes: bool = True,
    retry_failed: bool = False,
    only: int | None = None,
    show: Callable[[Study], None] = lambda study: None,
    notify: Callable[[str], None] = lambda text: None,
) -> Study:
    """Train every cell of a scaling study that is not done yet on this machine, one at a time, and return the study.

    A study over several hosts is returned as it is: jobs train its cells (`windlass scale --nodes`).

    `recipe` is also a preset of studies, which has options of its own, or a study's directory, to continue it.
    `worlds` are the numbers of ranks; the smallest is the baseline. `mode` (default `strong`) says what stays when they grow:

    - `strong`: the global batch, which is the recipe's, and the steps
    - `fixed-data`: the batch of a rank, which is the recipe's `train.global_batch`, and the data: the steps shrink
    - `weak`: the batch of a rank and the steps; or, with `grow="model"`, the global batch, and `model.layers` grows
    - `strategies`: everything; at one number of ranks strategies, offload, activation checkpointing and `precisions` differ

    `nodes` are the hosts of each of the `worlds`, where all ranks of a job train a cell. Each setup is trained `repeats`
    times (default 1); `warmup` steps of each start (5) are not counted; `project` are numbers of ranks to predict for. `path`
    is the study's directory (None: `studies/<preset>-<mode>-<hash>`); without `worlds` the study there is continued. `preset`
    is the study preset that the options are from. `probes` False leaves out the measurements without communication and of
    the machine. `retry_failed`, `only`, `show` and `notify` are those of `sweep`.

    Raises UserError where a cell cannot be, Stopped after a signal.
    """
    base, options = load_study(recipe, "scale")
    if isinstance(recipe, str | Path) and Study.is_study(recipe):
        path = path or recipe
    given: dict[str, Any] = {
        "worlds": worlds,
        "mode": mode,
        "grow": grow,
        "repeats": repeats,
        "warmup": warmup,
    }
    given |= {"project": project, "preset": preset, "precisions": precisions}
    options |= {name: value for name, value in given.items() if value not in ("", None, (), [])}
    if options.get("worlds") and not nodes:
        prepare(base)  # else the first cell would pay for it
    study = create_study(base, nodes=nodes, path=path, **options)
    for note in study.notes:
        notify(note)
    if NODES not in study.keys or only is not None:  # else jobs of a cluster train the cells
        run_study(
            study, probes=probes, retry_failed=retry_failed, only=only, show=show, notify=notify
        )
    return study


def create_study(
    recipe: Recipe,
    worlds: Sequence[int] = (),
    *,
    nodes: Sequence[int] = (),
    precisions: Sequence[str] = (),
    path: str | Path | None = None,
    threads: int = 0,
    preset: str = "",
    write: bool = True,
    **options: Any,
) -> Study:
    """The scaling study of these options, written to disk, or what is there grown by its cells; see `scale`.

    `threads` are those of a rank on a CPU, where the cells do not run on this machine; `options` those of `Scaling`. `write`
    False: nothing is written.
    """
    if path is None:
        first = merge(None, options, preset)
        name = preset or "-".join(filter(None, (recipe.preset, first.mode, first.grow)))
        path = Path("studies") / f"{name}-{recipe.config_hash[:8]}"
    path, before = Path(path), Study.open(path) if Study.is_study(path) else None
    scaling = merge(before.scaling if before else None, options, preset)
    if not worlds:
        if before is None or before.scaling is None:
            raise UserError(
                f"{argument('worlds', [1, 2, 4])}: name the numbers of ranks to compare; the smallest is the baseline"
            )
        listed = [cell.assignment for cell in before.cells]
        return (
            before
            if scaling == before.scaling
            else Study.create(before.recipe, listed, path, scaling=scaling)
        )
    recipe.check_packages()
    recipe = with_threads(recipe, max(worlds), before, threads)
    smallest = min([*worlds, *(cell.world or 1 for cell in before.cells)] if before else worlds)
    listed = assignments(recipe, scaling, worlds, nodes, precisions, smallest)
    every = min(recipe.telemetry.every, max(1, fewest_steps(recipe, listed) // WINDOWS))
    return Study.create(
        recipe.replace({"telemetry.every": every}), listed, path, scaling=scaling, write=write
    )


def merge(before: Scaling | None, options: dict[str, Any], preset: str) -> Scaling:
    """What a study measures, from what it measured before and from the options that were given."""
    given = options | ({"project": tuple(options["project"])} if "project" in options else {})
    mode = given.get("mode", before.mode if before else "strong")
    if mode not in MODES:
        raise UserError(f"{argument('mode', mode)}: {did_you_mean(mode, MODES)}")
    if given.get("grow") and mode != "weak":
        own = argument("grow", given["grow"])
        raise UserError(
            f"{own} belongs to {argument('mode', 'weak')}, and the mode is {mode}: leave it out"
        )
    if mode == "weak":
        given.setdefault("grow", before.grow if before else "batch")
        if given["grow"] not in ("batch", "model"):
            raise UserError(f"{argument('grow', given['grow'])}: write batch or model")
    if before and (mode, given.get("grow", "")) != (before.mode, before.grow):
        words = " ".join(filter(None, (before.mode, before.grow)))
        raise UserError(
            f"the study that is there has {argument('mode', words)}: give another {argument('path', 'DIR')}"
        )
    if len({n for n in given.get("project", ()) if n > 0}) != len(given.get("project", ())):
        raise UserError(
            f"{argument('project', list(given['project']))}: write different numbers of ranks"
        )
    return replace(before or Scaling(mode, preset=preset), **given)


def with_threads(recipe: Recipe, largest: int, before: Study | None, threads: int) -> Recipe:
    """The recipe with the threads of a rank on a CPU, which are the same in all cells: else the times compare threads."""
    if recipe.parallel.device == "cuda" or (recipe.parallel.device == "auto" and visible_gpus()):
        return recipe
    asked, there = recipe.train.threads, before.recipe.train.threads if before else 0
    if asked and there and asked != there:
        raise UserError(
            f"train.threads = {asked}: the study's cells have {there}, and only equal ones can be compared"
        )
    return recipe.replace(
        {"train.threads": asked or there or threads or max(1, usable_cores() // largest)}
    )


def assignments(
    recipe: Recipe,
    scaling: Scaling,
    worlds: Sequence[int],
    nodes: Sequence[int] = (),
    precisions: Sequence[str] = (),
    smallest: int = 0,
) -> list[Assignment]:
    """What each cell sets, in the order in which they are run: repeats outermost, every other one in reverse.

    So a machine that drifts favours no number of ranks. `smallest` is the baseline, where `worlds` are added to a study.
    """
    worlds = list(dict.fromkeys(worlds))
    if nodes and len(nodes) != len(worlds):
        raise UserError(
            f"{argument('nodes', list(nodes))}: one number of hosts for each of {argument('worlds', worlds)}"
        )
    check_worlds(recipe, scaling, worlds)
    places = [
        {WORLD: world} | ({NODES: nodes[i]} if nodes else {}) for i, world in enumerate(worlds)
    ]
    if scaling.mode == "strategies":
        setups = [
            places[0] | one
            for one in strategies(recipe, worlds[0], nodes[0] if nodes else 1, precisions)
        ]
    else:
        setups = [
            place | settings_of(recipe, scaling, place[WORLD], smallest or min(worlds))
            for place in places
        ]
    rounds = [setups if repeat % 2 else setups[::-1] for repeat in range(1, scaling.repeats + 1)]
    if scaling.repeats == 1:
        return setups
    return [one | {REPEAT: n} for n, setups in enumerate(rounds, 1) for one in setups]


def check_worlds(recipe: Recipe, scaling: Scaling, worlds: list[int]) -> None:
    """UserError where these numbers of ranks cannot share the recipe's batch, steps or layers."""
    if any(world < 1 for world in worlds):
        raise UserError(f"{argument('worlds', worlds)}: numbers of ranks are 1 and more")
    if scaling.mode == "strategies" and len(worlds) > 1:
        raise UserError(
            f"{argument('worlds', worlds)}: {argument('mode', 'strategies')} compares at one number of ranks; give one"
        )
    key, value = "", 0
    if scaling.mode in ("strong", "strategies") or scaling.grow == "model":
        key, value = "train.global_batch", recipe.train.global_batch
    elif scaling.mode == "fixed-data" and isinstance(recipe.train.steps, int):
        key, value = "train.steps", recipe.train.steps
    if key and (odd := [world for world in worlds if value % world]):
        step = math.lcm(*worlds)
        near = " or ".join(str(n) for n in (value // step * step, (value // step + 1) * step) if n)
        ranks = " and ".join(map(str, odd))
        raise UserError(
            f"{key} = {value} cannot be divided among {ranks} ranks: write {key}={near}, or other worlds"
        )
    if scaling.grow == "model" and recipe.model.kind != "gpt":
        raise UserError(
            f'{argument("grow", "model")} makes more layers of a model.kind = "gpt", not of weights that exist'
        )


def settings_of(recipe: Recipe, scaling: Scaling, world: int, smallest: int) -> Assignment:
    """What a number of ranks changes of the recipe's settings."""
    train = recipe.train
    if scaling.grow == "model":
        layers = recipe.model.layers * world
        if layers % smallest:
            raise UserError(
                f"model.layers = {recipe.model.layers} at {smallest} ranks makes {layers / smallest:g} at {world}: write a "
                f"multiple of {smallest // math.gcd(smallest, world)}"
            )
        return {"model.layers": layers // smallest}
    if scaling.mode == "fixed-data" and isinstance(train.steps, int):
        return {
            "train.global_batch": train.global_batch * world,
            "train.steps": train.steps // world,
        }
    return {} if scaling.mode == "strong" else {"train.global_batch": train.global_batch * world}


def strategies(
    recipe: Recipe, world: int, nodes: int, precisions: Sequence[str]
) -> list[Assignment]:
    """The combinations of strategy, offload, activation checkpointing and precision that this recipe can be trained with."""
    several = [strategy.name for strategy in STRATEGIES.values() if strategy.distributed]
    kinds = several if world > 1 else ["single", "shard_grad_op", "full_shard"]
    group = (
        world // nodes
        if nodes > 1
        else max((n for n in range(1, world) if world % n == 0), default=1)
    )
    if not 1 < (recipe.parallel.shard_size or group) < world:
        kinds = [name for name in kinds if name != "hybrid_shard"]  # it would be ddp or full_shard
    checkpointing = recipe.parallel.activation_checkpointing
    modes = ("none", "full" if checkpointing == "none" else checkpointing)
    possible, problems = [], []
    for precision, kind, offload, mode in itertools.product(
        precisions or [""], kinds, (False, True), modes
    ):
        one = {
            "parallel.strategy": kind,
            "parallel.offload": offload,
            "parallel.activation_checkpointing": mode,
        }
        one = ({"train.precision": precision} if precision else {}) | one
        if size := recipe.parallel.shard_size:
            one["parallel.shard_size"] = size if kind == "hybrid_shard" else 0
        try:
            Cell.of(recipe, one)
            possible.append(one)
        except UserError as error:
            problems.append(error)
    if not possible:
        raise problems[0]
    return possible


def fewest_steps(recipe: Recipe, listed: Sequence[Assignment]) -> int:
    """Steps of the shortest cell, 1 where that is not known before the data is prepared."""
    steps = []
    for one in listed:
        if one.get(REPEAT, 1) == 1:
            cell = Cell.of(recipe, one)
            try:
                steps.append(resolve_steps(cell.recipe))
            except UserError:
                steps.append(
                    assemble(subject_of(cell.recipe, None, (), one[WORLD], "", None), None).steps
                    or 1
                )
    return min(steps)


def run_study(
    study: Study,
    *,
    probes: bool = True,
    retry_failed: bool = False,
    only: int | None = None,
    show: Callable[[Study], None] = lambda study: None,
    notify: Callable[[str], None] = lambda text: None,
) -> None:
    """Train the cells that are open, one at a time; after the first of each setup, its probe."""
    if only is not None and not 0 <= only < len(study.cells):
        raise UserError(f"{argument('only', only)}: the cells are 0 to {len(study.cells) - 1}")
    cells, launch = study.cells if only is None else [study.cells[only]], NODES in study.keys
    if launch:
        prepare(study.recipe)
    if remark := oversubscribed(study):
        notify(remark)
    for cell in cells:
        if probes and not launch:
            probe.measure_machine(study, cell.world or 1, notify)
        Sweep(
            study, [cell], retry_failed=retry_failed, launch=launch, show=show, notify=notify
        ).run()
        if probes and cell.repeat == 1 and study.result(cell).state == "finished":
            probe.run_probe(study, cell, notify, retry_failed)


def oversubscribed(study: Study) -> str:
    """That ranks and threads are more than this machine's cores; empty where they are not, or train elsewhere."""
    threads, cores = study.recipe.train.threads, usable_cores()
    on_cpu = study.recipe.parallel.device == "cpu" or not visible_gpus()
    worlds = [n for n in study.values[WORLD] if n * threads > cores]
    if NODES in study.keys or not on_cpu or not worlds or not threads:
        return ""
    ranks = f"{' and '.join(map(str, worlds))} ranks of {threads} thread{'s' * (threads > 1)}"
    return f"{ranks} share {cores} cores: they take turns, and their times say nothing about more machines"
