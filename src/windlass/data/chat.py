"""Conversations as tokens, laid out by a chat template, and which tokens have a loss.

The tokens equal `apply_chat_template` of `transformers`, except that a special token's text in a
message stays text: marks protect it while the template is rendered. The template also writes where
each message's turn begins and ends, so one rendering gives the places of all answers.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data.tokenizer import MARK, Tokenizer
from windlass.errors import UserError
from windlass.fileio import read_json

if TYPE_CHECKING:
    from jinja2 import Environment, nodes

# `role`, `content`, and other keys that a template reads (`tool_calls`, `name`, ...)
Message = dict[str, Any]
Piece = tuple[str | int, bool]  # a text or a special token's id, and whether it has a loss
PLAIN = (
    "{{ begin_of_text }}"
    "{% for m in messages %}{% if m.role == 'assistant' %}Assistant:{% generation %} "
    "{{ m.content | trim }}{{ end_of_text }}{% endgeneration %}"
    "{% else %}{{ m.role | capitalize }}: {{ m.content | trim }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_LAYOUT = "User: ... Assistant: ..."
TODAY = date(2024, 7, 26)  # in templates, so that tokens do not depend on the day
GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
# Around a generation block; around the number of a message where its turn begins, and around a slash
# and this number where it ends. Like MARK they are noncharacters, which are for use in a program.
BEGIN, END, TURN = "\ufdd1", "\ufdd2", "\ufdd3"
NONCHARACTERS = re.compile(f"[{MARK}{BEGIN}{END}{TURN}]")
REMEDY = "put {% generation %} and {% endgeneration %} around the answers in the template"
TURNS = re.compile(f"{TURN}(/?)(\\d+){TURN}")
SILENT = re.compile(f"{TURN}(\\d+){TURN}{TURN}/\\1{TURN}")  # a loop that only counts messages


class Turn(dict[str, Any]):
    """A message as a template sees it, with its number."""

    number = 0


TURN_FILTERS: dict[str, Callable[[Any], str]] = {
    "turn_start": lambda value: f"{TURN}{value.number}{TURN}" if type(value) is Turn else "",
    "turn_stop": lambda value: f"{TURN}/{value.number}{TURN}" if type(value) is Turn else "",
}


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

    def __reduce__(self) -> Any:
        return Template, (self.source, dict(self.tokens))  # without the compiled template

    def describe(self, tokenizer: str) -> str:
        """The layout in words; `tokenizer` as in the recipe."""
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
        tools: Any = None,
        trained: Collection[int] | None = None,
        is_completion: bool = False,
    ) -> list[Piece]:
        """The conversation up to its last answer, in pieces.

        An answer begins after the generation prompt and ends where its turn ends; the last one ends
        with the text. In some layouts the next turn's first token ends it. If the template has
        `{% generation %}` blocks, their content counts instead.

        Args:
            trained: the places of the answers with a loss; default: all.
            is_completion: generation blocks do not matter, as for TRL's completions.
        """
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = set(places if trained is None else trained)
        rendered = self.render(messages[: places[-1] + 1], tokenizer, ask=False, tools=tools)
        if not self.source or (GENERATION.search(self.source) and not is_completion):
            return _cut(_blocks(rendered, wanted, len(wanted) == len(places)), tokenizer)
        turns = _turns(rendered.replace(BEGIN, "").replace(END, ""))
        # Some templates write the results of tools as parts of an answer's turn.
        separate = {place for place in range(places[-1]) if messages[place]["role"] == "tool"}
        if missing := (wanted | separate).difference(place for place, _ in turns):
            problem = f"the tokenizer's chat template has no turn {min(missing) + 1}"
            raise UserError(f"{problem} that Windlass can find: {REMEDY}")
        text = "".join(turn for _, turn in turns)
        spans, done, turn_stop = list[tuple[str, bool]](), 0, 0
        for place, turn in turns:
            turn_start, turn_stop = turn_stop, turn_stop + len(turn)
            if place not in wanted:
                continue
            wanted.remove(place)
            start = turn_start + self._answer_start(turn, messages[:place], tokenizer, tools)
            stop = len(text) if place == places[-1] else turn_stop
            ends = [match.end() for match in tokenizer.special_pattern.finditer(text, start, stop)]
            if not ends or text[ends[-1] : stop].strip():  # the next turn's first token may end it
                after = tokenizer.special_pattern.match(text, stop)
                stop = after.end() if after else stop
            spans += [(text[done:start], False), (text[start:stop], True)]
            done = stop
        return _cut([*spans, (text[done:], False)], tokenizer)

    def _answer_start(
        self, turn: str, before: Sequence[Message], tokenizer: Tokenizer, tools: Any
    ) -> int:
        """The place in a turn where the answer begins: after the generation prompt, or after the
        first lines and special tokens of the prompt that begin the turn."""
        line_ends = re.compile(f"{tokenizer.special_pattern.pattern}|\n")
        for is_usual in (True, False):
            prompt = self._usual_prompt
            if not is_usual:
                prompt = self._generation_prompt(before, tokenizer, tools)
            if prompt in turn:  # first in the turn, or after the token that begins a conversation
                return turn.index(prompt) + len(prompt)
            ends = [match.end() for match in line_ends.finditer(prompt)]
            if starts := [end for end in ends if turn.startswith(prompt[:end])]:
                return starts[-1]
        problem = f"turn {len(before) + 1} begins without the generation prompt {prompt!r}"
        raise UserError(f"{problem} of the tokenizer's chat template: {REMEDY}")

    @cached_property
    def _usual_prompt(self) -> str:
        """What the template writes before the answer to a user's message."""
        with contextlib.suppress(UserError):
            return self._generation_prompt([{"role": "user", "content": "a"}], None, None)
        return TURN  # which no turn has

    def _generation_prompt(
        self, messages: Sequence[Message], tokenizer: Tokenizer | None, tools: Any
    ) -> str:
        asked = self.render(messages, tokenizer, ask=True, tools=tools)
        if prompt := asked.rpartition(TURN)[2]:
            return prompt
        other = self.render(messages, tokenizer, ask=False, tools=tools)
        parts = zip(TURNS.split(asked), TURNS.split(other), strict=False)
        return next((a.removeprefix(b) for a, b in parts if a != b), "")

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
        environment.filters.update(TURN_FILTERS)
        # A generation block becomes a call block of jinja, which adds BEGIN and END.
        names = {"strftime_now": TODAY.strftime, "mark": lambda caller: f"{BEGIN}{caller()}{END}"}
        environment.globals.update(names, raise_exception=raise_exception)
        tags = {None: "call mark()", "end": "endcall"}
        source = GENERATION.sub(lambda m: f"{m[1]}{tags[m[2]]}{m[3]}", self.source or PLAIN)
        return environment.from_string(_with_turns(environment.parse(source), environment))

    def render(
        self, messages: Sequence[Message], tokenizer: Tokenizer | None, ask: bool, tools: Any = None
    ) -> str:
        """The conversation with marks for turns, generation blocks and special tokens' texts."""
        if not self.source and (tools or any(message.get("tool_calls") for message in messages)):
            remedy = "set data.tokenizer to a tokenizer that has one"
            raise UserError(f"tools need a chat template; {remedy}")
        # `transformers` passes None for an argument that a caller omits, and templates check it.
        names: dict[str, Any] = {"documents": None, **self.tokens, "add_generation_prompt": ask}
        guard: Callable[[str], str] = str
        if tokenizer is not None:
            guard = partial(tokenizer.special_pattern.sub, lambda m: MARK.join(m[0]) + MARK)
            text = tokenizer.inner.id_to_token
            names["begin_of_text"] = "".join(map(text, tokenizer.begin))
            names["end_of_text"] = "" if tokenizer.eot is None else text(tokenizer.eot)
        try:
            names["tools"] = _guarded(tools, guard)
            names["messages"] = turns = [Turn(_guarded(message, guard)) for message in messages]
            for number, turn in enumerate(turns):
                turn.number = number
            return str(self._compiled.render(names))
        except Exception as error:  # a template is a program
            problem = "the tokenizer's chat template rejects this conversation"
            raise UserError(f"{problem}: {error}") from None


def _with_turns(tree: nodes.Template, environment: Environment) -> nodes.Template:
    """A template whose loops over messages also write where each message's turn starts and stops."""
    from jinja2 import nodes

    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            name = nodes.Name(loop.target.name, "load")
            filters = [nodes.Filter(name, mark, [], [], None, None) for mark in TURN_FILTERS]
            start, stop = (nodes.Output([mark]) for mark in filters)
            loop.body = [start, *loop.body, stop]
            loop.set_environment(environment).set_lineno(loop.lineno)
    return tree


def _guarded(value: Any, guard: Callable[[str], str]) -> Any:
    """Messages without special tokens, because a mark follows each character of one."""
    if isinstance(value, str):
        return guard(value if value.isascii() else NONCHARACTERS.sub("", value))
    if isinstance(value, dict):
        return {_guarded(key, guard): _guarded(part, guard) for key, part in value.items()}
    if isinstance(value, list):
        return [_guarded(part, guard) for part in value]
    return value


def _turns(rendered: str) -> list[tuple[int, str]]:
    """A rendered text in parts, each with the number of the message whose turn it is, or -1.

    Some templates write a tool's turn inside the turn of the answer that calls it.
    """
    before, *parts = TURNS.split(SILENT.sub("", rendered))
    turns, inside = [(-1, before)], [-1]
    for stops, number, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if not stops:
            inside.append(int(number))
        elif int(number) in inside:
            del inside[inside.index(int(number)) :]
        turns.append((inside[-1], text))
    return [turn for turn in turns if turn[1]]


def _blocks(rendered: str, wanted: Collection[int], is_all: bool) -> list[tuple[str, bool]]:
    """A rendered text in spans; the generation blocks of `wanted` turns count.

    A block after a turn belongs to it, for example one with the end of the text.
    """
    spans, place, inside = list[tuple[str, bool]](), -1, False
    for number, part in _turns(rendered):
        place = place if number < 0 else number
        for text in re.split(f"([{BEGIN}{END}])", part):
            if text in (BEGIN, END):
                inside = text == BEGIN
            else:
                spans.append((text, inside and (is_all or place in wanted)))
    return spans


def _cut(spans: Iterable[tuple[str, bool]], tokenizer: Tokenizer) -> list[Piece]:
    """Spans of a rendered text as texts and special tokens."""
    pieces = list[Piece]()
    for counts, run in groupby(spans, lambda span: span[1]):
        text, done = "".join(part for part, _ in run), 0
        for match in tokenizer.special_pattern.finditer(text):
            if match.start() > done:
                pieces.append((text[done : match.start()].replace(MARK, ""), counts))
            pieces.append((tokenizer.special[match[0]], counts))
            done = match.end()
        if done < len(text):
            pieces.append((text[done:].replace(MARK, ""), counts))
    return pieces


# -- tokens


def show_row(tokens: Iterable[int], marks: Iterable[bool], tokenizer: Tokenizer) -> str:
    """A row as text; the part that counts in the loss is between \u27e6 and \u27e7."""
    shown = ""
    for mark, run in groupby(zip(tokens, marks, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode(token for token, _ in run)
        shown += f"\u27e6{text}\u27e7" if mark else text
    return shown


def stop_tokens(tokenizer: Tokenizer, template: Template | None = None) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's, and the ends of turns in its chat template."""
    ends = set(tokenizer.ends)
    if template is not None:
        turns = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        for talk in (turns, turns * 2):
            with contextlib.suppress(UserError):  # a template without such turns
                is_after = False
                for piece, counts in template.pieces(talk, tokenizer):
                    is_after = counts and (is_after or str(piece).endswith("b"))
                    ends.update([piece] if is_after and isinstance(piece, int) else [])
    return frozenset(ends)


def prompt_text(
    messages: list[Message], template: Template, tokenizer: Tokenizer, ask: bool = True
) -> str:
    """The conversation before an answer, for `text_tokens`."""
    rendered = template.render(messages, tokenizer, ask=ask, tools=None)
    return TURNS.sub("", rendered).replace(BEGIN, "").replace(END, "")


def text_tokens(text: str, tokenizer: Tokenizer, ending: str = "") -> tuple[list[int], int]:
    """The tokens of a `prompt_text` and an ending, and how many of them are not the ending's."""
    pieces = _cut([(text, False), (ending, True)], tokenizer)
    ids, marks = tokenizer.encode_marked(pieces)
    return ids, [*marks, True].index(True)


def prompt_tokens(messages: list[Message], template: Template, tokenizer: Tokenizer) -> list[int]:
    """The tokens before the assistant's answer."""
    return text_tokens(prompt_text(messages, template, tokenizer), tokenizer)[0]
