"""Runs the commands of the measured parts of pages again, and writes what they print into the pages.

    .venv/bin/python docs/measure.py docs/evidence/scaling.md [--only WORD]

A table of Markdown after `<!-- measured: COMMAND -->` is what COMMAND prints. After
`<!-- measured -->` stands a block of console commands (`$ COMMAND`), each with its output. Commands
run in the root of the checkout, where `$NAME` stands for a variable of the environment. For timings
the machine must be idle.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = re.compile(r"(<!-- measured: (.+?) -->\n\n)((?:\|.*\n)*)\n*")
CONSOLE = re.compile(r"(<!-- measured -->\n\n```console\n)(.*?)(```\n)", re.S)


def output(command: str) -> str:
    """What a command prints, without progress and warnings on stderr."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}
    print(f"$ {command}", file=sys.stderr, flush=True)
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
    )
    if done.returncode:
        sys.exit(f"{command}: exit code {done.returncode}")
    return done.stdout.rstrip("\n") + "\n"


def measured(text: str, only: str = "") -> str:
    """The page with new output under each command that contains the word."""

    def table(match: re.Match[str]) -> str:
        rows = output(match[2]) if only in match[2] else match[3]
        return (
            match[1]
            + "".join(f"{row}\n" for row in rows.splitlines() if row.startswith("|"))
            + "\n"
        )

    def console(match: re.Match[str]) -> str:
        commands = re.findall(r"^\$ (.+)$", match[2], re.M)
        if not any(only in command for command in commands):
            return match[0]
        return match[1] + "\n".join(f"$ {c}\n{output(c)}" for c in commands) + match[3]

    return CONSOLE.sub(console, TABLE.sub(table, text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="a word of the commands to run")
    given = parser.parse_args()
    for page in given.pages:
        page.write_text(measured(page.read_text(encoding="utf-8"), given.only), encoding="utf-8")


if __name__ == "__main__":
    main()
