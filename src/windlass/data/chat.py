"""Conversations as tokens, laid out by a chat template, and which tokens have a loss. They equal
`apply_chat_template` of `transformers`, except that a special token's text in a message stays text:
marks protect it while the template is rendered.
"""

from __future__ import annotations

import contextlib
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache, cached_property, partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from windlass.data.tokenizer import MARK, Tokenizer
from windlass.errors import UserError, first_line
from windlass.fileio import read_json
from windlass.recipe import DataSettings

# `role`, `content`, and other keys that a template reads (`tool_calls`, `name`, ...)
Message = dict[str, Any]
Piece = tuple[str | int, bool]  # a text or a special token's id, and whether it has a loss
Span = tuple[str, bool]  # a part of a rendered text, and whether it has a loss
Extra = Mapping[str, Any] | None  # what a template reads beside the messages, as `tools`
Written = Callable[..., str]  # the text of the first messages of a conversation
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
# Around a generation block. Like MARK they are noncharacters, which are for use in a program.
BEGIN, END = "\ufdd1", "\ufdd2"
NONCHARACTERS = re.compile(f"[{MARK}{BEGIN}{END}]")
SPECIAL = re.compile(r"<\|[^\s<>{}|]+\|>")
REMEDY = "put {% generation %} and {% endgeneration %} around the answers in the template"
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

    def __reduce__(self) -> Any:
        return Template, (self.source, dict(self.tokens))  # without the compiled template

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

    def rows(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        extra: Extra = None,
        trained: Collection[int] | None = None,
        is_completion: bool = False,
    ) -> list[list[Piece]]:
        """The conversation up to its last answer, in pieces: one row, or a row for each answer.

        An answer begins after the prompt that the model gets for it, and the last one ends with the
        text. In some layouts the next turn's first token ends an answer; if no token does, the
        end-of-text token follows. Each answer has a row, which begins with its prompt, if an
        earlier one lacks an end, or if the template writes it in another way, for example without
        its thoughts. If the template has `{% generation %}` blocks, their content counts instead.

        Args:
            extra: what the template reads beside the messages: `tools`, and names of a user.
            trained: the places of the answers with a loss; default: all.
            is_completion: generation blocks do not matter, as for TRL's completions.
        """
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = places if trained is None else sorted(trained)
        messages = messages[: places[-1] + 1]
        if self.source and (is_completion or not GENERATION.search(self.source)):
            return self._answer_rows(messages, wanted, tokenizer, extra)
        first = [0]  # the blocks before each answer
        if len(wanted) < len(places):
            befores = (self.text(messages[:n], tokenizer, True, extra, True) for n in places)
            first = [before.count(BEGIN) for before in befores]
        before, *blocks = self.text(messages, tokenizer, False, extra, True).split(BEGIN)
        spans = [(before, False)]
        for number, block in enumerate(blocks, first[0]):
            inside, _, after = block.partition(END)
            counts = places[bisect_right(first, number) - 1] in wanted
            spans += [(inside, counts), (after, False)]
        return [_cut(spans, tokenizer)]

    def _answer_rows(
        self,
        messages: Sequence[Message],
        wanted: Sequence[int],
        tokenizer: Tokenizer,
        extra: Extra,
    ) -> list[list[Piece]]:
        """A conversation whose `wanted` answers follow their prompts: one row, or one each."""

        @cache
        def written(count: int, ask: bool = False) -> str:
            """The first messages; with `ask` as the prompt for the next one."""
            return self.text(messages[:count], tokenizer, ask, extra)

        whole, spans, done = written(len(messages)), list[Span](), 0
        answers = [self._answer(place, messages[place], written, tokenizer) for place in wanted]

        def apart() -> list[list[Piece]]:
            rows = ([(prompt, False), _ended(answer, tokenizer)] for prompt, answer in answers)
            return [_cut(row, tokenizer) for row in rows]

        for place, (prompt, answer) in zip(wanted, answers, strict=True):
            start, text = len(prompt), prompt + answer
            stop = _shared(whole, text, tokenizer)
            if stop < start or tokenizer.special_pattern.sub("", text[stop:]).strip():
                return apart()
            stop = len(whole) if place == len(messages) - 1 else stop
            if not _has_end(text[start:stop], tokenizer):  # the next turn's first token may end it
                after = tokenizer.special_pattern.match(whole, stop)
                if not after and place < len(messages) - 1 and tokenizer.eot is not None:
                    return apart()
                stop = after.end() if after else stop
            spans += [(whole[done:start], False), (whole[start:stop], True)]
            done = stop
        if spans and done == len(whole):
            spans[-1] = _ended(spans[-1][0], tokenizer)
        return [_cut([*spans, (whole[done:], False)], tokenizer)]

    def lacks_end(self, tokenizer: Tokenizer) -> bool:
        """Whether answers end with the end-of-text token because the template writes no end."""
        if tokenizer.eot is None or not self.source or GENERATION.search(self.source):
            return False
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        with contextlib.suppress(UserError):
            return not _has_end(self.text(turns, tokenizer, ask=False), tokenizer)
        return False

    def unknown_tokens(self, tokenizer: Tokenizer) -> list[str]:
        """What looks like a special token in the template and is none of the tokenizer's."""
        found = dict.fromkeys(SPECIAL.findall(self.source))
        return [text for text in found if text not in tokenizer.special]

    def _answer(
        self, place: int, message: Message, written: Written, tokenizer: Tokenizer
    ) -> tuple[str, str]:
        """The prompt for a message, and the message as its answer.

        If the template does not write the prompt before an answer, or leaves out the answer's
        thought, both are written nevertheless, because the model gets and writes them.
        """
        text, prompt = written(place + 1), ""
        with contextlib.suppress(UserError):  # some templates reject such messages
            prompt = written(place, ask=True) if place else ""
        if not prompt:  # the text up to the prompt that follows a user's message in this template
            user = [{"role": "user", "content": "a"}]
            asked, other = (self.text(user, tokenizer, ask) for ask in (True, False))
            if prompt := asked[_shared(asked, other, tokenizer) :]:
                prompt = text[: max(0, text.rfind(prompt))] + prompt
            elif first := tokenizer.special_pattern.match(text):
                prompt = first[0]
        answer = text[_answer_start(place, prompt, written, tokenizer) :]
        is_open, is_closed = (prompt.rstrip().endswith(tag) for tag in (THOUGHT, THOUGHT_END))
        is_other = not text.startswith(prompt)
        if is_closed and is_other:  # the prompt has an empty thought
            answer = answer.rpartition(THOUGHT_END)[2].lstrip()
        elif is_open and is_other:
            answer = answer.removeprefix(THOUGHT)
        if THOUGHT_END in self.source and THOUGHT_END not in answer and not is_closed:
            thought, end, _ = str(message["content"]).rpartition(THOUGHT_END)
            if not end and (thought := message.get("reasoning_content") or ""):
                thought, end = f"{thought}\n", f"{THOUGHT_END}\n\n"
            guarded: str = _guarded(thought, tokenizer)
            if thought := guarded.lstrip().removeprefix(THOUGHT).lstrip("\n") + end:
                answer = ("" if is_open else f"{THOUGHT}\n") + thought + answer
            elif is_open and is_other:
                answer = f"\n{THOUGHT_END}\n\n{answer}"
        return prompt, answer

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

    def text(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        ask: bool,
        extra: Extra = None,
        blocks: bool = False,
    ) -> str:
        """The conversation, with marks in plain texts, and around the generation `blocks`."""
        extra = extra or {}
        if not self.source and (extra.get("tools") or any(m.get("tool_calls") for m in messages)):
            remedy = "set data.tokenizer to a tokenizer that has one"
            raise UserError(f"tools need a chat template; {remedy}")
        text = tokenizer.inner.id_to_token
        # `transformers` passes None for an argument that a caller omits, and templates check it.
        names: dict[str, Any] = {"documents": None, "tools": None, **self.tokens}
        names["begin_of_text"] = "".join(map(text, tokenizer.begin))
        names["end_of_text"] = "" if tokenizer.eot is None else text(tokenizer.eot)
        guarded = partial(_guarded, tokenizer=tokenizer)
        try:
            names |= {**guarded(extra), "messages": guarded(messages)}
            rendered = str(self._compiled.render(names, add_generation_prompt=ask))
            return rendered if blocks else rendered.replace(BEGIN, "").replace(END, "")
        except Exception as error:  # a template is a program
            problem = "the tokenizer's chat template rejects this conversation"
            raise UserError(f"{problem}: {error}") from None


def _guarded(value: Any, tokenizer: Tokenizer) -> Any:
    """Values without special tokens, because a mark follows each character of one."""
    if isinstance(value, str):
        text = value if value.isascii() else NONCHARACTERS.sub("", value)
        own = (THOUGHT, THOUGHT_END)  # a thought's tags are the answer's own
        marked = lambda m: m[0] if m[0] in own else MARK.join(m[0]) + MARK  # noqa: E731
        return tokenizer.special_pattern.sub(marked, text)
    if isinstance(value, Mapping):
        return {_guarded(k, tokenizer): _guarded(part, tokenizer) for k, part in value.items()}
    if isinstance(value, Sequence):
        return [_guarded(part, tokenizer) for part in value]
    return value


def _answer_start(place: int, prompt: str, written: Written, tokenizer: Tokenizer) -> int:
    """The first character of a message in the text, after the part of its prompt that both have."""
    whole = written(place + 1)
    if whole.startswith(prompt):
        return len(prompt)
    with contextlib.suppress(UserError):
        first, last = (_shared(prompt, text, tokenizer) for text in (written(place), whole))
        lines = re.finditer(f"{tokenizer.special_pattern.pattern}|\n", prompt)
        if ends := [line.end() for line in lines if first < line.end() <= last]:
            return ends[-1]
    problem = f"turn {place + 1} begins without the generation prompt {prompt[-80:]!r}"
    raise UserError(f"{problem} of the tokenizer's chat template: {REMEDY}")


def _shared(text: str, other: str, tokenizer: Tokenizer) -> int:
    """The characters that two texts begin with, in whole special tokens."""
    if text.startswith(other):
        return len(other)
    pairs = enumerate(zip(text, other, strict=False))
    count = next((n for n, (a, b) in pairs if a != b), min(len(text), len(other)))
    for one in (text, other):
        for match in tokenizer.special_pattern.finditer(one):
            if match.start() < count < match.end():
                count = match.start()
    return count


def _has_end(answer: str, tokenizer: Tokenizer) -> bool:
    """Whether an answer ends with a special token, perhaps before white space."""
    ends = [match.end() for match in tokenizer.special_pattern.finditer(answer)]
    return bool(ends) and not answer[ends[-1] :].strip()


def _ended(answer: str, tokenizer: Tokenizer) -> Span:
    """The last answer of a row, with the end-of-text token if the template writes no end."""
    if tokenizer.eot is not None and not _has_end(answer, tokenizer):
        answer += tokenizer.inner.id_to_token(tokenizer.eot)
    return answer, True


def _cut(spans: Iterable[Span], tokenizer: Tokenizer) -> list[Piece]:
    pieces = list[Piece]()
    for counts, run in groupby(spans, lambda span: span[1]):
        for piece in tokenizer.pieces("".join(text for text, _ in run)):
            own = piece.replace(MARK, "") if isinstance(piece, str) else piece
            pieces.append((own, counts))
    return pieces


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
                for piece, counts in chain(*template.rows(talk, tokenizer)):
                    is_after = counts and (is_after or str(piece).endswith("b"))
                    ends.update([piece] if is_after and isinstance(piece, int) else [])
    return frozenset(ends)


def text_tokens(text: str, tokenizer: Tokenizer, ending: str = "") -> tuple[list[int], int]:
    """The tokens of a `Template.text` and an ending, and how many of them are not the ending's."""
    pieces = _cut([(text, False), (ending, True)], tokenizer)
    ids, marks = tokenizer.encode_marked(pieces)
    return ids, [*marks, True].index(True)


def prompt_tokens(messages: list[Message], template: Template, tokenizer: Tokenizer) -> list[int]:
    return text_tokens(template.text(messages, tokenizer, ask=True), tokenizer)[0]
