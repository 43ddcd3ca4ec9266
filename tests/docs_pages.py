"""The pages of the documentation as tests read them: blocks, and what a command line means."""

import contextlib
import io
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

from windlass import cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^ *```", re.M | re.S)
SHELLS = ("", "bash", "console", "sh")
PLACEHOLDERS = {
    "RUN": "runs/run",
    "RECIPE": "quickstart",
    "STUDY": "studies/study",
    "STEP": "4",
    "DIR": "folder",
    "FILE": "mine.toml",
    "HOST": "localhost",
    "N": "2",
}
"""What a name in capitals stands for in a command that is tried."""
OPERATORS = ("&&", "||", ";", "|", ">", ">>", "<", "&")


def pages() -> list[Path]:
    """Every page with commands or links, README.md first."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # of the opening fence
    language: str
    text: str

    @property
    def file(self) -> str:
        """The name in the comment on the block's first line, if it is that of a file."""
        found = re.match(r"# ([\w.-]+\.\w+)\n", self.text)
        return found[1] if found and self.language in ("toml", "json", "python") else ""


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    text: str  # with continued lines joined, without a prompt

    def parts(self) -> list[list[str]]:
        """The words of each command between `&&`, `|` and the like, without comments; a file that
        output goes to follows `>`.
        """
        lexer = shlex.shlex(self.text, posix=True, punctuation_chars=";&|><")
        lexer.whitespace_split = True
        parts = [list[str]()]
        for word in lexer:
            if word == ">":
                parts[-1].append(word)
            elif word in OPERATORS:
                parts.append([])
            else:
                parts[-1].append(word)
        return [part for part in parts if part]


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(name_of(page), line, match[2], textwrap.dedent(match[3]))


def commands_of(block: Block) -> Iterator[Command]:
    """The commands of a block of a shell that call windlass; in one with prompts the lines without
    one are output.
    """
    if block.language not in SHELLS or block.text.startswith("#!"):
        return  # a script is run by a scheduler's test
    lines = block.text.split("\n")
    prompts = block.language == "console" or any(line.startswith("$ ") for line in lines)
    number = 0
    while number < len(lines):
        first, text = number, lines[number]
        while text.endswith("\\") and number + 1 < len(lines):
            number += 1
            text = text[:-1] + " " + lines[number].strip()
        number += 1
        if prompts and not text.startswith("$ "):
            continue
        text = text.removeprefix("$ ").strip()
        if not block.language and re.search(r"\[(--|KEY)|…", text):
            continue  # a synopsis
        called = re.search(r"(^|[\s(=])windlass\s+[a-z-]", text.partition(" #")[0])
        if called and not text.startswith(("#", "echo ", "pip ", "[")):
            yield Command(block.page, block.line + 1 + first, " ".join(text.split()))


@cache
def command_line() -> Any:
    """The command line with all its commands, as typer's group."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main(["--version"])
    return typer.main.get_command(cli.app)


def windlass_words(part: list[str]) -> list[str]:
    """The words after `windlass`, however a launcher or an interpreter is put before it."""
    if ">" in part:
        part = part[: part.index(">")]
    for index, word in enumerate(part):
        if word == "windlass" or word.endswith("/bin/windlass"):
            return [PLACEHOLDERS.get(word, word) for word in part[index + 1 :]]
    return []
