"""`windlass eval`: what a model scores, measured once and written down."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

UNITS = {"loss": "nats/token", "exact_match": "%", "f1": "%", "runtime_s": "s"}


def evaluate(
    run: str = typer.Argument(
        ...,
        metavar="RUN|HF_DIR",
        help="A run, RUN@STEP, RUN@best, a checkpoint, a directory of transformers, or hf:NAME.",
    ),
    overrides: list[str] = typer.Argument(
        None,
        metavar="[KEY=VALUE]...",
        help="Settings to change, as data.eval_source=FILE or eval.hellaswag_items=1000.",
    ),
    suite: str = typer.Option(
        "", metavar="NAMES", help="loss, hellaswag, squad, lm-eval:TASKS; default: the run's own."
    ),
    world: str = typer.Option("", metavar="N", help="Spread the items over so many local processes."),
    out: Path = typer.Option(None, metavar="DIR", help="Where results and predictions go; default: RUN/eval."),
    as_json: bool = typer.Option(False, "--json", help="Print the results as JSON."),
) -> int:
    """Measure a model: token-weighted validation loss, perplexity and bits per byte; HellaSwag; SQuAD's EM and F1.

    Each item is scored once, whatever the number of ranks, and in fp32: for the training's precision add train.precision=bf16.
    The results go to RUN/eval as JSON, with the settings and files that they were measured on; SQuAD's predictions beside them
    in the official format.
    """
    from windlass.parallel.env import detect_env

    env = detect_env(os.environ)
    if env.launcher == "none" and world not in ("", "1"):
        from windlass.launch.local import launch, parse_worlds, worker_command

        return launch(worker_command(sys.argv[1:]), parse_worlds(world)[:1])
    from windlass import evaluate as evaluate_model
    from windlass.evaluation.source import find_source

    source = find_source(run, overrides or [])
    if env.rank == 0 and not as_json:
        typer.echo(f"{source.title}, {env.world} rank{'s' if env.world > 1 else ''}")

    def show(name: str, numbers: dict[str, Any]) -> None:
        if not as_json:
            typer.echo(name)
            for key, value in numbers.items():
                text = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
                typer.echo(f"  {key:<15} {text:>16} {UNITS.get(key, '')}".rstrip())

    suites = [s.strip() for s in suite.split(",") if s.strip()]
    result = evaluate_model(source, suites, overrides or [], out, show)
    if env.rank == 0 and as_json:
        record = asdict(result)
        typer.echo(json.dumps({key: record[key] for key in ("model", "step", "results", "measured")}))
    if result.predictions_path:
        typer.echo(f"predictions: {result.predictions_path}", err=True)
    return 0
