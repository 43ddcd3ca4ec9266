"""Conversations as training rows: the loss on the assistant's turns alone, laid out by the tokenizer's chat template.

The tokens are those of `transformers`' `apply_chat_template`, but a special token's text in a message is text: it is marked
while the template is rendered. Where the answers are is computed by rendering the conversation up to each of them; templates
that mark them with `{% generation %}` are followed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from windlass.data.conversations import Conversation, Message
from windlass.data.samples import Row
from windlass.data.tokenizer import MARK, Tokenizer
from windlass.errors import UserError
from windlass.fileio import read_json

LAYOUT = "chat 5"  # changes with the rows that a conversation gives: rows of another layout are prepared again
Piece = tuple[
    str | int, bool
]  # a text, or a special token by its id; and whether it counts in the loss
PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}Assistant:{% generation %} {{ m.content | trim }}{{ end_of_text }}"
    "{% endgeneration %}{% else %}{{ m.role | capitalize }}: {{ m.content | trim }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_LAYOUT = "User: ... Assistant: ..."
TODAY = date(
    2024, 7, 26
)  # for templates, so that the same rows come out on every day; Llama 3's own default
GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
# Where generation blocks are; like MARK of Unicode's noncharacters, which are for use inside a program alone.
BEGIN, END = "\ufdd1", "\ufdd2"


@dataclass(frozen=True)
class Template:
    """How a conversation is written down, in the language of `transformers`' chat templates."""

    source: str = ""  # empty: PLAIN
    special: tuple[
        tuple[str, str], ...
    ] = ()  # names and texts of tokens that the template uses, such as `bos_token`

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

    def describe(self, tokenizer: str, items: Sequence[Conversation]) -> str:
        """What lays out these conversations, in words; `tokenizer`: as the recipe names it."""
        if not any(item.messages for item in items):
            return "none: prompt and completion are one text"
        return (
            f"the chat template of {tokenizer}"
            if self.source
            else f"{PLAIN_LAYOUT} ({tokenizer} has no chat template)"
        )

    def save(self, directory: Path) -> None:
        config = {**dict(self.special), "chat_template": self.source}
        (directory / "tokenizer_config.json").write_text(
            json.dumps(config, indent=1) + "\n", encoding="utf-8"
        )

    def pieces(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        tools: list[Any] | None = None,
        untrained: frozenset[int] = frozenset(),
    ) -> list[Piece]:
        """The conversation up to its last answer, in pieces, each with whether it counts; the answers at the places `untrained`
        do not.

        An answer ends with the token that ends its turn; what a template has between `{% generation %}` and
        `{% endgeneration %}` counts where it has them. A special token's text in a message is text. Raises UserError where
        the template writes earlier turns differently once later ones are there.
        """
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        whole = self.render(messages[: places[-1] + 1], tokenizer, ask=False, tools=tools)
        if GENERATION.search(self.source or PLAIN):
            if untrained and whole.count(BEGIN) != len(places):
                raise UserError(
                    "the chat template has not one generation block for each answer: a weight cannot be honoured"
                )
            answers = iter(places)
            block = re.compile(f"{BEGIN}(.*?){END}", flags=re.DOTALL)
            return _cut(
                block.sub(lambda m: m[1] if next(answers) in untrained else m[0], whole), tokenizer
            )
        # An answer follows the text that asks for it, and ends with the first special token after its content.
        heads = [
            self.render(messages[:place], tokenizer, ask=True, tools=tools) for place in places
        ]
        limits = [*map(len, heads[1:]), len(whole)]
        for place, head, limit in reversed(list(zip(places, heads, limits, strict=True))):
            if place in untrained:
                continue
            tail, answer = (
                whole[len(head) : limit],
                _guarded(messages[place]["content"] or "", tokenizer).strip(),
            )
            content_end = (
                tail.find(answer) + len(answer) if answer in tail else 0
            )  # a template may change it
            ends = [
                m.end()
                for m in tokenizer.special_pattern.finditer(tail)
                if m.start() >= content_end
            ]
            if messages[place].get(
                "tool_calls"
            ):  # may have special tokens inside: it ends with the turn's last one
                turn = self.render(messages[: place + 1], tokenizer, ask=False, tools=tools)
                ends = [end for end in ends if end <= len(turn) - len(head)][-1:]
            if not whole.startswith(head) or not (ends or limit == limits[-1]):
                raise UserError(
                    "the answers cannot be told apart in the tokenizer's chat template, which changes earlier turns or ends none "
                    "with a special token; train on conversations with one answer"
                )
            end = len(head) + (ends[0] if ends else len(tail))
            whole = head + BEGIN + whole[len(head) : end] + END + whole[end:]
        return _cut(whole, tokenizer)

    @cached_property
    def _compiled(self) -> Any:
        # The dialect of `transformers`: see "Chat templates" in its documentation. The sandbox runs nothing of ours.
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **how: json.dumps(
            value, ensure_ascii=False, **how
        )
        # A generation block is a call block of jinja's that puts its text between two marks.
        names = {"strftime_now": TODAY.strftime, "mark": lambda caller: f"{BEGIN}{caller()}{END}"}
        environment.globals.update(names, raise_exception=raise_exception)
        tags = {None: "call mark()", "end": "endcall"}
        return environment.from_string(
            GENERATION.sub(lambda m: f"{m[1]}{tags[m[2]]}{m[3]}", self.source or PLAIN)
        )

    def render(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        ask: bool,
        tools: list[Any] | None = None,
    ) -> str:
        """The rendered conversation, its messages guarded, generation blocks between BEGIN and END."""
        from jinja2 import TemplateError

        if not self.source and (tools or any(message.get("tool_calls") for message in messages)):
            raise UserError(
                "tools are written by a tokenizer's chat template: set data.tokenizer to one that has one"
            )
        guarded = _guarded(list(messages), tokenizer)
        end = "" if tokenizer.eot is None else tokenizer.inner.id_to_token(tokenizer.eot)
        # `transformers` gives None for what a caller leaves out, and templates ask for that.
        names = {
            "tools": _guarded(tools, tokenizer),
            "documents": None,
            "end_of_text": end,
            **dict(self.special),
        }
        try:
            return str(self._compiled.render(messages=guarded, add_generation_prompt=ask, **names))
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"the tokenizer's chat template does not take this conversation: {error}"
            ) from None


def _guarded(value: Any, tokenizer: Tokenizer) -> Any:
    """Messages in which nothing is a special token: each character of what looks like one is followed by a mark."""
    if isinstance(value, dict):
        return {key: _guarded(part, tokenizer) for key, part in value.items()}
    if isinstance(value, list):
        return [_guarded(part, tokenizer) for part in value]
    if not isinstance(value, str):
        return value
    text = re.sub(f"[{MARK}{BEGIN}{END}]", "", value)
    return tokenizer.special_pattern.sub(lambda m: "".join(c + MARK for c in m[0]), text)


def _cut(text: str, tokenizer: Tokenizer) -> list[Piece]:
    """A rendered text in pieces: texts and special tokens, those between BEGIN and END counted."""
    pieces, counts = list[Piece](), False
    for number, part in enumerate(
        re.split(f"([{BEGIN}{END}]|{tokenizer.special_pattern.pattern})", text)
    ):
        if part in (BEGIN, END):
            counts = part == BEGIN
        elif part:  # separators have the odd numbers
            pieces.append(
                (tokenizer.special[part] if number % 2 else part.replace(MARK, ""), counts)
            )
    return pieces


# -- tokens and rows


def show_row(tokens: Sequence[int], marks: Sequence[bool], tokenizer: Tokenizer) -> str:
    """A row as text, what counts in the loss between \u27e6 and \u27e7."""
    runs = [
        (mark, [i for i, _ in run])
        for mark, run in groupby(zip(tokens, marks, strict=True), key=lambda pair: pair[1])
    ]
    return "".join(
        f"\u27e6{tokenizer.decode(ids)}\u27e7" if mark else tokenizer.decode(ids)
        for mark, ids in runs
    )


def stop_tokens(tokenizer: Tokenizer, template: Template | None = None) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's own, and the end of a turn in its chat template."""
    ends: list[str | int | None] = [tokenizer.eot]
    if template is not None:
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        with contextlib.suppress(UserError):  # it has no turns of this kind
            ends += [piece for piece, counts in template.pieces(talk, tokenizer) if counts][-1:]
    return frozenset(token for token in ends if isinstance(token, int))


def prompt_tokens(
    messages: Sequence[Message], template: Template, tokenizer: Tokenizer
) -> list[int]:
    """The tokens after which the assistant answers."""
    return tokenizer.encode_marked(_cut(template.render(messages, tokenizer, ask=True), tokenizer))[
        0
    ]


def row(item: Conversation, template: Template, tokenizer: Tokenizer, context: int) -> Row | None:
    """A conversation, cut after `context` + 1 tokens; None where nothing is left to learn. A prompt and its completion are two
    texts and the end-of-text token."""
    if item.text is not None:
        if not item.text[1].strip():
            return None
        both, prompt = tokenizer.encode_pair(*item.text)
        ids = [*both, *([] if tokenizer.eot is None else [tokenizer.eot])]
        marks = [False] * prompt + [True] * (len(ids) - prompt)
    else:
        try:
            ids, marks = tokenizer.encode_marked(
                template.pieces(item.messages, tokenizer, item.tools, item.untrained)
            )
        except UserError as error:
            raise UserError(f"{item.place}: {error}") from None
    size = context + 1
    return Row(ids[:size], marks[:size], len(ids)) if any(marks[1:size]) else None
