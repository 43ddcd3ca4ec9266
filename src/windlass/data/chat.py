"""Conversations as training rows: the loss on the assistant's turns alone, laid out by the tokenizer's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data.corpus import find_files
from windlass.data.rows import Rows
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")
Message = dict[str, str]
"""`role` (system, user or assistant) and `content`."""


@dataclass(frozen=True)
class Template:
    """How a conversation is written down: in the language of `transformers`' chat templates, or, empty, in a plain way.

    The plain way is `User: ...`, a blank line, `Assistant: ...` and the end-of-text token.
    """

    source: str = ""
    special: tuple[tuple[str, str], ...] = ()
    """Names and texts of special tokens that the template uses, such as `bos_token`."""

    @staticmethod
    def of_directory(directory: Path) -> Template:
        """The template that lies beside a tokenizer of `transformers`; the plain one where there is none."""
        try:
            config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            config = {}
        source = config.get("chat_template") or ""
        if isinstance(source, list):  # several, by name
            source = next((t["template"] for t in source if t.get("name") == "default"), "")
        if (directory / "chat_template.jinja").is_file():
            source = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        special = {
            name: config[name] for name in ("bos_token", "eos_token", "unk_token", "pad_token") if config.get(name)
        }
        texts = {name: value["content"] if isinstance(value, dict) else value for name, value in special.items()}
        return Template(source, tuple(texts.items()))

    @staticmethod
    def load(directory: Path) -> Template:
        """The reverse of `save`; the plain template where none was saved."""
        try:
            saved = json.loads((directory / "chat.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Template()
        return Template(saved["source"], tuple(saved["special"].items()))

    def save(self, directory: Path) -> None:
        """Write it down as `chat.json`."""
        text = json.dumps({"source": self.source, "special": dict(self.special)}, indent=1)
        (directory / "chat.json").write_text(text + "\n", encoding="utf-8")

    def prompt(self, messages: Sequence[Message]) -> list[str | None]:
        """The text after which the assistant speaks, in pieces; None stands for the end-of-text token."""
        if self.source:
            return [self._render(messages, ask=True)]
        return [*(text for text, _ in self._plain(messages)), "Assistant:"]

    def pieces(self, messages: Sequence[Message]) -> list[tuple[str | None, bool]]:
        """The conversation in pieces, each with whether it counts; None stands for the end-of-text token.

        Raises UserError where the template writes earlier turns differently once later ones are there.
        """
        if not self.source:
            return self._plain(messages)
        found: list[tuple[str | None, bool]] = []
        before = ""
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            head, whole = self._render(messages[:place], ask=True), self._render(messages[: place + 1], ask=False)
            if not head.startswith(before) or not whole.startswith(head):
                raise UserError(
                    "the tokenizer's chat template changes earlier turns when later ones follow, so that the answers cannot "
                    "be told apart from the rest; train on conversations with one answer"
                )
            found += [(head[len(before) :], False), (whole[len(head) :], True)]
            before = whole
        return found

    def _plain(self, messages: Sequence[Message]) -> list[tuple[str | None, bool]]:
        found: list[tuple[str | None, bool]] = []
        for message in messages:
            if message["role"] == "assistant":
                found += [
                    ("Assistant:", False),
                    (" " + message["content"].strip(), True),
                    (None, True),
                    ("\n\n", False),
                ]
            else:
                found.append((f"{message['role'].capitalize()}: {message['content'].strip()}\n\n", False))
        return found

    @cached_property
    def _compiled(self) -> Any:
        # The dialect of `transformers`: see "Chat templates" in its documentation. The sandbox runs nothing of ours.
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        source = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", self.source)
        return environment.from_string(source)

    def _render(self, messages: Sequence[Message], *, ask: bool) -> str:
        from jinja2 import TemplateError

        try:
            return str(self._compiled.render(messages=list(messages), add_generation_prompt=ask, **dict(self.special)))
        except TemplateError as error:
            raise UserError(f"the tokenizer's chat template does not take this conversation: {error}") from None


def encode(tokenizer: Tokenizer, text: str | None) -> list[int]:
    """The tokens of a piece of a rendered conversation, in which the end-of-text token may be spelled out."""
    eot = [] if tokenizer.eot is None else [tokenizer.eot]
    if text is None:
        return eot
    if not eot:
        return [int(i) for i in tokenizer.encode(text)]
    found: list[int] = []
    for place, part in enumerate(text.split(tokenizer.decode(eot))):
        found += (eot if place else []) + [int(i) for i in tokenizer.encode(part)]
    return found


def prompt_tokens(messages: Sequence[Message], template: Template, tokenizer: Tokenizer) -> list[int]:
    """The tokens after which the assistant speaks."""
    return [i for piece in template.prompt(messages) for i in encode(tokenizer, piece)]


def read_files(pattern: str, setting: str = "data.source") -> list[list[Message]]:
    """The conversations of JSONL files, each line an object with `messages`; raises UserError with the line."""
    found = []
    for path in find_files(pattern, setting):
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{setting}: {path} cannot be read: {error}") from None
        found += [_conversation(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f"{setting}: there is no conversation in {pattern}")
    return found


def _conversation(line: str, where: str) -> list[Message]:
    try:
        messages = [{"role": str(m["role"]), "content": m["content"]} for m in json.loads(line)["messages"]]
    except (ValueError, KeyError, TypeError):
        raise UserError(f'{where}: write {{"messages": [{{"role": "user", "content": "..."}}, ...]}}') from None
    for message in messages:
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            raise UserError(
                f"{where}: a message has a role ({', '.join(ROLES)}) and a content that is text, not {message}"
            )
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where}: there is no answer of the assistant to learn from")
    return messages


def row(
    messages: Sequence[Message], template: Template, tokenizer: Tokenizer, context: int
) -> tuple[list[int], list[bool]] | None:
    """Tokens and marks of a conversation, cut after `context` + 1 of them; None where nothing is left to learn."""
    ids: list[int] = []
    marks: list[bool] = []
    for text, counts in template.pieces(messages):
        piece = encode(tokenizer, text)
        ids += piece
        marks += [counts] * len(piece)
    ids, marks = ids[: context + 1], marks[: context + 1]
    return (ids, marks) if any(marks[1:]) else None


def rows(items: Iterable[Sequence[Message]], template: Template, tokenizer: Tokenizer, context: int) -> Rows:
    """Training rows, one a conversation; those whose answers begin past the context are left out."""
    made = (row(item, template, tokenizer, context) for item in items)
    found = Rows((r for r in made if r is not None), pad=tokenizer.eot or 0)
    if not len(found):
        raise UserError(f"model.context = {context} tokens is too short: no conversation reaches an answer within it")
    return found
