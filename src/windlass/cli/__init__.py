"""The verbs: parse, call, exit code. One module a verb; nothing heavy is imported before a verb is called."""

from __future__ import annotations

import importlib
import os
import pkgutil
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

ORDER = (
    "recipe", "prepare", "plan", "train", "eval", "sample", "sweep", "report", "runs", "checkpoints", "export", "track",
    "verify",
)  # fmt: skip
"""The order of the verbs in the help: as one meets them."""


def _say_version(wanted: bool) -> None:
    if wanted:
        from windlass import __version__

        typer.echo(f"windlass {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_say_version, help="Print the version and exit."
    ),
) -> None:
    pass


def _register() -> None:
    present = {module.name for module in pkgutil.iter_modules(__path__)}
    for verb in [v for v in ORDER if v in present] + sorted(present - set(ORDER)):
        importlib.import_module(f"{__name__}.{verb}").register(app)


def main(arguments: list[str] | None = None) -> None:
    """The command line. A user's mistake is one message and exit code 2; anything unforeseen keeps its traceback."""
    _register()
    try:
        code = app(args=arguments, standalone_mode=False)
        sys.stdout.flush()  # here, so that a closed pipe is met below and not while the interpreter ends
    except SystemExit:
        if not type(sys.stdout).__name__.endswith(
            "PacifyFlushWrapper"
        ):  # typer's mark of a closed pipe, for which it exits with 1
            raise
        sys.exit(errors.DONE)
    except typer.Abort:
        sys.exit(130)
    except errors.UserError as error:
        print(f"windlass: {error}", file=sys.stderr)
        sys.exit(errors.BAD_INPUT)
    except errors.RunFailed as error:
        print(f"windlass: {error}", file=sys.stderr)
        sys.exit(errors.FAILED)
    except errors.Stopped as error:
        print(f"windlass: {error}", file=sys.stderr)
        sys.exit(errors.STOPPED)
    except BrokenPipeError:  # the reader of our output closed its end, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(errors.DONE)
    except Exception as error:
        show = getattr(error, "show", None)  # what the parser itself has to say of the command line
        if show is None or not hasattr(error, "exit_code"):
            raise
        show()
        sys.exit(errors.BAD_INPUT)
    sys.exit(code if isinstance(code, int) else errors.DONE)
