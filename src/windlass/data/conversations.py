"""Conversations from files and data sets, in the shapes in which other tools write them.

The shape is recognised from the first item of a source. An item becomes messages for a chat
template (`role`, `content`, and the message's other keys), or a prompt and a completion if both are
plain texts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.data.files import JSON_LINES, find_files, left_out, listing, read_json_items
from windlass.data.samples import choose_places
from windlass.data.sources import Notify, load_dataset
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.recipe import Recipe

# `role`, `content`, and other keys that a template reads (`tool_calls`, `name`, ...)
Message = dict[str, Any]
Parsed = tuple[list[Message], tuple[str, str] | None]
ROLES = ("system", "user", "assistant", "tool")
# Names of the roles in ShareGPT's files, and OpenAI's `developer`.
ROLE_ALIASES = {
    **dict.fromkeys(("gpt", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation"), "tool"),
    "human": "user",
    "developer": "system",
}
JSON_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
JSON_KINDS[type(None)] = "null"


@dataclass(frozen=True)
class Conversation:
    """Messages and the tools offered in them; or a prompt and its completion as plain texts."""

    messages: list[Message]
    place: str = ""  # file and line
    tools: list[Any] | None = None
    text: tuple[str, str] | None = None  # prompt and completion; then there are no messages
    untrained: frozenset[int] = frozenset()  # places of answers that are empty or have weight 0

    @property
    def remarks(self) -> list[str]:
        """Problems of the conversation, each with file and line."""
        return [
            f"{self.place}, turn {number}: an empty answer, which does not count in the loss"
            for number, message in enumerate(self.messages, 1)
            if _is_empty(message)
        ]

    @property
    def content(self) -> list[str]:
        """The texts of a conversation; two equal validation sets have equal ones."""
        if self.text:
            return list(self.text)
        return [message["content"] for message in self.messages if message["content"]]

    texts = content  # from which a tokenizer learns


class Shape(NamedTuple):
    """A way to write a conversation, with an example for error messages."""

    name: str
    fields: tuple[str, ...]
    example: str


TURNS = '{"role": "user", "content": "..."}, {"role": "assistant", ...}'
FROM = '{"from": "human", "value": "..."}, {"from": "gpt", ...}'
PAIR = '{"prompt": "...", "completion": "..."}'
ALPACA = '{"instruction": "...", "input": "...", "output": "..."}'
SHAPES = (
    Shape("messages", ("messages",), f'{{"messages": [{TURNS}]}}'),
    Shape("ShareGPT", ("conversations",), f'{{"conversations": [{FROM}]}}'),
    Shape("prompt and completion", ("prompt", "completion"), PAIR),
    Shape("Alpaca", ("instruction", "output"), ALPACA),
)


def _messages(turns: Any) -> list[Message]:
    """A list of turns as messages; ValueError or TypeError if it is not one."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"a conversation is a list of turns, not {_kind(turns)}")
    return [_message(turn, f"turn {number}") for number, turn in enumerate(turns, 1)]


def _message(turn: Any, place: str) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"{place} is {_kind(turn)}, not an object")
    names = ("from", "value") if "from" in turn else ("role", "content")
    required = names[:1] if turn.get("tool_calls") and "from" not in turn else names
    if missing := [name for name in sorted(required) if name not in turn]:
        raise ValueError(f"{place} has no {missing[0]!r}; it has {', '.join(map(repr, turn))}")
    message = {k: v for k, v in turn.items() if v is not None and k not in ("from", "value")}
    role, content = (turn.get(name) for name in names)
    message["role"] = ROLE_ALIASES.get(str(role), role)
    if message["role"] not in ROLES:
        roles = ", ".join((*ROLES, *sorted(ROLE_ALIASES)))
        raise ValueError(f"{place} has the role {role!r}; a role is one of {roles}")
    if isinstance(content, list):  # parts
        if any(part.get("type") != "text" for part in content):
            raise ValueError(f"{place}: the content must be text; Windlass does not take images")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not message.get("tool_calls"):
        raise ValueError(f"{place}: a content is text, not {_kind(content)}")
    if "tool_calls" in message:
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return {**message, "content": content}


def _is_empty(message: Message) -> bool:
    is_answer = message["role"] == "assistant" and not message.get("tool_calls")
    return is_answer and not (message["content"] or "").strip()


def _take_untrained(messages: list[Message]) -> frozenset[int]:
    """Remove `weight` and `train`; the places of answers that are empty or that they exclude."""
    untrained = set[int]()
    for place, message in enumerate(messages):
        weight, train = message.pop("weight", None), message.pop("train", None)
        turn, role = f"turn {place + 1}", message["role"]
        if weight not in (None, 0, 1):
            raise ValueError(f"{turn} has the weight {weight!r}; a weight is 0 or 1")
        if train not in (None, True, False):
            raise ValueError(f"{turn} has train = {train!r}; it is true or false")
        if role != "assistant" and (weight or train):
            answers = "only the assistant's count: omit weight and train"
            raise ValueError(f"{turn} is the {role}'s, and {answers}")
        if weight == 0 or train is False or _is_empty(message):
            untrained.add(place)
    return frozenset(untrained)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object for templates; OpenAI has JSON in a string."""
    function = call.get("function", call)
    if not isinstance(function.get("arguments"), str):
        return call
    function = {**function, "arguments": json.loads(function["arguments"])}
    return {**call, "function": function} if "function" in call else function


def _parse(item: Any, shape: Shape) -> Parsed:
    """The messages of an item, or its prompt and completion if both are plain texts."""
    if len(shape.fields) == 1:
        return _messages(item[shape.fields[0]]), None
    if shape.name == "Alpaca":
        request = "\n\n".join(filter(None, (item["instruction"], item.get("input"))))
        system = [{"role": "system", "content": item["system"]}] if item.get("system") else []
        answer = {"role": "assistant", "content": item["output"]}
        return _messages([*system, {"role": "user", "content": request}, answer]), None
    prompt, completion = item["prompt"], item["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [], (prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError("prompt and completion are both texts, or both lists of messages")
    return _messages([*prompt, *completion]), None


def read_splits(recipe: Recipe, notify: Notify = print) -> list[list[Conversation]]:
    """The training and validation conversations; by default a random `data.val_fraction`."""
    data = recipe.data
    train = read(data.sources, data.split, notify=notify, revision=data.revision)
    if data.eval_sources or (data.eval_split and data.sources[0].startswith("hf:")):
        split, setting = data.eval_split or data.split, "data.eval_source"
        where = (data.eval_sources, "") if data.eval_sources else (data.sources, data.revision)
        return [train, read(where[0], split, setting, notify, where[1])]
    held_out: set[int] = set()
    places = range(len(train))
    if data.val_fraction and len(train) > 1:
        count = max(1, int(len(train) * Fraction(str(data.val_fraction))))
        held_out = set(choose_places(map(str, places), count, recipe.run.seed, "split"))
    return [[train[i] for i in places if (i in held_out) == held] for held in (False, True)]


def read(
    sources: Iterable[str],
    split: str = "train",
    setting: str = "data.source",
    notify: Notify = print,
    revision: str = "",
) -> list[Conversation]:
    """The conversations of JSON files and of `hf:...`; UserError if an item is not one."""
    conversations: list[Conversation] = []
    for source in sources:
        files = [] if source.startswith("hf:") else find_files(source, setting, JSON_LINES)
        parts = [(str(path), read_json_items(path)) for path in files]
        if not files:
            table = load_dataset(source[3:], split, setting=setting, revision=revision)
            rows = ((f"{source}, row {number}", row) for number, row in enumerate(table))
            parts = [(source, rows)]
        counts: Counter[str] = Counter()
        for name, items in parts:
            shape, part = _read_part(items)
            if shape is None:
                raise UserError(f"{setting}: there is no conversation in {name}")
            counts[shape.name] += len(part)
            conversations += part
        shapes = ", ".join(f"{count:,} conversations ({name})" for name, count in counts.items())
        place = f" in {listing(files)}" if len(files) > 1 else ""
        notify(f"{source}: {shapes}{place}{left_out(source, JSON_LINES) if files else ''}")
    return conversations


def _read_part(items: Iterator[tuple[str, Any]]) -> tuple[Shape | None, list[Conversation]]:
    """The items of a file or table, and the shape of the first one; None without items."""
    shape: Shape | None = None
    conversations = []
    for place, item in items:
        shape = shape or shape_of(item, place)
        try:
            messages, text = _parse(item, shape)
            untrained = _take_untrained(messages)
            tools = item.get("tools")
            tools = json.loads(tools) if isinstance(tools, str) else tools
            if text is None and not any(message["role"] == "assistant" for message in messages):
                raise ValueError("there is no answer of the assistant to learn from")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{place}: {problem}; the file is of the shape {shape.name}: {shape.example}"
            ) from None
        conversations.append(Conversation(messages, place, tools or None, text, untrained))
    return shape, conversations


def shape_of(item: Any, place: str) -> Shape:
    """The shape of an item; UserError with all shapes if it has none of them."""
    problem = f"is {_kind(item)}"
    if isinstance(item, dict):
        for shape in SHAPES:
            if all(item.get(field) is not None for field in shape.fields):
                return shape
        problem = f"has {', '.join(map(repr, list(item)[:12]))}"
    examples = "\n".join(f"  {shape.example}" for shape in SHAPES)
    raise UserError(f"{place}: the item {problem}, and a conversation is one of\n{examples}")


def _kind(value: Any) -> str:
    return JSON_KINDS.get(type(value), "a number")
