"""Conversations as a chat template writes them, and which parts have a loss. The tokens equal
`apply_chat_template` of `transformers`, except that a special token's text in a message stays text:
it is escaped while the template is rendered.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache, cached_property, partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from windlass.data.items import Message
from windlass.data.tokenizer import ESCAPE, Tokenizer
from windlass.errors import UserError, first_line
from windlass.fileio import read_json
from windlass.recipe import DataSettings

Span = tuple[str, bool]  # a part of a rendered text, and whether it has a loss
Piece = tuple[str | int, bool]  # a text or a special token's id, and whether it has a loss
Variables = Mapping[str, Any]  # what a template reads beside the messages, as `tools`
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
# Around a generation block. Like ESCAPE they are noncharacters, which are for use in a program.
BEGIN, END = "\ufdd1", "\ufdd2"
NONCHARACTERS = re.compile(f"[{ESCAPE}{BEGIN}{END}]")
THOUGHT, THOUGHT_END = "<think>", "</think>"


@dataclass(frozen=True)
class Template:
    """The layout of a conversation, in the language of `transformers`' chat templates."""

    source: str = ""  # empty: PLAIN
    # texts of tokens by the names that a template has for them, such as `bos_token`
    tokens: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of_directory(directory: Path) -> Template:
        """The template beside a tokenizer of `transformers`, or from `save`; else the plain one."""
        tokens = read_json(directory / "special_tokens_map.json")
        config = tokens | read_json(directory / "tokenizer_config.json")
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

    def with_settings(self, data: DataSettings) -> Template:
        """The template of `data.chat_template`, else this one, with `data.chat_template_kwargs`."""
        source = self.source
        if data.chat_template:
            try:
                source = Path(data.chat_template).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                problem = f"data.chat_template: {data.chat_template} cannot be read"
                raise UserError(f"{problem}: {first_line(error)}") from None
        if data.chat_template_kwargs and not source:
            remedy = "set data.chat_template to a file with one"
            raise UserError(f"data.chat_template_kwargs need a chat template; {remedy}")
        defaults = (
            f"{{%- if {name} is not defined %}}{{%- set {name} = {json.dumps(value)} %}}"
            "{%- endif %}"
            for name, value in data.chat_template_kwargs.items()
        )
        return replace(self, source="".join([*defaults, source]))

    def save(self, directory: Path) -> None:
        config = {**self.tokens, "chat_template": self.source}
        text = json.dumps(config, indent=1) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def text(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        ask: bool,
        variables: Variables | None = None,
        blocks: bool = False,
    ) -> str:
        """The conversation, with special tokens in plain text escaped. With `ask` the prompt for an
        answer follows; with `blocks` BEGIN and END are around the generation blocks."""
        variables = variables or {}
        has_tools = variables.get("tools") or any(m.get("tool_calls") for m in messages)
        if has_tools and not self.source:
            remedy = "set data.tokenizer to a tokenizer that has one"
            raise UserError(f"tools need a chat template; {remedy}")
        token_text = tokenizer.inner.id_to_token
        # `transformers` passes None for an argument that a caller omits, and templates check it.
        names: dict[str, Any] = {"documents": None, "tools": None, **self.tokens}
        names["begin_of_text"] = "".join(map(token_text, tokenizer.begin))
        names["end_of_text"] = "" if tokenizer.eot is None else token_text(tokenizer.eot)
        try:
            names |= _escaped({**variables, "messages": messages}, tokenizer)
            rendered = str(self._compiled.render(names, add_generation_prompt=ask))
            return rendered if blocks else rendered.replace(BEGIN, "").replace(END, "")
        except Exception as error:  # a template is a program
            problem = "the tokenizer's chat template rejects this conversation"
            raise UserError(f"{problem}: {error}") from None

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

    def rows(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        variables: Variables | None = None,
        trained: Collection[int] | None = None,
        is_completion: bool = False,
    ) -> list[list[Piece]]:
        """The conversation up to its last answer, in pieces: one row, or a row for each answer.

        If the template has `{% generation %}` blocks, their content has the loss; otherwise see
        `_Answers`.

        Args:
            trained: the places of the answers with a loss; default: all.
            is_completion: generation blocks do not matter, as for TRL's completions.
        """
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = places if trained is None else sorted(trained)
        messages = messages[: places[-1] + 1]
        if self.source and (is_completion or not GENERATION.search(self.source)):
            rows = _Answers(self, messages, tokenizer, variables).rows(wanted)
        else:
            first = [0]  # the blocks before each answer
            if len(wanted) < len(places):
                begun = [self.text(messages[:n], tokenizer, True, variables, True) for n in places]
                first = [text.count(BEGIN) for text in begun]
            before, *blocks = self.text(messages, tokenizer, False, variables, True).split(BEGIN)
            rows = [[(before, False)]]
            for number, block in enumerate(blocks, first[0]):
                inside, _, after = block.partition(END)
                has_loss = places[bisect_right(first, number) - 1] in wanted
                rows[0] += [(inside, has_loss), (after, False)]
        return [_pieces_of(spans, tokenizer) for spans in rows]


@dataclass(frozen=True)
class _Answers:
    """The answers of a conversation, found by rendering its first messages.

    An answer is the text after the prompt that the model gets for it. In some layouts the next
    turn's first token ends it; if no token does, the end-of-text token follows.
    """

    template: Template
    messages: Sequence[Message]
    tokenizer: Tokenizer
    variables: Variables | None

    @cached_property
    def text(self) -> Callable[..., str]:
        """A function that gives the text of the first messages, with the prompt for an answer if
        its second argument is True."""
        render, tokenizer = self.template.text, self.tokenizer
        return cache(lambda n, ask=False: render(self.messages[:n], tokenizer, ask, self.variables))

    def rows(self, wanted: Sequence[int]) -> list[list[Span]]:
        """The whole text with the loss of the `wanted` answers. If it has one in another form, for
        example without its thought, or without an end: a row for each, which begins with its
        prompt."""
        answers = [self.answer(place) for place in wanted]
        special, eot = self.tokenizer.special_pattern, self.tokenizer.eot
        whole, spans, done = self.text(len(self.messages)), list[Span](), 0
        rows = [spans]
        for place, (prompt, answer) in zip(wanted, answers, strict=True):
            is_last = place == len(self.messages) - 1
            start, stop = len(prompt), _shared(whole, prompt + answer, self.tokenizer)
            is_other = stop < start or special.sub("", (prompt + answer)[stop:]).strip()
            stop = len(whole) if is_last else stop
            lacks_end = not _has_end(whole[start:stop], self.tokenizer)
            if lacks_end and (after := special.match(whole, stop)):
                stop, lacks_end = after.end(), False  # the next turn's first token ends it
            if is_other or (lacks_end and not is_last and eot is not None):
                rows = [[(prompt, False), (answer, True)] for prompt, answer in answers]
                break
            spans += [(whole[done:start], False), (whole[start:stop], True)]
            done = stop
        if done < len(whole):
            spans.append((whole[done:], False))
        for row in rows:
            text, has_loss = row[-1]
            if has_loss and eot is not None and not _has_end(text, self.tokenizer):
                row[-1] = text + self.tokenizer.inner.id_to_token(eot), True
        return rows

    def answer(self, place: int) -> tuple[str, str]:
        """The prompt for a message, and the message as its answer.

        If the template does not write the prompt before an answer, or leaves out the answer's
        thought, both are written nevertheless, because the model gets and writes them.
        """
        whole, prompt = self.text(place + 1), ""
        if place:
            with contextlib.suppress(UserError):  # some templates reject such messages
                prompt = self.text(place, ask=True)
        prompt = prompt or self._header(place)
        is_whole = whole.startswith(prompt)
        answer = whole[len(prompt if is_whole else self._header(place)) :]
        message = self.messages[place]
        thought, end, _ = str(message["content"]).rpartition(THOUGHT_END)
        thought = thought if end else message.get("reasoning_content") or ""
        begins_thought, ends_thought = map(prompt.rstrip().endswith, (THOUGHT, THOUGHT_END))
        is_left_out = bool(thought) and THOUGHT_END not in answer and not ends_thought
        if THOUGHT_END not in self.template.source or (is_whole and not is_left_out):
            return prompt, answer
        answer = answer.rpartition(THOUGHT_END)[2].removeprefix(THOUGHT).lstrip()
        if begins_thought or is_left_out:
            thought = _escaped(thought, self.tokenizer).strip().removeprefix(THOUGHT).strip("\n")
            answer = f"{thought}\n{THOUGHT_END}\n\n{answer}"
            return prompt, answer if begins_thought else f"{THOUGHT}\n{answer}"
        return prompt, answer

    def _header(self, place: int) -> str:
        """The text before an answer: the part that other answers in its place have, too."""
        whole, shared = self.text(place + 1), list[int]()
        for content in "ab":
            talk = [*self.messages[:place], {"role": "assistant", "content": content}]
            other = self.template.text(talk, self.tokenizer, False, self.variables)
            shared.append(_shared(whole, other, self.tokenizer))
        return whole[: min(shared)]


def _escaped(value: Any, tokenizer: Tokenizer) -> Any:
    """Values with ESCAPE after each character of a special token's text."""
    if isinstance(value, str):
        text = value if value.isascii() else NONCHARACTERS.sub("", value)
        tags = (THOUGHT, THOUGHT_END)  # a thought's tags are the answer's own
        escaped = lambda m: m[0] if m[0] in tags else ESCAPE.join(m[0]) + ESCAPE  # noqa: E731
        return tokenizer.special_pattern.sub(escaped, text)
    if isinstance(value, Mapping):
        return {_escaped(k, tokenizer): _escaped(part, tokenizer) for k, part in value.items()}
    if isinstance(value, Sequence):
        return [_escaped(part, tokenizer) for part in value]
    return value


def _shared(text: str, other: str, tokenizer: Tokenizer) -> int:
    """The characters that two texts begin with, in whole special tokens."""
    if text.startswith(other):
        return len(other)
    count = len(os.path.commonprefix([text, other]))  # noqa: RUF071 (by character)
    for one in (text, other):
        for match in tokenizer.special_pattern.finditer(one):
            if match.start() < count < match.end():
                count = match.start()
    return count


def _has_end(answer: str, tokenizer: Tokenizer) -> bool:
    """Whether an answer ends with a special token, perhaps before white space."""
    ends = [match.end() for match in tokenizer.special_pattern.finditer(answer)]
    return bool(ends) and not answer[ends[-1] :].strip()


def _pieces_of(spans: Iterable[Span], tokenizer: Tokenizer) -> list[Piece]:
    pieces = list[Piece]()
    for has_loss, run in groupby(spans, lambda span: span[1]):
        for piece in tokenizer.pieces("".join(text for text, _ in run)):
            content = piece.replace(ESCAPE, "") if isinstance(piece, str) else piece
            pieces.append((content, has_loss))
    return pieces


def rendered_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a `Template.text`."""
    return tokenizer.encode_marked(_pieces_of([(text, False)], tokenizer))[0]


def prompt_tokens(messages: list[Message], template: Template, tokenizer: Tokenizer) -> list[int]:
    return rendered_tokens(template.text(messages, tokenizer, ask=True), tokenizer)


def stop_tokens(tokenizer: Tokenizer, template: Template | None = None) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's, and the ends of turns in its chat template."""
    if template is None:
        return tokenizer.ends
    ends = set(tokenizer.ends)
    turns = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    for talk in (turns, turns * 2):
        with contextlib.suppress(UserError):  # a template without such turns
            is_after = False
            for piece, has_loss in chain.from_iterable(template.rows(talk, tokenizer)):
                is_after = has_loss and (is_after or str(piece).endswith("b"))
                if is_after and isinstance(piece, int):
                    ends.add(piece)
    return frozenset(ends)


def show_row(tokens: Iterable[int], marks: Iterable[bool], tokenizer: Tokenizer) -> str:
    """A row as text; the part that counts in the loss is between \u27e6 and \u27e7."""
    shown = ""
    for mark, run in groupby(zip(tokens, marks, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode(token for token, _ in run)
        shown += f"\u27e6{text}\u27e7" if mark else text
    return shown
