"""Conversations as training rows: the loss on the assistant's turns alone, laid out by the tokenizer's chat template.

What is unusual:
- The tokens are those of `transformers`' `apply_chat_template`, but a special token's text in a message is text: messages
  are guarded by private characters while the template is rendered, so that it is clear who wrote what.
- Where the answers are is computed without help of the template, by rendering the conversation up to each answer;
  templates that mark them with `{% generation %}` are taken at their word.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data.remote import load_dataset
from windlass.data.samples import Rows
from windlass.data.sources import find_files
from windlass.errors import UserError
from windlass.fileio import read_json

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")
Message = dict[str, str]
"""`role` (system, user or assistant) and `content`."""
LAYOUT = "chat 2"
"""Changes with the rows that a conversation gives: rows of another layout are prepared again."""
Piece = tuple[str | int | None, bool]
"""A text, a special token by its id, or None for the end-of-text token; and whether it counts in the loss."""

TODAY = date(2024, 7, 26)
"""The date that a template is given, so that the same rows come out on every day; Llama 3's own default."""
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
HIDDEN = ("\U000f0000", "\U000f0001")
BEGIN, END = "\U000f0002", "\U000f0003"
PRIVATE = (*HIDDEN, BEGIN, END)
"""Marks in a text while it is rendered, of the private characters of Unicode; in a message they are guarded, too."""


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
        """The template beside a tokenizer of `transformers`, or that `save` wrote; else the plain one."""
        config = read_json(directory / "tokenizer_config.json")
        source = config.get("chat_template") or ""
        if isinstance(source, list):  # several, by name
            source = next((t["template"] for t in source if t.get("name") == "default"), "")
        if (directory / "chat_template.jinja").is_file():
            source = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        texts = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and value and isinstance(value, str | dict)
        }
        return Template(source, tuple(texts.items()))

    def save(self, directory: Path) -> None:
        config = {**dict(self.special), "chat_template": self.source}
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    def prompt(self, messages: Sequence[Message], special: Mapping[str, int] | None = None) -> list[str | int | None]:
        """The text after which the assistant answers, in pieces as those of `pieces`."""
        if self.source:
            guard = _Guard(special or {})
            return [piece for piece, _ in guard.cut(self._render(messages, guard, ask=True)[0], [])]
        return [*(text for text, _ in _plain(messages)), "Assistant:"]

    def pieces(self, messages: Sequence[Message], special: Mapping[str, int] | None = None) -> list[Piece]:
        """The conversation up to its last answer, in pieces, each with whether it counts.

        An answer ends with the token that ends its turn; what a template has between `{% generation %}` and
        `{% endgeneration %}` counts where it has them. A special token's text (in `special`, with its id) in a message is
        text. Raises UserError where the template writes earlier turns differently once later ones are there.
        """
        if not self.source:
            return _plain(messages)
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        guard = _Guard(special or {})
        whole, spans = self._render(messages[: places[-1] + 1], guard, ask=False)
        if not GENERATION.search(self.source):
            spans = self._answers(messages, places, whole, guard)
        return guard.cut(whole, spans)

    def end_of_turn(self, special: Mapping[str, int]) -> int | None:
        try:
            pieces = self.pieces([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], special)
        except UserError:
            return None
        last = [piece for piece, counts in pieces if counts and piece != ""][-1:]
        return last[0] if last and isinstance(last[0], int) else None

    def _answers(
        self, messages: Sequence[Message], places: list[int], whole: str, guard: _Guard
    ) -> list[tuple[int, int]]:
        """Where in the rendered conversation the answers are: after the text that asks for each, up to its turn's end."""
        heads = [self._render(messages[:place], guard, ask=True)[0] for place in places]
        spans: list[tuple[int, int]] = []
        for number, (place, head) in enumerate(zip(places, heads, strict=True)):
            last = number == len(places) - 1
            here = whole if last else self._render(messages[: place + 1], guard, ask=False)[0]
            closed = whole.startswith(here)
            stop = len(here) if closed or last else len(heads[number + 1])
            start, before = len(head), spans[-1][1] if spans else 0
            end = guard.turn_end(whole[start:stop], messages[place]["content"], closed) if start <= stop else None
            if not whole.startswith(head) or start < before or end is None:
                raise UserError(
                    "the tokenizer's chat template changes earlier turns when later ones follow, so that the answers cannot "
                    "be told apart from the rest; train on conversations with one answer"
                )
            spans.append((start, start + end))
        return spans

    @cached_property
    def _compiled(self) -> Any:
        # The dialect of `transformers`: see "Chat templates" in its documentation. The sandbox runs nothing of ours.
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """Puts what is between `{% generation %}` and `{% endgeneration %}` between two marks."""

            tags = {"generation"}  # noqa: RUF012 - how jinja declares it

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

            def _mark(self, caller: Any) -> str:
                return f"{BEGIN}{caller()}{END}"

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
        environment.globals |= {"raise_exception": raise_exception, "strftime_now": TODAY.strftime}
        return environment.from_string(self.source)

    def _render(self, messages: Sequence[Message], guard: _Guard, *, ask: bool) -> tuple[str, list[tuple[int, int]]]:
        """The rendered conversation, its messages guarded, and where in it the template's generation blocks are."""
        from jinja2 import TemplateError

        guarded = [{**message, "content": guard.hide(message["content"])} for message in messages]
        # `transformers` gives None for what a caller leaves out, and templates ask for that.
        given = {"tools": None, "documents": None, **dict(self.special)}
        try:
            text = str(self._compiled.render(messages=guarded, add_generation_prompt=ask, **given))
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(f"the tokenizer's chat template does not take this conversation: {error}") from None
        parts, spans, size, begun = [], [], 0, 0
        for part in re.split(f"([{BEGIN}{END}])", text):
            if part == BEGIN:
                begun = size
            elif part == END:
                spans.append((begun, size))
            else:
                parts.append(part)
                size += len(part)
        return "".join(parts), spans


def _plain(messages: Sequence[Message]) -> list[Piece]:
    pieces: list[Piece] = []
    for message in messages:
        text = message["content"].strip()
        if message["role"] == "assistant":
            pieces += [("Assistant:", False), (" " + text, True), (None, True), ("\n\n", False)]
        else:
            pieces.append((f"{message['role'].capitalize()}: {text}\n\n", False))
    return pieces


class _Guard:
    """Tells the special tokens that a template writes from the same texts in a message."""

    def __init__(self, special: Mapping[str, int]):
        self._special = special
        texts = sorted(special, key=len, reverse=True)  # the longest that matches, as in `tokenizers`
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._texts = [*texts, *PRIVATE]
        self._hidden = re.compile("|".join(map(re.escape, self._texts)))

    def hide(self, text: str) -> str:
        """A message in which nothing looks like a special token."""
        return self._hidden.sub(lambda m: f"{HIDDEN[0]}{self._texts.index(m[0])}{HIDDEN[1]}", text)

    def _shown(self, text: str) -> str:
        return re.sub(f"{HIDDEN[0]}([0-9]+){HIDDEN[1]}", lambda m: self._texts[int(m[1])], text)

    def turn_end(self, tail: str, content: str, closed: bool) -> int | None:
        """Where an answer ends in the text that follows its head: after the first special token that comes after it.

        Where there is none, `closed` says that the text has nothing else in it; None where it may have.
        """
        answer = self.hide(content).strip()
        at = (tail.rfind(answer) if closed else tail.find(answer)) if answer else 0
        ends = [match.end() for match in self._pattern.finditer(tail) if match.start() >= at + len(answer)]
        if at < 0:  # the template changed it
            ends = [match.end() for match in self._pattern.finditer(tail)][-1:]
        return ends[0] if ends else len(tail) if closed else None

    def cut(self, text: str, spans: Sequence[tuple[int, int]]) -> list[Piece]:
        """A rendered text in pieces: texts and special tokens, those in `spans` marked."""
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        pieces: list[Piece] = []
        for number, (start, stop) in enumerate(itertools.pairwise(edges)):
            part, at, counts = text[start:stop], 0, number % 2 == 1
            for match in self._pattern.finditer(part):
                pieces += [(self._shown(part[at : match.start()]), counts), (self._special[match[0]], counts)]
                at = match.end()
            pieces.append((self._shown(part[at:]), counts))
        return [piece for piece in pieces if piece[0] != ""]


# -- tokens and rows


def stop_tokens(tokenizer: Tokenizer, template: Template | None = None) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's own, and the end of a turn in its chat template."""
    turn = template.end_of_turn(tokenizer.special) if template is not None and template.source else None
    return frozenset(token for token in (tokenizer.eot, turn) if token is not None)


def encode(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> tuple[list[int], list[bool]]:
    """The tokens of pieces of a conversation, each with whether it counts."""
    by_id = [(tokenizer.eot if piece is None else piece, counts) for piece, counts in pieces]
    return tokenizer.encode_marked([(piece, counts) for piece, counts in by_id if piece is not None])


def prompt_tokens(messages: Sequence[Message], template: Template, tokenizer: Tokenizer) -> list[int]:
    return encode(tokenizer, [(piece, False) for piece in template.prompt(messages, tokenizer.special)])[0]


def row(
    messages: Sequence[Message], template: Template, tokenizer: Tokenizer, context: int
) -> tuple[list[int], list[bool]] | None:
    """Tokens and marks of a conversation, cut after `context` + 1 of them; None where nothing is left to learn."""
    ids, marks = encode(tokenizer, template.pieces(messages, tokenizer.special))
    ids, marks = ids[: context + 1], marks[: context + 1]
    return (ids, marks) if any(marks[1:]) else None


def rows(items: Iterable[Sequence[Message]], template: Template, tokenizer: Tokenizer, context: int) -> Rows:
    """Training rows, one a conversation; those whose answers begin past the context are left out."""
    fitting = (row(item, template, tokenizer, context) for item in items)
    table = Rows((r for r in fitting if r is not None), pad=tokenizer.eot or 0)
    if not len(table):
        raise UserError(f"model.context = {context} tokens is too short: no conversation reaches an answer within it")
    return table


# -- files


def read(source: str, split: str = "train", setting: str = "data.source") -> list[list[Message]]:
    """The conversations of JSONL files, each line an object with `messages`, or of the column `messages` of `hf:...`."""
    conversations = []
    if source.startswith("hf:"):
        table = load_dataset(source[3:], split)
        if "messages" not in table.column_names:
            raise UserError(
                f"{setting}: {source}, split {split!r} has no column 'messages'; it has {', '.join(table.column_names)}"
            )
        for number, record in enumerate(table.select_columns(["messages"])):
            conversations.append(_conversation(record, f"{source}, row {number}"))
    else:
        for path in find_files(source, setting):
            try:
                lines = path.read_text(encoding="utf-8").split("\n")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{setting}: {path} cannot be read: {error}") from None
            conversations += [
                _conversation(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()
            ]
    if not conversations:
        raise UserError(f"{setting}: there is no conversation in {source}")
    return conversations


def _conversation(record: str | dict[str, Any], where: str) -> list[Message]:
    try:
        tree = json.loads(record) if isinstance(record, str) else record
        messages = [{"role": str(m["role"]), "content": m["content"]} for m in tree["messages"]]
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
