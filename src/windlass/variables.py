"""Environment variables as several rooms read them: SLURM's short lists, and names that look like a secret's. No torch."""

from __future__ import annotations

import itertools
import re

from windlass.errors import UserError

# PWD and OLDPWD are the shell's directories: every path would read ***. `_PWD` after another word is a password.
SECRET_NAME = re.compile(
    r"(?i)((^|[._-])((api|access|secret|private|auth)_?-?key|apikey|token|jwt|cookie|jobcookie|secret|passw(or)?d|passphrase"
    r"|credentials?)|[._-]pwd)$"
)


def expand_hosts(text: str) -> list[str]:
    """SLURM's short list as names: `a[08-10,12],b` is a08, a09, a10, a12, b."""
    hosts = []
    for item in re.findall(r"(?:[^,\s\[]|\[[^\]]*\])+", text):
        parts = re.split(r"\[([^\]]*)\]", item)  # text and ranges in turn
        choices = [[part] if index % 2 == 0 else _numbers(part, text) for index, part in enumerate(parts)]
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    return hosts


def _numbers(ranges: str, text: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            raise UserError(f"{text!r} is no list of hosts as SLURM writes it")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """SLURM's numbers of tasks per node: `4(x2),1` is 4, 4, 1."""
    return [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
