"""`windlass recipe`, `prepare` and `plan`: what can be done with a recipe before it is trained."""

from __future__ import annotations

import json
import sys
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from windlass.cli import Json, Overrides, RecipeName, complete, print_json
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.recipe import Recipe


def init(
    file: Path = typer.Argument("mine.toml", metavar="[FILE]", help="The file to write."),
    data: str = typer.Option(
        "",
        metavar="SOURCE",
        help='Your data, as data.source takes it; several as \'["a.txt", "b.txt"]\'.',
    ),
    model: str = typer.Option(
        "", metavar="NAME", help="Fine-tune this model of the Hub, or of a directory, instead."
    ),
) -> None:
    """Write a short recipe with a comment on each line, to edit and train; it overwrites nothing."""
    from windlass.data.sources import check_source
    from windlass.recipe.explain import sources_of, write_first_recipe

    for source in sources_of(data):
        check_source(source, "--data", conversations=bool(model) and not source.endswith(".txt"))
    write_first_recipe(file, data, model)
    typer.echo(f"wrote {file}: edit it, then `windlass plan {file}` and `windlass train {file}`")


def recipe(
    recipe: RecipeName = "",
    *,
    overrides: Overrides,
    list_: bool = typer.Option(False, "--list", help="List the presets, of studies too."),
    schema: bool = typer.Option(
        False, "--schema", help="Print the JSON schema of a recipe, for editors."
    ),
    key: str = typer.Option(
        "",
        "--explain",
        metavar="KEY",
        help="What a setting or section means, or is in RECIPE.",
        autocompletion=complete.keys,
    ),
) -> None:
    """Print a recipe, or that of a preset of studies, with every setting resolved; list the presets; print the schema; explain a setting."""
    from windlass.recipe import Recipe, explain, presets, study_presets, typed
    from windlass.study.presets import load_study
    from windlass.telemetry.terminal import pairs, rich_console

    if schema:
        typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))
    elif key:
        typer.echo(explain(key, recipe, overrides))
    elif list_:
        rows = []
        for name, path in (
            presets() | study_presets()
        ).items():  # with the first sentence of the comment that the file opens with
            comment = takewhile(
                lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines()
            )
            sentence = (
                " ".join(line.lstrip("# ") for line in comment).partition(". ")[0].rstrip(".")
            )
            verb = {} if name in presets() else tomllib.loads(path.read_text(encoding="utf-8"))
            rows.append((name, f"{sentence}.{' (windlass ' + verb['verb'] + ')' if verb else ''}"))
        rich_console(sys.stdout).print(pairs(rows))
    elif recipe:
        studied = study_presets().get(recipe)
        if studied and not Path(recipe).exists():
            preset = tomllib.loads(studied.read_text(encoding="utf-8"))
            loaded, options = load_study(recipe, preset["verb"], overrides)
            words = " ".join(
                f"{name}={typed(value)}" for name, value in options.items() if name != "preset"
            )
            typer.echo(f"# a study of this recipe: windlass {preset['verb']} {recipe} ({words})")
        else:
            loaded = Recipe.load(recipe, overrides)
        network = f"# network: {network_of(loaded)}\n" if loaded.model.kind == "hf" else ""
        typer.echo(
            f"# run directory: {loaded.run_dir}\n# config hash: {loaded.config_hash}\n{network}"
        )
        typer.echo(loaded.toml())
    else:
        raise UserError(
            "name a recipe, as `windlass recipe quickstart`, or use --list, --schema or --explain KEY"
        )


def network_of(recipe: Recipe) -> str:
    """What the configuration of a recipe's Hugging Face model says, or why it cannot be read."""
    from windlass.model.build import read_sizes
    from windlass.model.size import describe_sizes

    try:
        return describe_sizes(read_sizes(recipe))
    except UserError as error:
        return str(error)


def prepare(recipe: RecipeName, overrides: Overrides) -> None:
    """Turn a recipe's corpus into checked token shards; resumes where it was stopped, and does nothing twice."""
    from windlass.data.chat import show_row
    from windlass.data.facts import describe, lines, warnings
    from windlass.data.prepare import REMARKS, as_data
    from windlass.data.prepare import prepare as prepare_data
    from windlass.data.samples import Rows
    from windlass.recipe import Recipe
    from windlass.telemetry.terminal import pairs, rich_console

    loaded = Recipe.load(recipe, overrides)
    prepared = prepare_data(loaded)
    data = as_data(loaded, prepared)
    facts = describe(data)
    shown = {
        "directory": str(prepared.directory),
        **lines(facts, loaded.model.context),
        **({"warning": "\n".join(found)} if (found := warnings(facts)) else {}),
        **(
            {"example": show_row(*data.train.row(0), prepared.tokenizer)}
            if isinstance(data.train, Rows)
            else {}
        ),
        **(
            {"remarks": str(prepared.directory / REMARKS)}
            if (prepared.directory / REMARKS).exists()
            else {}
        ),
        "fingerprint": prepared.index.fingerprint,
        "prepared": f"in {prepared.seconds:.1f} s" if prepared.is_new else "already",
    }
    rich_console(sys.stdout).print(pairs(shown.items()))


def plan(
    recipe: RecipeName,
    overrides: Overrides,
    world: int = typer.Option(0, min=0, help="Ranks; default: 1, or those of the run."),
    device: str = typer.Option(
        "", metavar="NAME", help="A kind of device, as A100-80GB; default: this machine's."
    ),
    memory: float = typer.Option(
        0.0, min=0, metavar="GB", help="Memory of the device, where it is not in the table."
    ),
    mfu: float = typer.Option(
        0.4, min=0.001, max=1, help="Share of the peak to assume where nothing was measured."
    ),
    from_: list[str] = typer.Option(
        [], "--from", metavar="RUN|STUDY", help="Take the speed from past runs' ledgers."
    ),
    json_: Json = False,
) -> None:
    """Say what a run needs: parameters, steps, FLOPs, memory for each strategy, time, disk, and what happens when.

    All of it is arithmetic from the recipe, and takes no torch. A Hugging Face model's parameters are counted on torch's
    meta device, without its weights. Time comes from a measured speed (--from, or the recipe's own run directory) or from the
    device's published peak and an assumed MFU; the output says which. A run directory gives the plan of what is left of it, by
    its own ledger. What is not known before the data is prepared is shown as such.
    """
    from windlass.estimate.plan import plan as make_plan
    from windlass.estimate.text import print_plan
    from windlass.run import Run
    from windlass.study.study import Study
    from windlass.telemetry.terminal import rich_console

    past = [
        run
        for path in from_
        for run in (Study.open(path).runs() if Study.is_study(path) else [Run.open(path)])
    ]
    size = int(memory * 1e9) or None
    result = make_plan(
        recipe, overrides, world=world, device=device, memory_bytes=size, past=past, mfu=mfu
    )
    if json_:
        print_json(result.as_dict())
    else:
        print_plan(result, rich_console(sys.stdout))
