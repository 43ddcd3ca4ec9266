"""Scaling studies as `windlass scale` leaves them, without training: a test chooses the times."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from report_fixtures import stamp

from windlass.model.size import count
from windlass.recipe import Recipe
from windlass.study.grid import WORLD, Assignment
from windlass.study.probes import probe_dir
from windlass.study.study import Scaling, Study

SETTINGS = [
    *"model.layers=2 model.width=64 model.heads=2 model.context=32 train.steps=20".split(),
    *"model.vocab=0 train.global_batch=8 telemetry.every=5 train.micro_batch=1".split(),
]
VOCAB = 100
Step = Callable[[dict[str, Any]], Mapping[str, float]]


def write_run(
    path: Path,
    recipe: Recipe,
    world: int,
    phases: Mapping[str, float],
    *,
    finished: bool = True,
    cores: int = 8,
    hosts: int = 1,
    device: str = "CPU",
    peak_mb: float = 500.0,
    slow_start: float = 10.0,
) -> None:
    """A run whose steps take `phases`, but the first five `slow_start` times that."""
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(recipe.toml())
    placed = [{"rank": r, "host": f"node-{r * hosts // world}", "threads": 2} for r in range(world)]
    environment = {"machine": {"cores": cores}, "ranks": placed}
    (path / "environment.json").write_text(json.dumps(environment))
    size = count(recipe.model, VOCAB).total
    batch, context = recipe.train.global_batch, recipe.model.context
    seconds, lines = {"startup": 3.0}, list[dict[str, Any]]()

    def line(kind: str, step: int, **fields: Any) -> None:
        spent = {"time": stamp(sum(seconds.values())), "attempt": 0, "seconds": dict(seconds)}
        lines.append({"kind": kind, "step": step, **spent, **fields})

    started = {"world": world, "strategy": recipe.strategy(world).name, "precision": "fp32"}
    started |= {"device": device, "parameters": size, "trained": size, "threads": 2, "steps": 20}
    started |= {"micro_batch": 1, "accumulation": batch // world, "global_batch": batch}
    line("event", 0, event="started", **started, samples_per_epoch=160, data={"vocab": VOCAB})
    for step in (5, 10, 15, 20) if finished else (5,):
        own = {name: ms * (slow_start if step == 5 else 1) for name, ms in phases.items()}
        seconds["train"] = seconds.get("train", 0.0) + 5 * own["step_ms"] / 1e3
        rate, loss = batch / own["step_ms"] * 1e3, 4 - step / 10
        counted = {"tokens": step * batch * context, "samples": step * batch}
        counted |= {"samples_per_s": rate, "tokens_per_s": rate * context}
        line("train", step, loss=loss, **counted, **own)
        if step == 5:
            line("event", step, event="first_step", startup_s=seconds["startup"])
    if finished:
        total = sum(seconds.values())
        line("eval", 20, suite="loss", loss=2.5, samples=8, samples_per_s=8.0, runtime_s=1.0)
        if "squad" in recipe.eval.suites:
            line("eval", 20, suite="squad", exact_match=12.5, f1=25.0, items=8)
        summary = {"steps": 20, "world": world, "parameters": size, "peak_mem_mb": peak_mb}
        summary |= {"final_loss": loss, "train_loss_mean": 2.9, "avg_cpu_util_pct": 87.5}
        summary |= {"runtime_s": total, "samples_per_s_whole_run": 20 * batch / (total - 3)}
        line("summary", 20, **summary, wall_time={"compile": 0.0})
        line("event", 20, event="finished")
    (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def build_scaling(
    path: Path,
    scaling: Scaling,
    cells: Sequence[Assignment],
    step: Step,
    *,
    probe: Step | None = None,
    settings: Sequence[str] = (),
    waiting: Sequence[int] = (),
    failed: Sequence[int] = (),
    **rest: Any,
) -> Study:
    """A study whose cells take the times of `step`; some wait or failed, by number."""
    base = Recipe.load("quickstart", [*SETTINGS, *settings])
    study = Study.create(base, list(cells), path, scaling=scaling)
    for number, cell in enumerate(study.cells):
        if number in waiting:
            continue
        world, phases = cell.world or cell.nodes, dict(step(cell.assignment))
        options = {"peak_mb": phases.pop("peak_mb", 500.0), "finished": number not in failed}
        run = study.run_of(cell)
        write_run(run.path, cell.recipe, world, phases, hosts=cell.nodes, **options, **rest)
        if number in failed:
            study.set_failure(cell, "exit code 1: out of memory")
        if probe and world > 1 and not probe_dir(study, cell).exists():
            place, batch = probe_dir(study, cell), cell.recipe.train.global_batch // world
            alone = cell.recipe.replace({"train.global_batch": batch})
            for rank in range(world):
                write_run(place / str(rank), alone, 1, probe(cell.assignment), slow_start=3.0)
            (place / "probe.json").write_text('{"state": "finished", "reason": ""}')
    return study


def worlds(*ranks, **settings):
    cells = []
    for n in ranks:
        own = {key.replace("__", "."): value(n) for key, value in settings.items()}
        cells.append({WORLD: n} | own)
    return cells


def phases(step, data=1.0):
    parts = {"forward_ms": 0.3 * step, "backward_ms": 0.5 * step, "optimizer_ms": 0.1 * step}
    return {"step_ms": step, "data_ms": data} | parts
