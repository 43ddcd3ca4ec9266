"""`windlass eval`: what a model knows, measured once and written down."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from windlass.evaluation.source import Source
    from windlass.parallel.dist import Ranks
    from windlass.recipe import Recipe

SHOWN = {
    "loss": "nats/token", "perplexity": "", "bits_per_byte": "", "acc": "", "acc_norm": "", "exact_match": "%", "f1": "%",
    "items": "", "samples": "", "tokens": "", "runtime_s": "s", "samples_per_s": "", "tokens_per_s": "",
}  # fmt: skip
"""The order in which numbers are shown, and their units."""


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("eval")(evaluate)


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
    from windlass.errors import UserError
    from windlass.parallel.dist import init_ranks
    from windlass.parallel.env import detect_env

    here = detect_env(os.environ)
    if here.launcher == "none" and world not in ("", "1"):
        from windlass.launch.local import launch, parse_worlds, worker_command

        return launch(worker_command(sys.argv[1:]), parse_worlds(world)[:1])
    from windlass.evaluation import source as sources

    source = in_full(sources.find_source(run, overrides or []), overrides or [])
    suites = [s.strip() for s in suite.split(",") if s.strip()] or (source.recipe.eval.suites if source.run else [])
    if not suites:
        raise UserError("say what to measure: --suite loss,hellaswag,squad or lm-eval:TASKS")
    # Says which suite there is not. What the run's best was chosen by need not be measured here.
    source.recipe.with_overrides(f"eval.suites={json.dumps(suites)}", 'checkpoint.best="loss"')
    if source.run is None and "loss" in suites and not any(o.startswith("data.source=") for o in overrides or []):
        raise UserError(
            "the loss of a model without a run needs a corpus: add data.source=FILE (and data.val_fraction=0.1)"
        )
    with init_ranks(here, spread(source.recipe, here.world)) as ranks:
        if ranks.main and not as_json:
            typer.echo(f"{source.title}, {ranks.world} rank{'s' if ranks.world > 1 else ''}")
        keep: dict[str, Any] = {}
        results = measure(source, suites, ranks, keep, quiet=as_json)
        if ranks.main:
            record = {"model": source.name, "step": source.step, "results": results, "measured": keep["measured"]}
            if as_json:
                typer.echo(json.dumps(record))
            write(source, record, keep, out)
    return 0


def in_full(source: Source, overrides: Sequence[str]) -> Source:
    """The source, to be measured in fp32 (fp64 where it was trained so) unless `overrides` name a precision.

    What is scored are logits, and autocast rounds them: bf16 keeps one between 16 and 32 to the next eighth.
    """
    import dataclasses

    if source.recipe.train.precision == "fp64" or any(o.startswith("train.precision=") for o in overrides):
        return source
    return dataclasses.replace(source, recipe=source.recipe.with_overrides('train.precision="fp32"'))


def spread(recipe: Recipe, world: int) -> Recipe:
    """The recipe for measuring on so many ranks: sharded where the training was, else whole on each of them."""
    sharded = recipe.parallel.strategy in ("full_shard", "shard_grad_op", "hybrid_shard")
    strategy = "single" if world == 1 else "full_shard" if sharded else "ddp"
    return recipe.with_overrides(
        f'parallel.strategy="{strategy}"',
        "parallel.shard_size=0",
        "parallel.offload=false",
        'parallel.activation_checkpointing="none"',
    )


def measure(
    source: Source, suites: Sequence[str], ranks: Ranks, keep: dict[str, Any], quiet: bool = False
) -> dict[str, dict[str, Any]]:
    """Every suite in turn, each as the fields of an `eval` line; all ranks call it together.

    `keep` gets `measured` (what each suite was measured on) and what `run_suite` leaves there.
    """
    import dataclasses

    from windlass.evaluation import source as sources
    from windlass.evaluation.suites import measured_on, run_suite
    from windlass.parallel.parallelize import autocast

    recipe = spread(source.recipe, ranks.world)
    model = sources.open_model(dataclasses.replace(source, recipe=recipe), ranks)
    context = partial(autocast, recipe, ranks.device)
    results: dict[str, dict[str, Any]] = {}
    keep["measured"] = {}
    for suite in suites:
        if suite == "loss":
            found = loss(source, model, ranks, context, keep)
        else:
            found = run_suite(suite, model, source.tokenizer, recipe, ranks, autocast=context, keep=keep) or {}
        results[suite] = found
        if ranks.main:
            keep["measured"][suite] = measured_on(suite, source.recipe, ranks.device, keep.get("fingerprint", ""))
        if ranks.main and not quiet:
            typer.echo("\n".join(table(suite, found)))
    return results


def loss(source: Source, model: Any, ranks: Ranks, context: Any, keep: dict[str, Any]) -> dict[str, Any]:
    """The loss on the recipe's validation data, read with the model's own tokenizer; `keep` gets the data's `fingerprint`."""
    from windlass.data.dataset import open_data
    from windlass.errors import UserError
    from windlass.evaluation.loss import evaluate_loss
    from windlass.recipe.units import TOKENS_PER_MICRO_BATCH

    recipe = source.recipe
    data = open_data(recipe)
    if data.tokenizer.fingerprint != source.tokenizer.fingerprint:
        raise UserError(
            f"the data of this recipe were made with another tokenizer than {source.name} has: set data.tokenizer"
        )
    if data.val is None:
        raise UserError("there is no validation set: give data.eval_source=FILE, or data.val_fraction=0.1")
    keep["fingerprint"] = data.fingerprint
    batch = max(1, TOKENS_PER_MICRO_BATCH[ranks.device.type] // recipe.model.context)
    limit = recipe.eval.batches * recipe.train.global_batch
    sizes = data.tokenizer.byte_lengths()
    return evaluate_loss(model, data.val, ranks, batch, limit, autocast=context, token_bytes=sizes) or {}


def table(suite: str, found: dict[str, Any]) -> list[str]:
    """The numbers of a suite, a line each."""
    lines = [suite]
    for key in sorted(found, key=lambda k: (list(SHOWN).index(k) if k in SHOWN else len(SHOWN), k)):
        value, unit = found[key], SHOWN.get(key, "")
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.4f}" if isinstance(value, float) else str(value)
        lines.append(f"  {key:<15} {text:>16} {unit}".rstrip())
    return lines


def write(source: Source, record: dict[str, Any], keep: dict[str, Any], out: Path | None) -> None:
    """Results and predictions as files, by the step that they belong to; nowhere for a model without a run, unless asked."""
    from windlass.errors import UserError
    from windlass.evaluation.suites import merged

    folder = out or (source.run.path / "eval" if source.run else None)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-{source.step:08d}" if source.step is not None else "model"
    path = folder / f"{name}.json"
    try:
        whole = merged(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}, record)
    except (ValueError, AttributeError, KeyError, TypeError):
        raise UserError(f"{path} is no record of results: move it away, or give another folder with --out") from None
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if "predictions" in keep:
        from windlass.evaluation.squad import predictions_name, write_predictions

        predictions = folder / predictions_name(source.step)
        write_predictions(predictions, keep["predictions"])
        typer.echo(f"predictions: {predictions}", err=True)
