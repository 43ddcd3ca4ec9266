"""The errors a user can cause, and the exit codes that tell a script what happened."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from importlib.util import find_spec

DONE = 0
FAILED = 1  # a run, a check or a proof failed
BAD_INPUT = 2  # the message names the error, its place and the remedy
NOT_MEASURED = 44  # `windlass check`: it could not measure the bandwidth
TOO_SLOW = 46  # `windlass check`: the measured bandwidth is under the threshold
INTERRUPTED = 130  # by a second Ctrl-C, which saves nothing (128 + SIGINT, as in shells)
LOST = 69  # EX_UNAVAILABLE: a rank or host of a job was lost, so the batch script starts it again
STOPPED = 75  # EX_TEMPFAIL: by a signal; the same command resumes from the newest checkpoint

EXTRAS = {
    "hf": ("transformers", "accelerate", "datasets", "peft"),
    "data": ("pyarrow", "tiktoken", "aiohttp"),
    "plots": ("matplotlib",),
    "ladder": ("scipy",),
    "optim": ("pytorch_optimizer",),
    "liger": ("liger_kernel",),
    "float8": ("torchao",),
    "lm-eval": ("lm_eval",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow",),
    "wandb": ("wandb",),
}
"""Packages that Windlass does not bring, by the extra that does."""

MARK = "\x1f"  # ASCII's unit separator, around an argument of the API in a message


def argument(name: str, value: object = True) -> str:
    """An argument of the API in a message; the command line shows `stop_at=5` as `--stop-at 5`."""
    return f"{MARK}{name}={value}{MARK}"


class Message(Exception):
    """An error whose message may contain an `argument`."""

    @property
    def text(self) -> str:
        """The message with the marks around its arguments."""
        return super().__str__()

    def __str__(self) -> str:
        return self.text.replace(MARK, "")


class UserError(Message, ValueError):
    """A mistake in the user's recipe, file, checkpoint or environment: what, where, what to do."""

    exit_code = BAD_INPUT


class RunFailed(Message, RuntimeError):
    """A run that cannot continue for a reason other than the user's input."""

    exit_code = FAILED


class OutOfMemory(RunFailed):
    """Memory ran out, and the next start has smaller micro-batches; our launchers start again."""


class HostLost(RunFailed):
    """A run that ended because a rank or host was lost."""

    exit_code = LOST


class Stopped(Message):
    """The run stopped on a signal; the message says what was saved."""

    exit_code = STOPPED


def installed(package: str) -> bool:
    """Whether a package can be imported; imports nothing."""
    return sys.modules.get(package) is not None or find_spec(package) is not None


def require(package: str, what: str) -> None:
    """Raise UserError if a package is missing that `what`, a setting or option, needs."""
    if not installed(package):
        raise UserError(f"{what} {needs(package)}")


def needs(package: str) -> str:
    """The end of a message about a missing package, with the command that installs it."""
    packages = next((names for names in EXTRAS.values() if package in names), (package,))
    return f"needs the package {package}: pip install {' '.join(packages)}"


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """Suggest a valid name for an unknown one: the nearest of `names`, or all if none is near."""
    near = difflib.get_close_matches(name, names := list(names), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(names))}"


def plural(count: int, noun: str) -> str:
    """A count and its noun: `1 step`, `1,200 steps`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def by_text(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each different text, with the labels that it belongs to."""
    labels: dict[str, list[str]] = {}
    for label, text in pairs:
        labels.setdefault(text, []).append(label)
    lines = []
    for text, names in labels.items():
        more = f" and {len(names) - 2} more" if len(names) > 3 else ""
        listed = "; ".join(names[:2] if more else names) + more
        lines.append(f"{listed}: {text}" if names[0] else text)
    return lines


def before_training(name: str) -> str:
    """The message for a stop before the first step of a start, when there is nothing to lose."""
    return f"stopped by {name} before the first step; nothing to save; start the same command again"


def interrupted_twice(step: int) -> str:
    """The message for a second Ctrl-C at a step, which saves nothing; 0: before the first step."""
    place = f" at step {step:,}, without a save" if step else ""
    return f"interrupted twice: ended at once{place}; the same command starts or resumes it"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 300 characters; its type if it is empty."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:300]
