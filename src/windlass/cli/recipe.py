"""`windlass recipe`: the resolved recipe, the presets, the JSON schema."""

from __future__ import annotations

from itertools import takewhile

import typer


def show(
    recipe: str = typer.Argument("", metavar="RECIPE", help="A preset's name, a .toml file or a run directory."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Settings to change, as optim.lr=3e-4."),
    list_: bool = typer.Option(False, "--list", help="List the presets."),
    schema: bool = typer.Option(False, "--schema", help="Print the JSON schema of a recipe, for editors."),
    key: str = typer.Option("", "--explain", metavar="KEY", help="Print what a setting means."),
) -> None:
    """Print a recipe with every setting resolved; list the presets; print the schema; explain a setting."""
    from windlass.errors import UserError
    from windlass.recipe import Recipe, explain, presets

    if schema:
        import json

        typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))
    elif key:
        typer.echo(explain(key))
    elif list_:
        names = presets()
        width = max(map(len, names))
        for name, path in names.items():  # with the first sentence of the comment that the file opens with
            comment = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
            sentence = " ".join(line.lstrip("# ") for line in comment).partition(". ")[0].rstrip(".")
            typer.echo(f"{name:<{width}}  {sentence}.")
    elif recipe:
        loaded = Recipe.load(recipe, overrides or [])
        typer.echo(f"# run directory: {loaded.run_dir}\n# config hash: {loaded.config_hash}\n")
        typer.echo(loaded.toml())
    else:
        raise UserError(
            "name a recipe, for example `windlass recipe quickstart`, or use --list, --schema or --explain KEY"
        )
