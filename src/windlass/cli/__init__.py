"""The verbs: parse, call, exit code. Nothing heavy is imported before a verb is called."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from windlass import __version__, errors, processes
from windlass.cli import complete

SPIN = "10000"
"""How long a thread of libgomp (torch's OpenMP on Linux) waits for the others before it sleeps: about half a millisecond instead
of its 15, in which it would keep the core from the one that it waits for, where another process is busy, too."""
VERBS = {
    "init": ("recipes", "Write a short, commented recipe to edit."),
    "recipe": ("recipes", "Print a recipe with every setting, or explain a setting."),
    "prepare": ("recipes", "Turn a recipe's corpus into checked token shards."),
    "plan": ("recipes", "Say what a run needs: steps, FLOPs, memory, time."),
    "train": ("train", "Train a recipe; train again to resume."),
    "eval": ("models", "Measure a model: loss, HellaSwag, SQuAD, lm-eval."),
    "sample": ("models", "Generate text with a model, or chat with it."),
    "sweep": ("sweep", "Train every cell of a grid, and tabulate the results."),
    "scale": ("scale", "Train a recipe on several numbers of ranks, and compare."),
    "report": ("runs", "Write tables, plots and an interactive page about runs."),
    "runs": ("runs", "List runs and studies with their state and loss."),
    "checkpoints": ("runs", "List the checkpoints of a run, and verify them."),
    "export": ("models", "Write a run's model as a directory of transformers."),
    "track": ("runs", "Replay a run's ledger into W&B, MLflow or TensorBoard."),
    "verify": ("train", "Prove with real runs that nothing is lost or wrong."),
    "check": ("cluster", "Check machine, packages, disk and interconnect."),
    "launch": ("cluster", "Run a command on every rank of the allocation."),
    "env": ("cluster", "Print the variables of a saved job for another shell."),
    "submit": ("cluster", "Submit a training or a study to SLURM or PBS."),
}
"""The module of each verb and its line in `windlass --help`, which fits 80 columns; in the order in which a user needs them."""

RECIPE_HELP = "A preset's name, a .toml file or a run directory."
RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help=RECIPE_HELP, show_default=False, autocompletion=complete.recipes
    ),
]
Overrides = Annotated[
    list[str],
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings to change, as optim.lr=3e-4.",
        default_factory=list,
        show_default=False,
        autocompletion=complete.overrides,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]

app = typer.Typer(
    name="windlass",
    help="Train and fine-tune language models on CPUs and NVIDIA GPUs, from one file, and prove what was done.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
OPTIONS = {
    "suites": "suite",
    "past": "from",
    "path": "dir",
}  # where the option has another name than the argument


def print_json(value: Any, indent: int | None = 1) -> None:
    """Print valid JSON: numbers that are not finite are the strings `"NaN"`, `"Infinity"`, `"-Infinity"`."""
    from windlass.telemetry.ledger import plain

    typer.echo(json.dumps(plain(value), indent=indent, allow_nan=False, default=str))


def as_typed(message: str) -> str:
    """An error's message in the words of the command line: the argument `fresh=True` is `--fresh`, `extend_to=400` is
    `--extend-to 400`. Only what the error has marked is replaced, never the user's own text."""

    def option(match: re.Match[str]) -> str:
        if made := re.fullmatch(r'Recipe\.load\("(.+?)", {"(.+?)": "(.+)"}\)', match[1]):
            return f"windlass train {made[1]} {shlex.quote(f'{made[2]}={made[3]}')}"
        name, _, value = match[1].partition("=")
        if name == "memory_bytes":
            return "--memory GB"
        if value[:1] + value[-1:] == "[]":
            value = re.sub(r"""[]["']""", "", value).replace(", ", ",")
        return f"--{OPTIONS.get(name, name).replace('_', '-')}" + (
            "" if value == "True" else f" {value}"
        )

    return re.sub(f"{errors.MARK}(.*?){errors.MARK}", option, message, flags=re.DOTALL)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"windlass {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False,
        "--version",
        is_eager=True,
        callback=_print_version,
        help="Print the version and exit.",
    ),
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """The command line. A user's mistake is one message and exit code 2; anything unforeseen keeps its traceback."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)  # it is read when torch is imported
    for verb, (name, line) in VERBS.items():
        module = importlib.import_module(f"{__name__}.{name}")
        command = app.command(verb, short_help=line, epilog=getattr(module, "EPILOG", None))
        command(getattr(module, "evaluate" if verb == "eval" else verb))
    with _outputs():
        try:
            _run(arguments)
        except SystemExit as end:
            processes.report_code(end.code)
            raise


@contextlib.contextmanager
def _outputs() -> Iterator[None]:
    """Standard streams that take every character, and whose reader may go away."""
    from windlass.telemetry.terminal import Output

    streams = sys.stdout, sys.stderr  # None where the descriptor is closed
    sys.stdout, sys.stderr = (Output(stream or open(os.devnull, "w")) for stream in streams)  # noqa: SIM115
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = streams


def _as_setting(option: str) -> str:
    """What to write where a setting was given as an option."""
    from windlass.recipe import settings
    from windlass.recipe.keys import nearest

    known = nearest(option.lstrip("-").replace("-", "_"), settings())
    return f"A setting is written KEY=VALUE, without dashes{'' if known.startswith('there are') else f'; {known}'}"


def _run(arguments: list[str] | None) -> None:
    try:
        code = app(args=arguments, prog_name="windlass", standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except (errors.UserError, errors.RunFailed, errors.Stopped) as error:
        if processes.first_to_show(str(error)):
            print(f"windlass: {as_typed(error.text)}", file=sys.stderr)
        kinds = {
            errors.HostLost: errors.LOST,
            errors.RunFailed: errors.FAILED,
            errors.Stopped: errors.STOPPED,
        }
        sys.exit(
            next(
                (code for kind, code in kinds.items() if isinstance(error, kind)), errors.BAD_INPUT
            )
        )
    except Exception as error:
        if not hasattr(error, "show"):
            raise
        error.show()  # click's own error: the command line could not be parsed
        context = getattr(error, "ctx", None)
        if (
            (wrong := getattr(error, "option_name", ""))
            and context
            and "KEY=" in context.get_usage()
        ):
            print(_as_setting(wrong), file=sys.stderr)
        sys.exit(errors.BAD_INPUT)
    gc.freeze()  # nothing is left to the collections of the interpreter's end, which take a second after torch
    sys.exit(code if isinstance(code, int) else errors.DONE)
