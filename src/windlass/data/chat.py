"""Conversations as training rows, laid out by a chat template; only the assistant's turns count.

The tokens equal `apply_chat_template` of `transformers`, except that a special token's text in a
message stays text. A mark protects it while the template is rendered. `{% generation %}` blocks
give the places of the answers. Without them Windlass renders the conversation up to each answer.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

from windlass.data.conversations import Conversation, Message
from windlass.data.samples import Row
from windlass.data.tokenizer import MARK, Tokenizer
from windlass.errors import UserError
from windlass.fileio import read_json

LAYOUT = "chat 5"  # the rows' version: rows of another layout are prepared again
Piece = tuple[str | int, bool]  # a text or a special token's id, and whether it counts in the loss
PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}Assistant:{% generation %} "
    "{{ m.content | trim }}{{ end_of_text }}{% endgeneration %}"
    "{% else %}{{ m.role | capitalize }}: {{ m.content | trim }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_LAYOUT = "User: ... Assistant: ..."
TODAY = date(2024, 7, 26)  # for templates, so that rows do not depend on the day; Llama 3's default
GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
# Around a generation block; like MARK they are noncharacters, which are for use in a program.
BEGIN, END = "\ufdd1", "\ufdd2"


@dataclass(frozen=True)
class Template:
    """The layout of a conversation, in the language of `transformers`' chat templates."""

    source: str = ""  # empty: PLAIN
    # texts of tokens by the names that a template has for them, such as `bos_token`
    tokens: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of_directory(directory: Path) -> Template:
        """The template beside a tokenizer of `transformers`, or from `save`; else the plain one."""
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
        return Template(source, texts)

    def describe(self, tokenizer: str, items: Sequence[Conversation]) -> str:
        """The layout of these conversations, in words; `tokenizer` as in the recipe."""
        if not any(item.messages for item in items):
            return "none: prompt and completion are one text"
        if self.source:
            return f"the chat template of {tokenizer}"
        return f"{PLAIN_LAYOUT} ({tokenizer} has no chat template)"

    def save(self, directory: Path) -> None:
        config = {**self.tokens, "chat_template": self.source}
        text = json.dumps(config, indent=1) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def pieces(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        tools: list[Any] | None = None,
        untrained: frozenset[int] = frozenset(),
    ) -> list[Piece]:
        """The conversation up to its last answer, in pieces; the `untrained` answers do not count.

        An answer ends with the token that ends its turn. If the template has `{% generation %}`
        blocks, their content counts instead. UserError if a later turn changes an earlier one.
        """
        render = partial(self.render, tokenizer=tokenizer, tools=tools)
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        whole = render(messages[: places[-1] + 1], ask=False)
        if GENERATION.search(self.source or PLAIN):
            if untrained and whole.count(BEGIN) != len(places):
                raise UserError(
                    "the chat template does not have one generation block for each answer, "
                    "so Windlass cannot apply a weight"
                )
            answers = iter(places)
            block = re.compile(f"{BEGIN}(.*?){END}", flags=re.DOTALL)
            trained = block.sub(lambda m: m[1] if next(answers) in untrained else m[0], whole)
            return _cut(trained, tokenizer)
        # An answer follows its generation prompt, and ends with the first special token after it.
        heads = [render(messages[:i], ask=True) for i in places]
        limits = [*map(len, heads[1:]), len(whole)]
        for place, head, limit in reversed(list(zip(places, heads, limits, strict=True))):
            if place in untrained:
                continue
            tail = whole[len(head) : limit]
            answer = _guarded(messages[place]["content"] or "", tokenizer).strip()
            # a template may change the answer
            content_end = tail.find(answer) + len(answer) if answer in tail else 0
            special = tokenizer.special_pattern.finditer(tail)
            ends = [m.end() for m in special if m.start() >= content_end]
            if messages[place].get("tool_calls"):
                # may have special tokens inside, so it ends with the last one of the turn
                turn = render(messages[: place + 1], ask=False)
                ends = [end for end in ends if end <= len(turn) - len(head)][-1:]
            if not whole.startswith(head) or not (ends or limit == limits[-1]):
                raise UserError(
                    "Windlass cannot find the answers in the tokenizer's chat template, which "
                    "changes earlier turns or does not end an answer with a special token; "
                    "train on conversations with one answer"
                )
            end = len(head) + (ends[0] if ends else len(tail))
            whole = head + BEGIN + whole[len(head) : end] + END + whole[end:]
        return _cut(whole, tokenizer)

    @cached_property
    def _compiled(self) -> Any:
        # The dialect of `transformers`: see "Chat templates" in its documentation.
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        # A generation block becomes a call block of jinja, which adds BEGIN and END.
        names = {"strftime_now": TODAY.strftime, "mark": lambda caller: f"{BEGIN}{caller()}{END}"}
        environment.globals.update(names, raise_exception=raise_exception)
        tags = {None: "call mark()", "end": "endcall"}
        source = GENERATION.sub(lambda m: f"{m[1]}{tags[m[2]]}{m[3]}", self.source or PLAIN)
        return environment.from_string(source)

    def render(
        self, messages: Sequence[Message], tokenizer: Tokenizer, ask: bool, tools: Any = None
    ) -> str:
        """The rendered, guarded conversation, with generation blocks between BEGIN and END.

        `ask`: end with the generation prompt.
        """
        from jinja2 import TemplateError

        if not self.source and (tools or any(message.get("tool_calls") for message in messages)):
            raise UserError(
                "tools need a chat template; set data.tokenizer to a tokenizer that has one"
            )
        guarded = {
            "messages": _guarded(list(messages), tokenizer),
            "tools": _guarded(tools, tokenizer),
        }
        end = "" if tokenizer.eot is None else tokenizer.inner.id_to_token(tokenizer.eot)
        # `transformers` passes None for an argument that a caller omits, and templates check it.
        names = {"documents": None, "end_of_text": end, **self.tokens}
        try:
            return str(self._compiled.render(**guarded, add_generation_prompt=ask, **names))
        except (TemplateError, TypeError, ValueError) as error:
            problem = "the tokenizer's chat template rejects this conversation"
            raise UserError(f"{problem}: {error}") from None


def _guarded(value: Any, tokenizer: Tokenizer) -> Any:
    """Messages without special tokens, because a mark follows each character of one."""
    if isinstance(value, dict):
        return {key: _guarded(part, tokenizer) for key, part in value.items()}
    if isinstance(value, list):
        return [_guarded(part, tokenizer) for part in value]
    if not isinstance(value, str):
        return value
    text = re.sub(f"[{MARK}{BEGIN}{END}]", "", value)
    return tokenizer.special_pattern.sub(lambda m: "".join(c + MARK for c in m[0]), text)


def _cut(text: str, tokenizer: Tokenizer) -> list[Piece]:
    """A rendered text as texts and special tokens; the pieces between BEGIN and END count."""
    pieces, counts = list[Piece](), False
    separator = f"([{BEGIN}{END}]|{tokenizer.special_pattern.pattern})"
    for number, part in enumerate(re.split(separator, text)):
        if part in (BEGIN, END):
            counts = part == BEGIN
        elif part:  # separators have the odd numbers
            piece = tokenizer.special[part] if number % 2 else part.replace(MARK, "")
            pieces.append((piece, counts))
    return pieces


# -- tokens and rows


def show_row(tokens: Iterable[int], marks: Iterable[bool], tokenizer: Tokenizer) -> str:
    """A row as text; the part that counts in the loss is between \u27e6 and \u27e7."""
    shown = ""
    for mark, run in groupby(zip(tokens, marks, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode(token for token, _ in run)
        shown += f"\u27e6{text}\u27e7" if mark else text
    return shown


def stop_tokens(tokenizer: Tokenizer, template: Template | None = None) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's, and the end of a turn in its chat template."""
    ends: list[str | int | None] = [tokenizer.eot]
    if template is not None:
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        with contextlib.suppress(UserError):  # a template without such turns
            ends += [piece for piece, counts in template.pieces(talk, tokenizer) if counts][-1:]
    return frozenset(token for token in ends if isinstance(token, int))


def prompt_tokens(messages: list[Message], template: Template, tokenizer: Tokenizer) -> list[int]:
    """The tokens before the assistant's answer."""
    pieces = _cut(template.render(messages, tokenizer, ask=True), tokenizer)
    return tokenizer.encode_marked(pieces)[0]


def row(item: Conversation, template: Template, tokenizer: Tokenizer, context: int) -> Row | None:
    """A conversation, cut after `context` + 1 tokens; None if it has nothing left to learn.

    A prompt and its completion are two texts, then the end-of-text token.
    """
    if item.text is not None:
        if not item.text[1].strip():
            return None
        both, prompt = tokenizer.encode_pair(*item.text)
        ids = [*both, *([] if tokenizer.eot is None else [tokenizer.eot])]
        marks = [False] * prompt + [True] * (len(ids) - prompt)
    else:
        try:
            pieces = template.pieces(item.messages, tokenizer, item.tools, item.untrained)
            ids, marks = tokenizer.encode_marked(pieces)
        except UserError as error:
            raise UserError(f"{item.place}: {error}") from None
    size = context + 1
    return Row(ids[:size], marks[:size], len(ids)) if any(marks[1:size]) else None
