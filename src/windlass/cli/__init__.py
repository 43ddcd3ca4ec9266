"""The verbs: parse, call, exit code. Nothing heavy is imported before a verb is called."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated

import typer

from windlass import __version__, errors

VERBS = {
    "recipe": "recipes", "prepare": "recipes", "plan": "recipes", "train": "train", "eval": "models", "sample": "models",
    "sweep": "sweep", "report": "runs", "runs": "runs", "checkpoints": "runs", "export": "models", "track": "runs",
    "verify": "train",
}  # fmt: skip
"""The module of each verb, in the order of the help: as a user needs them."""

RECIPE_HELP = "A preset's name, a .toml file or a run directory."
OVERRIDES_HELP = "Settings to change, as optim.lr=3e-4."
RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help=RECIPE_HELP, show_default=False)]
Overrides = Annotated[
    list[str],
    typer.Argument(metavar="[KEY=VALUE]...", help=OVERRIDES_HELP, default_factory=list, show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]

app = typer.Typer(
    name="windlass",
    help="Train and fine-tune language models on whatever hardware there is, from one file, and prove what was done.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"windlass {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
    ),
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """The command line. A user's mistake is one message and exit code 2; anything unforeseen keeps its traceback."""
    for verb, name in VERBS.items():
        module = importlib.import_module(f"{__name__}.{name}")
        command = app.command(verb, epilog=module.AXES if verb == "sweep" else None)
        command(getattr(module, "evaluate" if verb == "eval" else verb))
    try:
        code = app(args=arguments, standalone_mode=False)
        sys.stdout.flush()  # here, so that a closed pipe raises now and not while the interpreter ends
    except SystemExit:
        # For a closed pipe typer replaces stdout by this wrapper and exits with 1, which a shell would take for a failure.
        if type(sys.stdout).__name__.endswith("PacifyFlushWrapper"):
            sys.exit(errors.DONE)
        raise
    except typer.Abort:
        sys.exit(130)
    except (errors.UserError, errors.RunFailed, errors.Stopped) as error:
        print(f"windlass: {error}", file=sys.stderr)
        kinds = {errors.RunFailed: errors.FAILED, errors.Stopped: errors.STOPPED}
        sys.exit(next((code for kind, code in kinds.items() if isinstance(error, kind)), errors.BAD_INPUT))
    except BrokenPipeError:  # the reader of our output closed its end, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(errors.DONE)
    except Exception as error:
        if not hasattr(error, "show"):
            raise
        error.show()  # click's own error: the command line could not be parsed
        sys.exit(errors.BAD_INPUT)
    sys.exit(code if isinstance(code, int) else errors.DONE)
