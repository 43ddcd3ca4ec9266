"""Scaling studies: `scale` writes the grid of a sweep from a mode and numbers of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from windlass.errors import UserError, argument, did_you_mean, plural
from windlass.processes import usable_cores, visible_gpus
from windlass.recipe import Changes, Recipe
from windlass.recipe.strategies import STRATEGIES
from windlass.run import Run
from windlass.study.grid import NODES, WORLD, Assignment, Cell
from windlass.study.progress import Progress
from windlass.study.runner import Sweep
from windlass.study.study import Scaling, Study, load_study

MODES = ("strong", "fixed-data", "weak", "strategies")
WINDOWS = 20  # `train` lines of a cell, at least


def scale(
    recipe: Recipe | Run | Study | str | Path,
    worlds: Sequence[int] = (),
    overrides: Changes = (),
    *,
    mode: str = "",
    grow: str = "",
    nodes: Sequence[int] = (),
    path: str | Path | None = None,
    probes: bool = True,
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> Study:
    """Train every open cell of a scaling study on this machine, one at a time; returns the study.

    A study over hosts is only created: `windlass submit STUDY` trains its cells.

    Args:
        recipe: The settings to start from; or a preset of studies, with options of its own; or a
            study, to continue it.
        worlds: Numbers of ranks; the smallest is the baseline. Without them, `path` is continued.
        overrides: Changes to the recipe.
        mode: It says what stays as the ranks grow (`windlass scale --help`); default `strong`.
        grow: With `weak`: `batch` or `model`, what grows with the ranks.
        nodes: Hosts of each of the `worlds`; all ranks of a job train a cell.
        path: The study's directory; None: `studies/<preset>-<mode>-<hash>`.
        probes: Measure steps without communication.
        retry_failed: Train failed cells again.
        progress: Shows the cells; None: on standard output.

    Raises UserError if a cell is impossible, and Stopped after a signal, with everything saved.
    """
    study = create_scaling(recipe, worlds, overrides, nodes=nodes, mode=mode, grow=grow, path=path)
    if study.over_hosts:
        return study
    with progress or Progress() as shown:
        Sweep(study, study.cells, retry_failed=retry_failed, probes=probes, progress=shown).start()
    return study


def create_scaling(
    source: Recipe | Run | Study | str | Path,
    worlds: Sequence[int] = (),
    overrides: Changes = (),
    *,
    nodes: Sequence[int] = (),
    mode: str = "",
    grow: str = "",
    path: str | Path | None = None,
) -> Study:
    """Create the scaling study of these options, or add its cells to one; a preset has defaults."""
    recipe, preset, place = load_study(source, "scale", overrides)
    worlds = worlds or preset.get("worlds", ())
    mode, grow = mode or preset.get("mode", ""), grow or preset.get("grow", "")
    path = path or place
    if path is None:
        first = scaling_of(None, mode, grow)
        name = "-".join(filter(None, (recipe.preset, first.mode, first.grow)))
        path = Path("studies") / f"{name}-{recipe.config_hash[:8]}"
    before = Study.open(path) if Study.is_study(path) else None
    old = before.scaling if before else None
    scaling = scaling_of(old, mode, grow, preset.get("preset", ""))
    if worlds:
        recipe.check_packages()
        device = recipe.parallel.device
        on_gpu = device == "cuda" or (device == "auto" and visible_gpus())
        if not nodes and not on_gpu:  # equal threads for each rank, so that times compare ranks
            threads = before.recipe.train.threads if before else recipe.train.threads
            threads = threads or max(1, usable_cores() // max(worlds))
            recipe = recipe.replace({"train.threads": threads})
        smallest = min(worlds)
        if before and scaling.grow == "model":  # the ranks at which the recipe has its own layers
            cell, layers = before.cells[0], before.recipe.model.layers
            smallest = layers * (cell.world or 1) // cell.recipe.model.layers
        listed = assignments(recipe, scaling, worlds, nodes, smallest)
        steps = [one.get("train.steps", recipe.train.steps) for one in listed]
        fewest = min(number if isinstance(number, int) else 1 for number in steps)
        every = min(recipe.telemetry.every, max(1, fewest // WINDOWS))
        recipe = recipe.replace({"telemetry.every": every})
    elif before and before.scaling:
        recipe, listed = before.recipe, [cell.assignment for cell in before.cells]
    else:
        ranks = "give numbers of ranks to compare; the smallest is the baseline"
        raise UserError(f"{argument('worlds', [1, 2, 4])}: {ranks}")
    return Study.create(recipe, listed, Path(path), scaling=scaling)


def scaling_of(before: Scaling | None, mode: str = "", grow: str = "", preset: str = "") -> Scaling:
    """A study's options: the given ones, else the existing study's, else the defaults."""
    mode = mode or (before.mode if before else "strong")
    if mode not in MODES:
        raise UserError(f"{argument('mode', mode)}: {did_you_mean(mode, MODES)}")
    if mode == "weak":
        grow = grow or (before.grow if before else "batch")
        if grow not in ("batch", "model"):
            raise UserError(f"{argument('grow', grow)}: write batch or model")
    elif grow:
        belongs = f"{argument('grow', grow)} belongs to {argument('mode', 'weak')}"
        raise UserError(f"{belongs}, and the mode is {mode}: leave it out")
    if before is None:
        return Scaling(mode, grow, preset)
    if (mode, grow) != (before.mode, before.grow):
        words = argument("mode", before.kind)
        raise UserError(f"the existing study has {words}: give another {argument('path', 'DIR')}")
    return before


def assignments(
    recipe: Recipe,
    scaling: Scaling,
    worlds: Sequence[int],
    nodes: Sequence[int] = (),
    smallest: int = 0,
) -> list[Assignment]:
    """The grid of a study; `smallest`: the ranks of the recipe's own model; 0: of the baseline."""
    worlds = list(dict.fromkeys(worlds))
    _check(recipe, scaling, worlds, nodes)
    places: list[Assignment] = [{WORLD: world} for world in worlds]
    if nodes:
        places = [{WORLD: world, NODES: n} for world, n in zip(worlds, nodes, strict=True)]
    if scaling.mode == "strategies":
        kinds = strategies(recipe, worlds[0], nodes[0] if nodes else 1)
        return [places[0] | kind for kind in kinds]
    first, layers, train = smallest or min(worlds), recipe.model.layers, recipe.train
    for one, world in zip(places, worlds, strict=True):
        if scaling.grow == "model":
            one["model.layers"] = layers * world // first
            if layers * world % first:
                problem = f"model.layers = {layers} at {plural(first, 'rank')} makes"
                problem = f"{problem} {layers * world / first:g} at {world}"
                multiple = first // math.gcd(first, world)
                raise UserError(f"{problem}: write a multiple of {multiple}")
        elif scaling.mode != "strong":
            one["train.global_batch"] = train.global_batch * world
            if scaling.mode == "fixed-data" and isinstance(train.steps, int):
                one["train.steps"] = train.steps // world
    return places


def _check(recipe: Recipe, scaling: Scaling, worlds: list[int], nodes: Sequence[int]) -> None:
    """Raise UserError if the options do not make a scaling study."""
    given, hosts = argument("worlds", worlds), argument("nodes", list(nodes))
    if nodes and len(nodes) != len(worlds):
        raise UserError(f"{hosts}: give one number of hosts for each of {given}")
    if any(number < 1 for number in (*worlds, *nodes)):
        raise UserError(f"{given}: numbers of ranks and hosts are 1 and more")
    for world, n in zip(worlds, nodes, strict=False):
        if world % n:
            problem = f"{plural(n, 'host')} cannot share {plural(world, 'rank')} equally"
            raise UserError(f"{given}, {hosts}: {problem}")
    if scaling.mode == "strategies" and len(worlds) > 1:
        mode = argument("mode", scaling.mode)
        raise UserError(f"{given}: {mode} compares at one number of ranks; give one")
    steps, common = recipe.train.steps, math.lcm(*worlds)
    if scaling.mode == "fixed-data" and isinstance(steps, int) and steps % common:
        below = steps // common * common
        near = " or ".join(str(n) for n in (below, below + common) if n)
        remedy = f"write train.steps={near}, or other worlds"
        raise UserError(f"train.steps = {steps} cannot be divided by {common}: {remedy}")
    if scaling.grow == "model" and recipe.model.kind != "gpt":
        needs = 'needs model.kind = "gpt": it adds layers, and other models have fixed weights'
        raise UserError(f"{argument('grow', 'model')} {needs}")


def strategies(recipe: Recipe, world: int, nodes: int) -> list[Assignment]:
    several = [strategy.name for strategy in STRATEGIES.values() if strategy.distributed]
    kinds = several if world > 1 else ["single", "shard_grad_op", "full_shard"]
    group = world // nodes if nodes > 1 else STRATEGIES["hybrid_shard"].sizes(world).dp_shard
    size = recipe.parallel.shard_size
    if not 1 < (size or group) < world:  # it would be ddp or full_shard
        kinds = [name for name in kinds if name != "hybrid_shard"]
    checkpointing = recipe.parallel.activation_checkpointing
    modes = ("none", "full" if checkpointing == "none" else checkpointing)
    possible, problems = list[Assignment](), list[UserError]()
    for kind, offload, mode in itertools.product(kinds, (False, True), modes):
        one: Assignment = {"parallel.strategy": kind, "parallel.offload": offload}
        one["parallel.activation_checkpointing"] = mode
        if size:
            one["parallel.shard_size"] = size if kind == "hybrid_shard" else 0
        try:
            Cell.of(recipe, one)
            possible.append(one)
        except UserError as error:
            problems.append(error)
    if not possible:
        raise problems[0]
    return possible
