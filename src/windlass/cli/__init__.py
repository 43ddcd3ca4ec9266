"""The verbs: parse, call, exit code. Nothing heavy is imported before a verb is called."""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import re
import sys
from typing import Annotated, Any

import typer

from windlass import __version__, errors
from windlass.launch import rank_status

VERBS = {
    "Start": {
        **dict.fromkeys(("init", "recipe", "prepare", "plan"), "recipes"),
        "check": "cluster",
        "train": "train",
    },
    "Look": {
        **dict.fromkeys(("runs", "report", "checkpoints"), "runs"),
        **dict.fromkeys(("eval", "sample", "export"), "models"),
        "track": "runs",
        "verify": "train",
    },
    "Study": dict.fromkeys(("sweep", "scale", "ladder"), "studies"),
    "Cluster": dict.fromkeys(("submit", "launch", "env"), "cluster"),
}
"""The commands by panel of `windlass --help`, each with its module in `windlass.cli`."""
# Spins of a thread of libgomp (torch's OpenMP on Linux) before it sleeps: 0.5 ms instead of 15 ms.
# While it spins, the thread that it waits for may lack a core if another process is busy.
SPIN = "10000"


def _argument(metavar: str, text: str, **options: Any) -> Any:
    return typer.Argument(metavar=metavar, help=text, show_default=False, **options)


RecipeName = Annotated[
    str, _argument("RECIPE", "A preset's name, a .toml file or a run directory.")
]
Overrides = Annotated[
    list[str],
    _argument("KEY=VALUE", "Settings to change, such as optim.lr=3e-4.", default_factory=list),
]
RunPath = Annotated[str, _argument("RUN", "A run directory.")]
Model = Annotated[
    str,
    _argument(
        "RUN|HF_DIR",
        "A run, RUN@STEP, RUN@best, a checkpoint, a directory of transformers or of an adapter, "
        "or hf:NAME.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]

app = typer.Typer(
    name="windlass",
    help="Train and fine-tune language models on CPUs and NVIDIA GPUs, from one file, "
    "and prove what was done.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# errors of the system about a path, which the user can mend
UNUSABLE = ["ENAMETOOLONG", "ELOOP", "ENOTDIR", "EEXIST"]
UNUSABLE += ["EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT"]
# arguments of the Python API whose option has another name
OPTIONS = {"suites": "suite", "past": "from", "path": "dir"}


def print_json(value: Any, indent: int | None = 1) -> None:
    """Print valid JSON, with strings ("NaN", "-Infinity") for numbers that are not finite."""
    from windlass.ledger import plain

    typer.echo(json.dumps(plain(value), indent=indent, allow_nan=False, default=str))


def say(text: str, err: bool = False) -> None:
    """Print sentences; a terminal gets them with whole words."""
    from windlass.telemetry.terminal import message

    stream = sys.stderr if err else sys.stdout
    print(message(text, stream), file=stream)


def as_typed(message: str) -> str:
    """An error's message with options (`--fresh`) for the API's arguments that it has marked."""

    def option(match: re.Match[str]) -> str:
        name, _, value = match[1].partition("=")
        if name == "memory_bytes":
            return "--memory GB"
        if value[:1] + value[-1:] == "[]":
            value = re.sub(r"""[]["']""", "", value).replace(", ", ",")
        shown = "" if value == "True" else f" {value}"
        return f"--{OPTIONS.get(name, name).replace('_', '-')}{shown}"

    return re.sub(f"{errors.MARK}(.*?){errors.MARK}", option, message, flags=re.DOTALL)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"windlass {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Print the version."
    ),
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """The command line: a user's mistake gets one message, other errors keep their traceback."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)  # libgomp reads it when torch is imported
    words = sys.argv[1:2] if arguments is None else arguments[:1]
    places = {name: (panel, verbs[name]) for panel, verbs in VERBS.items() for name in verbs}
    for name in [word for word in words if word in places] or places:  # all of them take 0.1 s
        panel, file = places[name]
        module = importlib.import_module(f"{__name__}.{file}")
        epilog = getattr(module, "EPILOGS", {}).get(name)
        command = app.command(name, rich_help_panel=panel, epilog=epilog)
        command(getattr(module, "evaluate" if name == "eval" else name))
    # the standard streams take every character, and survive the loss of their reader
    from windlass.telemetry.terminal import SafeStream

    streams = sys.stdout, sys.stderr  # None if the descriptor is closed
    open_streams = (stream or open(os.devnull, "w") for stream in streams)  # noqa: SIM115
    sys.stdout, sys.stderr = map(SafeStream, open_streams)
    try:
        _run(arguments)
    except SystemExit as end:
        rank_status.report_code(end.code)
        raise
    except Exception:
        rank_status.report_code(errors.FAILED)
        raise
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = streams


def _run(arguments: list[str] | None) -> None:
    try:
        for text in (*(sys.argv[1:] if arguments is None else arguments), os.getcwd()):
            if text != text.encode("utf-8", "replace").decode():  # TOML is UTF-8
                shown = text.encode("utf-8", "backslashreplace").decode()
                raise errors.UserError(f"{shown}: the name is not UTF-8; rename it")
        code = app(args=arguments, prog_name="windlass", standalone_mode=False)
    except typer.Abort:
        sys.exit(errors.INTERRUPTED)
    except (errors.UserError, errors.RunFailed, errors.Stopped) as error:
        if rank_status.first_to_show(str(error)):
            say(f"windlass: {as_typed(error.text)}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        text = f"{error.filename}: {error.strerror}; name another path"
        if "temporary directory" in str(error):  # Python's module `tempfile` found none
            text = f"{error.strerror}; free some space, or set TMPDIR"
        elif errno.errorcode.get(error.errno or 0) not in UNUSABLE or not error.filename:
            raise
        print(f"windlass: {text}", file=sys.stderr)
        sys.exit(errors.BAD_INPUT)
    except Exception as error:
        if not hasattr(error, "show"):
            raise
        error.show()  # click's own error: the command line could not be parsed
        context = getattr(error, "ctx", None)
        if getattr(error, "option_name", "") and context and "KEY=" in context.get_usage():
            say("Write a setting as KEY=VALUE, without dashes", err=True)
        sys.exit(errors.BAD_INPUT)
    if code == errors.INTERRUPTED:
        print("\nwindlass: interrupted", file=sys.stderr)  # not behind the ^C of a terminal
    gc.freeze()  # the collections at the interpreter's end would take a second after torch
    sys.exit(code if isinstance(code, int) else errors.DONE)
