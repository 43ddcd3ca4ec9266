"""The verbs: parse, call, exit code. One module a verb; nothing heavy is imported before a verb is called."""

from __future__ import annotations

import importlib
import os
import sys

import typer

from windlass import errors

app = typer.Typer(
    name="windlass",
    help="Train and fine-tune language models on whatever hardware there is, from one file, and prove what was done.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

VERBS = {
    "recipe": "show", "prepare": "prepare", "plan": "plan", "train": "train", "eval": "evaluate", "sample": "sample",
    "sweep": "sweep", "report": "report", "runs": "runs", "checkpoints": "checkpoints", "export": "export", "track": "track",
    "verify": "verify",
}  # fmt: skip
"""The modules here and the function of each, in the order of the help: as a user needs them."""
EXIT_CODES = {
    errors.UserError: errors.BAD_INPUT,
    errors.RunFailed: errors.FAILED,
    errors.Stopped: errors.STOPPED,
}


def _print_version(wanted: bool) -> None:
    if wanted:
        from windlass import __version__

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
    for verb, function in VERBS.items():
        module = importlib.import_module(f"{__name__}.{verb}")
        app.command(verb, epilog=getattr(module, "EPILOG", None))(getattr(module, function))
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
    except tuple(EXIT_CODES) as error:
        print(f"windlass: {error}", file=sys.stderr)
        sys.exit(next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind)))
    except BrokenPipeError:  # the reader of our output closed its end, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(errors.DONE)
    except Exception as error:
        if not hasattr(error, "show") or not hasattr(error, "exit_code"):
            raise
        error.show()  # click's own error: the command line could not be parsed
        sys.exit(errors.BAD_INPUT)
    sys.exit(code if isinstance(code, int) else errors.DONE)
