"""`windlass prepare`: corpus, tokenizer, checksummed token shards."""

from __future__ import annotations

import typer


def prepare(
    recipe: str = typer.Argument(..., metavar="RECIPE", help="A preset's name, a .toml file or a run directory."),
    overrides: list[str] = typer.Argument(
        None, metavar="[KEY=VALUE]...", help="Settings to change, as data.workers=4."
    ),
) -> None:
    """Turn a recipe's corpus into checked token shards; resumes where it was stopped, and does nothing twice."""
    from windlass.data import prepare as data
    from windlass.recipe import Recipe

    loaded = Recipe.load(recipe, overrides or [])
    prepared = data.prepare(loaded)
    what = "tokens" if loaded.data.format == "text" else "unmasked labels"
    documents = f"{prepared.documents:,} {'documents' if loaded.data.format == 'text' else 'items'}"
    shown = {
        "directory": str(prepared.directory),
        "training": f"{prepared.tokens('train'):,} {what}",
        "validation": f"{prepared.tokens('val'):,} {what}" if prepared.tokens("val") else "none",
        "documents": documents if prepared.documents else "not known",
        "tokenizer": f"{loaded.data.tokenizer}, {prepared.vocab:,} ids",
        "fingerprint": prepared.index.fingerprint,
        "prepared": f"in {prepared.seconds:.1f} s" if prepared.made else "already",
    }
    for name, value in shown.items():
        typer.echo(f"{name:<12}{value}")
