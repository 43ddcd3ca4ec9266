"""The items of a source, and the text or the example in each. An example is a conversation, a
prompt and its completion, or a question of SQuAD.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.data.recipe_sources import SourceSpec
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer

Message = dict[str, Any]  # `role`, `content`, and other keys that a template reads (`tool_calls`)
# Roles by their names, in any case: ShareGPT's, OpenAI's `developer`, Llama's `ipython`.
ROLE_ALIASES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation", "ipython"), "tool"),
    "human": "user",
    "developer": "system",
}
# Ways to write a conversation, and the keys that show each.
SHAPES = {
    "messages": ["messages"],
    "ShareGPT": ["conversations"],
    "prompt and completion": ["prompt", "completion"],
    "Alpaca": ["instruction", "output"],
}
CONVERSATION_KEYS = {keys[0] for keys in SHAPES.values()}
TO_UTF8 = "convert it to UTF-8: iconv -f latin1 -t utf-8 OLD > NEW (a file of Windows: -f utf-16 or cp1252)"
TO_JSON = "write one object a line (.jsonl), or one array (.json)"


class Item(NamedTuple):
    """A document, a part of a long one, or the reason why it cannot be read."""

    place: str  # file and line, for messages
    # str: a text; None: null in place of a text; dict: a record; bytes: a record as JSON, which
    # the threads that encode items decode; UserError: the reason
    value: Any
    more: bool = False  # the next item continues this text
    fraction: float = 0.0  # of the source read so far; 0: unknown
    # of `parts_of`
    number: int = 0  # of the document in its source
    continues: bool = False  # the text of the item before
    digest: int = 0  # hash of the whole text, in its last part


def text_of(item: Item, spec: SourceSpec) -> str:
    """The text of an item; an empty text for null. UserError if it has none."""
    value = item.value
    if not isinstance(value, str | None):
        value = record = record_of(item)
        try:
            for key in [spec.text_key] if spec.text_key in record else spec.text_key.split("."):
                value = value[key]
        except (KeyError, TypeError):
            problem = f"{item.place} has no {spec.text_key!r}"
            raise UserError(f"{problem}; {other_keys(record)}") from None
    if not isinstance(value, str | None):
        problem = f"{item.place}: {spec.text_key!r} is a {type(value).__name__}, not text"
        raise UserError(f"{problem}: set data.text_key")
    return value or ""


def record_of(item: Item) -> dict[str, Any]:
    """The record of an item; UserError if it has none."""
    value = item.value
    if isinstance(value, UserError):
        raise value
    if isinstance(value, bytes):
        try:
            value = json.loads(value.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{item.place}: {error}; {TO_UTF8}") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{item.place} is not JSON: {error}; {TO_JSON}") from None
    if not isinstance(value, dict):
        raise UserError(f"{item.place} is a {type(value).__name__}, not a JSON object")
    return value


def other_keys(names: Iterable[str]) -> str:
    """The end of a message about a record without `data.text_key`."""
    first = list(names)[:12]
    remedy = "set data.text_key"
    if CONVERSATION_KEYS.intersection(first):
        remedy = 'write data.format="chat", for conversations'
    return f"it has {', '.join(f'{name!r:.60}' for name in first)}: {remedy}"


def hash64(*texts: str) -> int:
    """A 64-bit hash of texts."""
    content = "\0".join(texts).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


# Examples. Each has its `texts`, a `group` (the hash that decides whether it is held out), and
# `unread`: the keys of its record that have a value and are not a part of it.


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    variables: dict[str, Any]  # what a template reads beside the messages, as `tools`
    prompt: int = 0  # the messages of the prompt, if the item is a prompt with a completion
    untrained: frozenset[int] = frozenset()  # places of messages that are empty or have weight 0
    unread: tuple[str, ...] = ()

    @property
    def texts(self) -> list[str]:
        return [message["content"] for message in self.messages if message["content"]]

    @property
    def group(self) -> int:
        content = [[m["role"], m["content"], m.get("tool_calls")] for m in self.messages]
        return hash64(json.dumps(content, sort_keys=True, default=str))

    def trained(self, answers: str) -> list[int]:
        """The places of the answers with a loss, by `data.answers`. In a completion of several
        turns TRL learns all turns, and Windlass the assistant's."""
        first = self.prompt if answers == "auto" else 0
        places = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        places = places[-1:] if answers == "last" else places
        return [place for place in places if place >= first and place not in self.untrained]


@dataclass(frozen=True)
class Pair:
    """Two texts, of which the second is learned."""

    prompt: str
    completion: str
    unread: tuple[str, ...] = ()

    @property
    def texts(self) -> list[str]:
        return [self.prompt, self.completion]

    @property
    def group(self) -> int:
        return hash64(self.prompt, self.completion)


# The prompt of a question; its answer follows after a space, then the end-of-text token.
QUESTION, ANSWER = "Question: {question} Context: {context}", " Answer:"


@dataclass(frozen=True)
class Question:
    id: str
    question: str
    context: str
    answers: tuple[str, ...]  # the first is the one to learn
    group: int = 0  # hash of the article's title, or of the context without one
    unread: tuple[str, ...] = field(default=(), repr=False)  # `items_hash` is of the repr

    @property
    def prompt(self) -> str:
        return QUESTION.format(question=self.question, context=self.context) + ANSWER

    @property
    def texts(self) -> list[str]:
        return [self.prompt, *self.answers]

    @property
    def hash(self) -> int:
        return hash64(self.question, self.context)


def question_prompt(question: Question, tokenizer: Tokenizer, room: int) -> list[int]:
    """The prompt in at most `room` tokens; a long context loses its end, as in training."""
    ids = tokenizer.prompt(question.prompt)
    if len(ids) <= room:
        return ids
    end = min(room, prompt_end(tokenizer))
    return [*ids[: room - end], *ids[len(ids) - end :]]


def prompt_end(tokenizer: Tokenizer) -> int:
    """The tokens of the end of a prompt, which a cut keeps."""
    return len(tokenizer.encode(ANSWER, continues=True))


Example = Conversation | Pair | Question


def example_of(item: Item, spec: SourceSpec) -> Example:
    """The example of an item; UserError with its place if it has none."""
    record, columns = record_of(item), dict(spec.columns)
    renamed = {name: record[column] for name, column in columns.items() if column in record}
    rest = {k: v for k, v in record.items() if k not in columns.values()} | renamed
    shapes = (name for name, keys in SHAPES.items() if all(rest.get(k) is not None for k in keys))
    if not (shape := "SQuAD" if spec.format == "squad" else next(shapes, "")):
        problem = f"the item has {', '.join(map(repr, list(rest)[:12])) or 'no keys'}"
        problem += f", and a conversation has {', '.join(map(' and '.join, SHAPES.values()))}"
        remedy = "data.columns renames others, as data.columns.instruction=question"
        raise UserError(f"{item.place}: {problem}; {remedy}")
    try:
        example = _question(rest) if shape == "SQuAD" else _conversation(rest, shape)
        return replace(example, unread=tuple(key for key, value in rest.items() if value))
    except KeyError as error:
        problem = f"{error.args[0]!r} is missing"
    except (ValueError, TypeError, AttributeError) as error:
        problem = str(error)
    raise UserError(f"{item.place}: {problem}; the item has the shape {shape}")


# The functions below take what they read out of `rest`, and raise ValueError, KeyError, TypeError
# or AttributeError for a record of another form.


def _question(rest: dict[str, Any]) -> Question:
    answers = rest.pop("answers")  # the Hub has a list of texts
    texts = answers["text"] if isinstance(answers, dict) else [part["text"] for part in answers]
    answers = tuple(map(str, texts))
    name, context, question = str(rest.pop("id")), rest.pop("context"), rest.pop("question")
    if not answers or not answers[0]:
        raise ValueError("it gives no answer, as some questions of SQuAD 2.0; remove it")
    if answers[0] not in context:
        raise ValueError(f"its answer {answers[0]!r} is not in its context")
    group = hash64(str(rest.pop("title", "") or context))
    return Question(name, question.strip(), context, answers, group)


def _conversation(rest: dict[str, Any], shape: str) -> Conversation | Pair:
    prompt, turns = 0, list[Any]()
    if shape == "Alpaca":
        request = "\n\n".join(filter(None, (rest.pop("instruction"), rest.pop("input", None))))
        answer = rest.pop("output")
        if answer and isinstance(answer, list):
            answer = answer[0]
        for asked, replied in (*(rest.pop("history", None) or ()), (request, answer)):
            turns.append({"role": "user", "content": asked})
            turns.append({"role": "assistant", "content": replied})
    elif shape == "prompt and completion":
        before, after = rest.pop("prompt"), rest.pop("completion")
        if isinstance(before, str) and isinstance(after, str):
            return Pair(before, after)
        turns, prompt = [*before, *after], len(before)
    else:
        turns = rest.pop(SHAPES[shape][0])
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"a conversation is a list of turns, not a {type(turns).__name__}")
    messages = [_message(turn, f"turn {number}") for number, turn in enumerate(turns, 1)]
    untrained = set[int]()
    for place, (turn, message) in enumerate(zip(turns, messages, strict=True)):
        is_empty = not message.get("tool_calls") and not message["content"].strip()
        if is_empty or 0 in (turn.get("weight"), turn.get("train")):
            untrained.add(place)
    if messages[0]["role"] != "system" and (system := rest.pop("system", None)):
        messages.insert(0, _message({"role": "system", "content": system}, "system"))
        prompt += prompt > 0
        untrained = {place + 1 for place in untrained}
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("the assistant gives no answer to learn from")
    tools = rest.pop("tools", None)
    if isinstance(tools, str) and tools.strip():
        tools = json.loads(tools)
    if tools and not isinstance(tools, list):
        raise ValueError("tools are a list")
    variables = {**(rest.pop("chat_template_kwargs", None) or {}), "tools": tools or None}
    return Conversation(messages, variables, prompt, frozenset(untrained))


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"{where} is a {type(turn).__name__}, not an object")
    calls = turn.get("tool_calls")
    role_key, content_key = ("from", "value") if "from" in turn else ("role", "content")
    role, content = ROLE_ALIASES.get(str(turn.get(role_key)).lower()), turn.get(content_key)
    if role is None:
        roles = ", ".join(ROLE_ALIASES)
        raise ValueError(f"{where} has the role {turn.get(role_key)!r}; a role is one of {roles}")
    if isinstance(content, list):  # parts
        if any(part.get("type") != "text" for part in content):
            raise ValueError(f"{where}: the content must be text; Windlass does not take images")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not calls:
        raise ValueError(f"{where}: a content is text, not {type(content).__name__}")
    left_out = ("from", "value", "weight", "train")
    message = {k: v for k, v in turn.items() if v is not None and k not in left_out}
    if calls:
        message["tool_calls"] = []
    for call in calls or ():
        function = dict(call.get("function", call))
        if isinstance(function.get("arguments"), str):  # OpenAI's JSON; templates need an object
            function["arguments"] = json.loads(function["arguments"])
        message["tool_calls"].append(
            {**call, "function": function} if "function" in call else function
        )
    return {**message, "role": role, "content": content}
