"""Our settings for the keys of other tools, from `other_tools.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path


@cache
def other_tools() -> dict[str, dict[str, tuple[str, str]]]:
    """The keys of each other tool, each with our key (or `key=value`, or empty) and a remark."""
    tools = tomllib.loads(Path(__file__).with_name("other_tools.toml").read_text(encoding="utf-8"))
    for keys in tools.values():
        keys |= {key: (own, "") for key, own in keys.items() if isinstance(own, str)}
    return tools


def answers_of(key: str, fields: Iterable[str]) -> dict[str, str]:
    """Our keys (or `key=value`) for a key of other tools, each with a remark.

    The whole key counts first, then its name without the section. A name alone may also be the end
    of a key of another tool, unless it is the end of one of ours (`fields`).
    """
    if answers := _exactly(key) or _exactly(key.rpartition(".")[2]):
        return answers
    if not any(field.endswith(f".{key}") for field in fields):
        for keys in other_tools().values():
            for other, (own, remark) in keys.items():
                if key == other.rpartition(".")[2]:
                    answers.setdefault(own, remark)
    return answers


def _exactly(key: str) -> dict[str, str]:
    answers = dict[str, str]()
    for keys in other_tools().values():
        if key in keys:
            answers.setdefault(*keys[key])
    return answers


def in_words(answers: Mapping[str, str]) -> str:
    """The answers for a key as a text; empty without answers."""
    notes = {own: f" ({remark})" * bool(remark) for own, remark in answers.items()}
    return " or ".join(f"write {own}{notes[own]}" if own else answers[own] for own in answers)
