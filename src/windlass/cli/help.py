"""The commands by group, and how their help is written: in 80 columns, without a library's
notation.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from windlass.errors import INTERRUPTED


class Verb(NamedTuple):
    """The module of a command in `windlass.cli`, its line in `windlass --help`, and an example."""

    module: str
    line: str
    example: str


GROUPS = {
    "Start": {
        "init": Verb(
            "recipes",
            "Write a short, commented recipe to edit.",
            "windlass init mine.toml --data book.txt",
        ),
        "recipe": Verb(
            "recipes",
            "Show a recipe, list the presets, or explain a setting.",
            "windlass recipe quickstart optim.lr=3e-4",
        ),
        "prepare": Verb(
            "recipes",
            "Turn a recipe's corpus into checked token shards.",
            "windlass prepare quickstart",
        ),
        "plan": Verb(
            "recipes",
            "Compute steps, FLOPs, memory and time before you train.",
            "windlass plan gpt2-124m --world 8 --device A100-80GB",
        ),
        "check": Verb(
            "cluster",
            "Check machine, packages, disk and interconnect.",
            "windlass check --world 2",
        ),
        "train": Verb(
            "train",
            "Train a recipe. The same command resumes the run.",
            "windlass train quickstart --world 2 run.dir=runs/first",
        ),
    },
    "Look": {
        "runs": Verb("runs", "List runs and studies with their state and loss.", "windlass runs"),
        "report": Verb(
            "runs",
            "Write tables, plots and an interactive page about runs.",
            "windlass report runs/first",
        ),
        "checkpoints": Verb(
            "runs",
            "List the checkpoints of a run, and verify their bytes.",
            "windlass checkpoints runs/first --verify",
        ),
        "eval": Verb(
            "models",
            "Measure a model: loss, HellaSwag, SQuAD, lm-eval.",
            "windlass eval runs/first --suite loss",
        ),
        "sample": Verb(
            "models",
            "Generate text with a model, or chat with it.",
            'windlass sample runs/first --prompt "def main"',
        ),
        "export": Verb(
            "models",
            "Write a model as a directory that transformers loads.",
            "windlass export runs/first exported",
        ),
        "track": Verb(
            "runs",
            "Replay a run into W&B, MLflow or TensorBoard.",
            "windlass track runs/first --to tensorboard",
        ),
        "verify": Verb("train", "Prove on this machine that training is exact.", "windlass verify"),
    },
    "Study": {
        "sweep": Verb(
            "sweep",
            "Train every cell of a grid, and tabulate the results.",
            "windlass sweep quickstart optim.lr=1e-3,3e-3 --set train.steps=200",
        ),
        "scale": Verb(
            "scale",
            "Train on several numbers of ranks, and compare.",
            "windlass scale quickstart --worlds 1,2 --mode strong train.steps=60",
        ),
        "ladder": Verb(
            "ladder",
            "Train several sizes, fit the law of scaling, predict the next.",
            "windlass ladder quickstart --sizes 100k,300k,1M --tokens 5,10,20",
        ),
    },
    "Cluster": {
        "submit": Verb(
            "cluster",
            "Submit a training or a study to SLURM or PBS.",
            "windlass submit quickstart --gpus-per-node 4 --time 01:00:00 --dry-run",
        ),
        "launch": Verb(
            "cluster",
            "Run a command on every rank of the allocation.",
            "windlass launch -n 2 -- windlass check",
        ),
        "env": Verb(
            "cluster",
            "Print the variables of a saved job for another shell.",
            "windlass env --save",
        ),
    },
}
"""The commands by heading of `windlass --help`, in the order in which a user needs them."""
VERBS = {name: verb for verbs in GROUPS.values() for name, verb in verbs.items()}
PLACEHOLDERS = {"int": "N", "float": "X", "path": "PATH"}
"""For values of options that declare no name of their own."""
NO_DEFAULTS = ("0", "0.0", "-1", "1.0")
"""Defaults that the help does not show: they stand for no limit, or for what the text says."""


class Commands(TyperGroup):
    """`windlass --help`: the commands under their headings."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; typer would end at Ctrl-C without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("\nwindlass: interrupted", file=sys.stderr)  # not behind the ^C of a terminal
            raise typer.Exit(INTERRUPTED) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, verbs in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, verb.line) for name, verb in verbs.items()])
        formatter.write_paragraph()
        formatter.write_text("`windlass COMMAND --help` explains a command.")


class Command(TyperCommand):
    """The help of one command: usage, text, arguments, options, and an example at the end."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        pieces = [
            metavar if argument.required or metavar.startswith("[") else f"[{metavar}]"
            for argument in arguments
            for metavar in [str(argument.metavar)]
        ]
        return [*pieces, "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                rows[kind].append(_plain(*record))
        for heading, records in rows.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        super().format_epilog(ctx, formatter)
        with formatter.section("Example"):
            formatter.write(f"  {VERBS[str(ctx.info_name)].example}\n")


def _plain(names: str, text: str) -> tuple[str, str]:
    """A row of the help without types, ranges and empty defaults."""
    names = re.sub(r" <(\w+)[^>]*>", lambda m: f" {PLACEHOLDERS.get(m[1], 'TEXT')}", names)
    names = names.partition(" TEXT")[0] if not names.startswith("-") else names
    extra = re.search(r"\s*\[([^\[\]]*)\]$", text)
    if not extra:
        return names, text
    default = re.search(r"default: ([^;]+)", extra[1])
    shown = default and default[1] not in NO_DEFAULTS and "efault" not in text[: extra.start()]
    return names, text[: extra.start()] + (f" [default: {default[1]}]" if default and shown else "")
