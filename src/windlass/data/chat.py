"""Conversations as training rows: the loss on the assistant's turns alone, laid out by the tokenizer's chat template."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from windlass.data.corpus import find_files
from windlass.data.rows import Rows
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")
Message = dict[str, str]
"""`role` (system, user or assistant) and `content`."""
LAYOUT = "chat 2"
"""Changes with what is made of a conversation: rows made otherwise are made again."""
Piece = tuple[str | int | None, bool]
"""A text, a special token by its id, or None for the end-of-text token; and whether it counts in the loss."""
NONE: Mapping[str, int] = MappingProxyType({})
TODAY = date(2024, 7, 26)
"""What a template that asks for the date is told, so that the same rows come out on every day; Llama 3's own default."""
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
        texts = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and value and isinstance(value, str | dict)
        }
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

    def prompt(self, messages: Sequence[Message], special: Mapping[str, int] = NONE) -> list[str | int | None]:
        """The text after which the assistant speaks, in pieces as those of `pieces`."""
        if self.source:
            guard = _Guard(special)
            return [piece for piece, _ in guard.cut(self._render(messages, guard, ask=True)[0], [])]
        return [*(text for text, _ in self._plain(messages)), "Assistant:"]

    def pieces(self, messages: Sequence[Message], special: Mapping[str, int] = NONE) -> list[Piece]:
        """The conversation up to its last answer, in pieces, each with whether it counts.

        An answer ends with the token that ends its turn; what a template has between `{% generation %}` and
        `{% endgeneration %}` counts where it has them. A special token's text in a message is text.

        Args:
            messages: The conversation, with at least one answer.
            special: Texts and ids of the special tokens that the template may write.

        Returns:
            Texts, ids of special tokens, and None for the end-of-text token.

        Raises:
            UserError: The template writes earlier turns differently once later ones are there.
        """
        if not self.source:
            return self._plain(messages)
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        guard = _Guard(special)
        whole, spans = self._render(messages[: places[-1] + 1], guard, ask=False)
        if not GENERATION.search(self.source):
            spans = self._answers(messages, places, whole, guard)
        return guard.cut(whole, spans)

    def end_of_turn(self, special: Mapping[str, int]) -> int | None:
        """The special token after which the assistant has spoken; None where there is none."""
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
        found: list[tuple[int, int]] = []
        for number, (place, head) in enumerate(zip(places, heads, strict=True)):
            last = number == len(places) - 1
            here = whole if last else self._render(messages[: place + 1], guard, ask=False)[0]
            closed = whole.startswith(here)
            stop = len(here) if closed or last else len(heads[number + 1])
            start, before = len(head), found[-1][1] if found else 0
            end = guard.turn_end(whole[start:stop], messages[place]["content"], closed) if start <= stop else None
            if not whole.startswith(head) or start < before or end is None:
                raise UserError(
                    "the tokenizer's chat template changes earlier turns when later ones follow, so that the answers cannot "
                    "be told apart from the rest; train on conversations with one answer"
                )
            found.append((start, start + end))
        return found

    def _plain(self, messages: Sequence[Message]) -> list[Piece]:
        found: list[Piece] = []
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
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_blocks()]
        )
        environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = TODAY.strftime
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
        parts, spans, size = re.split(f"([{BEGIN}{END}])", text), [], 0
        begun = 0
        for part in parts:
            if part == BEGIN:
                begun = size
            elif part == END:
                spans.append((begun, size))
            else:
                size += len(part)
        return "".join(part for part in parts if part not in (BEGIN, END)), spans


class _Guard:
    """Tells the special tokens that a template writes from the same texts in a message."""

    def __init__(self, special: Mapping[str, int]):
        self._special = special
        texts = sorted(special, key=len, reverse=True)  # the longest that matches, as in `tokenizers`
        self._found = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
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
        said = self.hide(content).strip()
        at = (tail.rfind(said) if closed else tail.find(said)) if said else 0
        ends = [match.end() for match in self._found.finditer(tail) if match.start() >= at + len(said)]
        if at < 0:  # the template changed it
            ends = [match.end() for match in self._found.finditer(tail)][-1:]
        return ends[0] if ends else len(tail) if closed else None

    def cut(self, text: str, spans: Sequence[tuple[int, int]]) -> list[Piece]:
        """A rendered text in pieces: texts and special tokens, those in `spans` marked."""
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        pieces: list[Piece] = []
        for number, (start, stop) in enumerate(itertools.pairwise(edges)):
            part, at, counts = text[start:stop], 0, number % 2 == 1
            for match in self._found.finditer(part):
                pieces += [(self._shown(part[at : match.start()]), counts), (self._special[match[0]], counts)]
                at = match.end()
            pieces.append((self._shown(part[at:]), counts))
        return [piece for piece in pieces if piece[0] != ""]


@cache
def _generation_blocks() -> Any:
    """The extension of jinja that puts what is between `{% generation %}` and `{% endgeneration %}` between two marks."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - how jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    return Generation


def special_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Texts and ids of a tokenizer's special tokens."""
    known: Mapping[str, int] | None = getattr(tokenizer, "special", None)
    if known is not None:
        return known
    return {} if tokenizer.eot is None else {tokenizer.decode([tokenizer.eot]): tokenizer.eot}


def stop_tokens(tokenizer: Tokenizer, template: Template | None = None) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's own, and the end of a turn in its chat template."""
    turn = template.end_of_turn(special_tokens(tokenizer)) if template is not None and template.source else None
    return frozenset(token for token in (tokenizer.eot, turn) if token is not None)


def encode(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> tuple[list[int], list[bool]]:
    """The tokens of pieces of a conversation, each with whether it counts.

    A tokenizer of `tokenizers` reads them as one text: then the tokens are those of `apply_chat_template`.
    """
    known = [(tokenizer.eot if piece is None else piece, counts) for piece, counts in pieces]
    parts = [(piece, counts) for piece, counts in known if piece is not None]
    if True:
        ids, marks = tokenizer.encode_marked(parts)
        return list(ids), list(marks)
    found = [
        (int(i), counts)
        for piece, counts in parts
        for i in ([piece] if isinstance(piece, int) else tokenizer.encode(piece))
    ]
    return [i for i, _ in found], [counts for _, counts in found]


def prompt_tokens(messages: Sequence[Message], template: Template, tokenizer: Tokenizer) -> list[int]:
    """The tokens after which the assistant speaks."""
    pieces = template.prompt(messages, special_tokens(tokenizer))
    return encode(tokenizer, [(piece, False) for piece in pieces])[0]


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
    ids, marks = encode(tokenizer, template.pieces(messages, special_tokens(tokenizer)))
    ids, marks = ids[: context + 1], marks[: context + 1]
    return (ids, marks) if any(marks[1:]) else None


def rows(items: Iterable[Sequence[Message]], template: Template, tokenizer: Tokenizer, context: int) -> Rows:
    """Training rows, one a conversation; those whose answers begin past the context are left out."""
    made = (row(item, template, tokenizer, context) for item in items)
    found = Rows((r for r in made if r is not None), pad=tokenizer.eot or 0)
    if not len(found):
        raise UserError(f"model.context = {context} tokens is too short: no conversation reaches an answer within it")
    return found
