"""Conversations from files and data sets: the shapes in which they are written down elsewhere, and what is wrong with an item.

The shape is recognised from the first item of a source. An item becomes messages as a chat template takes them (`role`,
`content`, and whatever else a message has), or, of prompt and completion as texts, these two.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data.samples import choose
from windlass.data.sources import JSON_LINES, find_files, listing, load_dataset, read_json_items
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.recipe import Recipe

Message = dict[
    str, Any
]  # `role`, `content`, and what else the template reads (`tool_calls`, `name`, ...)
ROLES = ("system", "user", "assistant", "tool")
NAMES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "observation": "tool",
    "developer": "system",
}
"""Other names of the roles, in ShareGPT's files, and OpenAI's for what the developer says."""


@dataclass(frozen=True)
class Conversation:
    """One item: messages, and the tools that are offered in them. Without messages prompt and completion are plain text."""

    messages: list[Message]
    where: str = ""  # file and line, for messages
    tools: list[Any] | None = None
    text: tuple[str, str] | None = None  # prompt and completion, which no template lays out
    untrained: frozenset[int] = (
        frozenset()
    )  # places of answers that do not count: of weight 0, or empty

    @property
    def remarks(self) -> list[str]:
        """What is odd about it, each with file and line."""
        empty = [number for number, message in enumerate(self.messages, 1) if _is_empty(message)]
        return [
            f"{self.where}, turn {number}: an empty answer, which does not count in the loss"
            for number in empty
        ]

    @property
    def texts(self) -> list[str]:
        return (
            list(self.text)
            if self.text
            else [message["content"] for message in self.messages if message["content"]]
        )


@dataclass(frozen=True)
class Shape:
    """A way to write a conversation down: its name, the fields it is known by, and an item of it, for messages."""

    name: str
    fields: tuple[str, ...]
    example: str
    parse: Callable[[Any], tuple[list[Message], tuple[str, str] | None]]


def _messages(turns: Any) -> list[Message]:
    """A list of turns as messages; raises ValueError or TypeError where it is none."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"a conversation is a list of turns, not {_kind(turns)}")
    return [_message(turn, f"turn {number}") for number, turn in enumerate(turns, 1)]


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"{where} is {_kind(turn)}, not an object")
    names = (
        {"from", "value"}
        if "from" in turn
        else {"role"}
        if turn.get("tool_calls")
        else {"role", "content"}
    )
    if lacking := sorted(names - turn.keys()):
        raise ValueError(f"{where} has no {lacking[0]!r}; it has {', '.join(map(repr, turn))}")
    message = {
        key: value
        for key, value in turn.items()
        if value is not None and key not in ("from", "value")
    }
    role: Any = turn.get("from", turn.get("role"))
    content = turn.get("value", turn.get("content"))
    message["role"] = NAMES.get(role, role)
    if message["role"] not in ROLES:
        raise ValueError(
            f"{where} has the role {role!r}; a role is one of {', '.join((*ROLES, *NAMES))}"
        )
    if isinstance(content, list):  # parts
        if any(part.get("type") != "text" for part in content):
            raise ValueError(
                f"{where}: a part of a content is text: images and sound cannot be trained on"
            )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not message.get("tool_calls"):
        raise ValueError(f"{where}: a content is text, not {_kind(content)}")
    if "tool_calls" in message:
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return {**message, "content": content}


def _is_empty(message: Message) -> bool:
    return (
        message["role"] == "assistant"
        and not (message["content"] or "").strip()
        and not message.get("tool_calls")
    )


def _take_untrained(messages: list[Message]) -> frozenset[int]:
    """The places of the answers that do not count, of which `weight` or `train` say so, or that are empty; takes both keys
    out of the messages. Raises ValueError for what cannot be honoured."""
    untrained = set[int]()
    for place, message in enumerate(messages):
        weight, train = message.pop("weight", None), message.pop("train", None)
        if weight not in (None, 0, 1):
            raise ValueError(f"turn {place + 1} has the weight {weight!r}; a weight is 0 or 1")
        if train not in (None, True, False):
            raise ValueError(f"turn {place + 1} has train = {train!r}; it is true or false")
        if message["role"] != "assistant" and (weight or train):
            raise ValueError(
                f"turn {place + 1} is the {message['role']}'s; only the assistant's count: leave out weight and train"
            )
        if weight == 0 or train is False or _is_empty(message):
            untrained.add(place)
    return frozenset(untrained)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object, which templates write as JSON; OpenAI has JSON in a string."""
    function = call.get("function", call)
    if not isinstance(function.get("arguments"), str):
        return call
    function = {**function, "arguments": json.loads(function["arguments"])}
    return {**call, "function": function} if "function" in call else function


def _alpaca(item: Any) -> tuple[list[Message], None]:
    asked = "\n\n".join(filter(None, (item["instruction"], item.get("input"))))
    system = [{"role": "system", "content": item["system"]}] if item.get("system") else []
    turns = [
        *system,
        {"role": "user", "content": asked},
        {"role": "assistant", "content": item["output"]},
    ]
    return _messages(turns), None


def _pair(item: Any) -> tuple[list[Message], tuple[str, str] | None]:
    prompt, completion = item["prompt"], item["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [], (prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError("prompt and completion are both texts, or both lists of messages")
    return _messages([*prompt, *completion]), None


SHAPES = (
    Shape(
        "messages",
        ("messages",),
        '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}',
        lambda item: (_messages(item["messages"]), None),
    ),
    Shape(
        "ShareGPT",
        ("conversations",),
        '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}',
        lambda item: (_messages(item["conversations"]), None),
    ),
    Shape(
        "prompt and completion",
        ("prompt", "completion"),
        '{"prompt": "...", "completion": "..."}',
        _pair,
    ),
    Shape(
        "Alpaca",
        ("instruction", "output"),
        '{"instruction": "...", "input": "...", "output": "..."}',
        _alpaca,
    ),
)


def read_splits(recipe: Recipe, notify: Callable[[str], None] = print) -> list[list[Conversation]]:
    data = recipe.data
    train = read(data.sources, data.split, notify=notify)
    if data.eval_sources or (data.eval_split and data.sources[0].startswith("hf:")):
        split, setting = data.eval_split or data.split, "data.eval_source"
        return [train, read(data.eval_sources or data.sources, split, setting, notify)]
    places: set[int] = set()
    if data.val_fraction and len(train) > 1:
        count = max(1, int(len(train) * Fraction(str(data.val_fraction))))
        places = set(choose(map(str, range(len(train))), count, recipe.run.seed, "split"))
    return [
        [item for i, item in enumerate(train) if (i in places) == held_out]
        for held_out in (False, True)
    ]


def read(
    sources: Iterable[str],
    split: str = "train",
    setting: str = "data.source",
    notify: Callable[[str], None] = print,
) -> list[Conversation]:
    """The conversations of files of JSON (an item a line, or all in one array) and of `hf:...`."""
    conversations: list[Conversation] = []
    for source in sources:
        if source.startswith("hf:"):
            table = load_dataset(source[3:], split)
            rows = ((f"{source}, row {number}", row) for number, row in enumerate(table))
            parts: list[tuple[str, Iterator[tuple[str, Any]]]] = [(source, rows)]
        else:
            parts = [
                (str(path), read_json_items(path))
                for path in find_files(source, setting, JSON_LINES)
            ]
        shapes: Counter[str] = Counter()
        for name, items in parts:
            shape, part = _read_part(items)
            if shape is None:
                raise UserError(f"{setting}: there is no conversation in {name}")
            shapes[shape.name] += len(part)
            conversations += part
        files = f" in {listing([Path(name) for name, _ in parts])}" if len(parts) > 1 else ""
        notify(
            f"{source}: {', '.join(f'{count:,} conversations ({name})' for name, count in shapes.items())}{files}"
        )
    return conversations


def _read_part(items: Iterator[tuple[str, Any]]) -> tuple[Shape | None, list[Conversation]]:
    """The items of a file or table, and their shape: that of the first one; None where there are none."""
    shape: Shape | None = None
    conversations = []
    for where, item in items:
        shape = shape or shape_of(item, where)
        try:
            messages, text = shape.parse(item)
            untrained = _take_untrained(messages)
            tools = item.get("tools")
            tools = json.loads(tools) if isinstance(tools, str) else tools
            if text is None and not any(message["role"] == "assistant" for message in messages):
                raise ValueError("there is no answer of the assistant to learn from")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{where}: {problem}; the file is of the shape {shape.name}: {shape.example}"
            ) from None
        conversations.append(Conversation(messages, where, tools or None, text, untrained))
    return shape, conversations


def shape_of(item: Any, where: str) -> Shape:
    """The shape that an item has; raises UserError, with all shapes, where it has none of them."""
    for shape in SHAPES:
        if isinstance(item, dict) and all(item.get(field) is not None for field in shape.fields):
            return shape
    there = (
        f"has {', '.join(map(repr, list(item)[:12]))}"
        if isinstance(item, dict)
        else f"is {_kind(item)}"
    )
    examples = "\n".join(f"  {shape.example}" for shape in SHAPES)
    raise UserError(f"{where}: the item {there}, and a conversation is one of\n{examples}")


def _kind(value: Any) -> str:
    """A value's type in JSON's words."""
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")
