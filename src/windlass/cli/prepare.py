"""`windlass prepare`: corpus, tokenizer, checksummed token shards."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("prepare")(prepare)


def prepare(
    recipe: str = typer.Argument(..., metavar="RECIPE", help="A preset's name, a .toml file or a run directory."),
    overrides: list[str] = typer.Argument(
        None, metavar="[KEY=VALUE]...", help="Settings to change, as data.workers=4."
    ),
) -> None:
    """Turn a recipe's corpus into checked token shards; goes on where it was stopped, and does nothing twice."""
    from windlass.data.dataset import describe, open_data
    from windlass.recipe import Recipe

    loaded = Recipe.load(recipe, overrides or [])
    data = open_data(loaded)
    for name, value in describe(loaded, data).items():
        typer.echo(f"{name:<12}{value}")
