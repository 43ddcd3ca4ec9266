"""`windlass init`, `recipe`, `prepare` and `plan`: the verbs before a training."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import typer
from typer import Argument, Option

from windlass.cli import Json, Overrides, RecipeName, print_json, say
from windlass.errors import UserError


def init(
    file: Path = Argument("mine.toml", metavar="FILE", help="The file to write."),
    data: str = Option("", metavar="SOURCE", help="Your data, as data.source takes it."),
    model: str = Option("", metavar="NAME", help="Fine-tune this model of the Hub or directory."),
) -> None:
    """Write a short, commented recipe to edit. It overwrites nothing.

    Example: `windlass init mine.toml --data book.txt`
    """
    from windlass.data.sources import form_of
    from windlass.recipe.explain import sources_of, write_first_recipe

    forms = [form_of(source, "--data") for source in sources_of(data)]
    if any(form != forms[0] for form in forms):
        raise UserError(f"--data: {data} has texts and conversations; data.mix trains on both")
    write_first_recipe(file, data, model, forms[0] if forms else {})
    quoted = shlex.quote(str(file))
    verbs = ", ".join(f"`windlass {verb} {quoted}`" for verb in ("prepare", "plan", "train"))
    say(f"wrote {file}: edit it, then {verbs}")


def recipe(
    recipe: RecipeName = "",
    *,
    overrides: Overrides,
    list_: bool = Option(False, "--list", help="List the presets of recipes and studies."),
    schema: bool = Option(False, "--schema", help="Print a recipe's JSON schema, for editors."),
    key: str = Option("", "--explain", metavar="KEY", help="Explain a setting."),
) -> None:
    """Show a recipe, list the presets, or explain a setting.

    RECIPE is printed with every setting resolved. --explain also takes a section, and shows the
    values in RECIPE.

    Example: `windlass recipe quickstart optim.lr=3e-4`
    """
    from windlass.recipe import Recipe, presets, study_presets
    from windlass.recipe.explain import explain
    from windlass.recipe.layers import first_sentence
    from windlass.telemetry.terminal import pairs, rich_console

    if schema:
        typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))
    elif key:
        say(explain(key, recipe, overrides))
    elif list_:
        rows = []
        for name, path in (presets() | study_presets()).items():
            preset = tomllib.loads(path.read_text(encoding="utf-8"))
            verb = f" (windlass {preset['verb']})" if name in study_presets() else ""
            rows.append((name, f"{first_sentence(path)}{verb}"))
        rich_console(sys.stdout).print(pairs(rows))
    elif recipe:
        loaded = Recipe.load(recipe, overrides)
        typer.echo(f"# run directory: {loaded.run_dir}\n# config hash: {loaded.config_hash}")
        typer.echo(f"\n{loaded.toml()}")
    else:
        choice = "or use --list, --schema or --explain KEY"
        raise UserError(f"name a recipe, such as `windlass recipe quickstart`, {choice}")


def prepare(recipe: RecipeName, overrides: Overrides) -> None:
    """Turn a recipe's corpus into checked token shards.

    After a stop it resumes; finished work is not repeated.

    Example: `windlass prepare quickstart`
    """
    from rich.filesize import decimal

    from windlass.data.chat import show_row
    from windlass.data.describe import describe, lines, warnings
    from windlass.data.encode import LEFT_OUT
    from windlass.data.open import open_samples
    from windlass.data.prepare import prepare as prepare_data
    from windlass.data.samples import ExampleSamples
    from windlass.estimate.devices import this_device
    from windlass.estimate.inputs import PlanInputs, with_sizes
    from windlass.recipe import Recipe
    from windlass.telemetry.terminal import pairs, rich_console

    loaded = Recipe.load(recipe, overrides)
    prepared = prepare_data(loaded)
    data = open_samples(loaded, prepared)
    facts = describe(data)
    shown = {"directory": "\n".join(map(str, prepared.directories))}
    shown |= lines(facts, loaded.model.context)
    if problems := warnings(facts):
        shown["warning"] = "\n".join(problems)
    if isinstance(data.train, ExampleSamples):
        shown["example"] = show_row(*data.train.example(0), prepared.tokenizer)
    corpora = [corpus for corpus in prepared.corpora if corpus.index.left_out]
    if lists := [str(corpus.directory / LEFT_OUT) for corpus in corpora]:
        shown["left out"] = "\n".join(dict.fromkeys(lists))
    inputs = with_sizes(PlanInputs(loaded, 1, this_device(cpu=True), "fp32", vocab=data.vocab))
    if size := inputs.size.checkpoint_bytes:
        shown["checkpoint"] = f"{decimal(size)} each"
    shown["fingerprint"] = data.fingerprint
    shown["prepared"] = "now" if prepared.is_new else "already"
    rich_console(sys.stdout).print(pairs(shown.items()))


def plan(
    recipe: RecipeName,
    overrides: Overrides,
    world: int = Option(0, min=0, help="Ranks; default: 1, or the ranks of the run."),
    device: str = Option("", metavar="NAME", help="Kind, such as A100-80GB; default: this device."),
    memory: float = Option(0.0, min=0, metavar="GB", help="Memory of an unlisted device."),
    per_host: int = Option(0, min=0, help="Ranks of each host; default: 8 GPUs."),
    from_: list[str] = Option([], "--from", metavar="RUN|STUDY", help="Past runs for the speed."),
    law: str = Option("", metavar="LADDER", help="Predict the loss by the law of a ladder."),
    json_: Json = False,
) -> None:
    """Compute steps, FLOPs, memory and time before you train.

    The plan has parameters, memory for each strategy, disk and time. It is arithmetic
    from the recipe, without torch; only the parameters of a Hugging Face model are counted on
    torch's meta device. Time comes from a measured speed (--from, or the recipe's own run
    directory), or from a model of a step; the output says which. A run directory gives
    the plan for its remaining steps. Numbers that depend on data that are not prepared yet are
    marked.

    Example: `windlass plan gpt2-124m --world 8 --device A100-80GB`
    """
    from windlass.estimate.plan import plan as make_plan
    from windlass.estimate.text import print_plan
    from windlass.recipe import Recipe
    from windlass.run import Run
    from windlass.study.ladder import open_ladder
    from windlass.study.study import Study
    from windlass.telemetry.terminal import rich_console

    past = list[Run]()
    for path in from_:
        past += Study.open(path).runs() if Study.is_study(path) else [Run.open(path)]
    memory_bytes = int(memory * 1e9) or None
    target: dict[str, Any] = {"device": device, "memory_bytes": memory_bytes}
    target |= {"past": past, "per_host": per_host}
    result = make_plan(recipe, overrides, **target, world=world)
    shown = result.as_dict()
    if law:
        ladder = open_ladder(law)
        predicted = ladder.predict(Recipe.load(recipe, overrides), result)
        shown["law"] = predicted._asdict() | {"unit": ladder.unit}
    if json_:
        print_json(shown)
        return
    print_plan(result, rich_console(sys.stdout))
    if law:
        typer.echo(f"validation loss in {ladder.unit} by the law of {law}: {predicted}")
