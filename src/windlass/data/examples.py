"""Conversations and questions as tokens with marks: a marked token has a loss. A conversation is
written in one of SHAPES; it becomes messages for a chat template, or a prompt and a completion. A
question is an item of SQuAD v1.1.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass.data.chat import Message, Template
from windlass.data.recipe_sources import SourceSpec
from windlass.data.records import Item, kind_of, record_of
from windlass.data.shards import Row
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
# Names of the roles in ShareGPT's files, OpenAI's `developer`, Llama's `ipython`; in any case.
ROLE_ALIASES = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation", "ipython"), "tool"),
    "human": "user",
    "developer": "system",
}
# The prompt of a question; its answer follows after a space, then the end-of-text token.
QUESTION, ANSWER = "Question: {question} Context: {context}", " Answer:"
# Ways to write a conversation, and the keys that show each.
SHAPES = {
    "messages": ["messages"],
    "ShareGPT": ["conversations"],
    "prompt and completion": ["prompt", "completion"],
    "Alpaca": ["instruction", "output"],
}


@dataclass(frozen=True)
class Conversation:
    """Messages with the other values that a template reads; or a prompt and its completion."""

    messages: list[Message] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)  # tools and `chat_template_kwargs`
    pair: tuple[str, str] | None = None  # prompt and completion, instead of messages
    prompt: int = 0  # the messages of the prompt, if the item is a prompt with a completion
    untrained: frozenset[int] = frozenset()  # places of messages that are empty or have weight 0

    @property
    def group(self) -> int:
        if self.pair:
            return hash64(*self.pair)
        content = [[m["role"], m["content"], m.get("tool_calls")] for m in self.messages]
        return hash64(json.dumps(content, sort_keys=True, default=str))

    @property
    def texts(self) -> list[str]:
        return list(self.pair or (m["content"] for m in self.messages if m["content"]))

    def trained(self, answers: str) -> list[int]:
        """The places of the answers with a loss, by `data.answers`. In a completion of several turns
        TRL learns all turns, and Windlass the assistant's."""
        first = self.prompt if answers == "auto" else 0
        places = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        places = places[-1:] if answers == "last" else places
        return [place for place in places if place >= first and place not in self.untrained]


@dataclass(frozen=True)
class Question:
    id: str
    question: str
    context: str
    answers: tuple[str, ...]  # the first is the one to learn
    group: int = 0  # hash of the article's title, or of the context without one

    @property
    def hash(self) -> int:
        return hash64(self.question, self.context)

    @property
    def prompt(self) -> str:
        return QUESTION.format(question=self.question, context=self.context) + ANSWER

    @property
    def texts(self) -> list[str]:
        return [self.prompt, *self.answers]


def hash64(*texts: str) -> int:
    """A 64-bit hash of texts."""
    content = "\0".join(texts).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def encode_example(
    item: Item, spec: SourceSpec, tokenizer: Tokenizer, template: Template
) -> list[Row]:
    """The tokens of an item, in one row or a row for each answer; UserError if it is bad."""
    example, rows = example_of(item, spec), list[Row]()
    if isinstance(example, Question):
        if tokenizer.eot is None:
            problem = "data.tokenizer lacks an end-of-text token to end an answer"
            raise UserError(f"{problem}; use byte, bpe, gpt2 or hf:")
        answer = example.answers[0]
        both, prompt = tokenizer.encode_pair(example.prompt, f" {answer}")
        context = example.context[: example.context.index(answer) + len(answer)]
        reach = len(tokenizer.prompt(QUESTION.format(question=example.question, context=context)))
        ids = np.array([*both, tokenizer.eot], np.int64)
        row = Row(0, ids, np.arange(len(ids)) >= prompt, example.hash, sum(map(len, example.texts)))
        tail = len(ids) - prompt + _answer_mark(example, tokenizer)
        return [row._replace(group=example.group, tail=tail, reach=reach)]
    digest = example.group
    try:
        for tokens, marks in _encode_conversation(example, spec, tokenizer, template):
            marks[:1] = False  # no token predicts the first one
            if marks.any():
                reach = int(marks.argmax()) + 1
                rows.append(Row(0, tokens, marks, digest, group=digest, reach=reach))
    except UserError as error:
        raise UserError(f"{item.place}: {error}") from None
    if not rows:
        problem = "there is nothing to learn, because its answers are empty or do not count"
        raise UserError(f"{item.place}: {problem}; remove the item")
    rows[-1] = rows[-1]._replace(characters=sum(map(len, example.texts)))  # of the whole item
    return rows


def unread_keys(items: Iterable[Item], spec: SourceSpec) -> list[str]:
    """The keys of items that have a value and are not read."""
    unread = dict[str, None]()
    for item in items:
        with contextlib.suppress(UserError):
            record, shape = _shape(item, spec)
            example = example_of(item, spec)
            read = {"id", "question", "context", "answers", "title"}
            if isinstance(example, Conversation):
                read = set(SHAPES[shape])
                if not example.pair:
                    read |= {"tools", "chat_template_kwargs"}
                    first = example.messages[0]["content"]
                    read |= {"system"} if record.get("system") == first else set()
            read |= {"input", "history"} if shape == "Alpaca" else set()
            unread |= dict.fromkeys(key for key in record if record[key] and key not in read)
    return list(unread)


def pair_text(item: Item, spec: SourceSpec) -> str:
    """A prompt with its completion; empty for messages and questions."""
    example = example_of(item, spec)
    return "".join(example.pair or ()) if isinstance(example, Conversation) else ""


def _shape(item: Item, spec: SourceSpec) -> tuple[dict[str, Any], str]:
    """The record of an item as `data.columns` renames it, and its shape; '' for a question."""
    record = record_of(item)
    named = {name: record[column] for name, column in spec.columns if column in record}
    record = {k: v for k, v in record.items() if k not in dict(spec.columns).values()} | named
    if spec.format == "squad":
        return record, ""
    for name, keys in SHAPES.items():
        if all(record.get(key) is not None for key in keys):
            return record, name
    problem = f"the item has {', '.join(map(repr, list(record)[:12])) or 'no keys'}"
    shapes = ", ".join(f"{' and '.join(keys)} ({name})" for name, keys in SHAPES.items())
    remedy = "data.columns renames others, as data.columns.instruction=question"
    raise UserError(f"{item.place}: {problem}, and a conversation has {shapes}; {remedy}")


def example_of(item: Item, spec: SourceSpec) -> Conversation | Question:
    """An item as a conversation or question; UserError with its place if it is neither."""
    record, shape = _shape(item, spec)
    try:
        if shape:
            return _conversation(record, shape)
        answers = tuple(str(answer["text"]) for answer in record["answers"])
        name, context, question = str(record["id"]), record["context"], record["question"]
        if not isinstance(context, str) or not isinstance(question, str):
            raise ValueError("question and context are texts")
        if not answers or not answers[0]:
            raise ValueError("it gives no answer, as some questions of SQuAD 2.0; remove it")
        if answers[0] not in context:
            raise ValueError(f"its answer {answers[0]!r} is not in its context")
        group = hash64(str(record.get("title") or context))
        return Question(name, question.strip(), context, answers, group)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        advice = f"; the item has the shape {shape}" if shape else ""
        raise UserError(f"{item.place}: {problem}{advice}") from None


def _conversation(record: dict[str, Any], shape: str) -> Conversation:
    """A conversation; ValueError, KeyError, TypeError or AttributeError if it is not one."""
    turns, prompt = record[SHAPES[shape][0]], 0
    if shape == "Alpaca":
        request = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
        answers = record["output"]
        answer = answers[0] if answers and isinstance(answers, list) else answers
        turns = []
        for asked, replied in (*(record.get("history") or ()), (request, answer)):
            turns.append({"role": "user", "content": asked})
            turns.append({"role": "assistant", "content": replied})
    elif shape == "prompt and completion":
        before, answer = record["prompt"], record["completion"]
        if isinstance(before, str) and isinstance(answer, str):
            return Conversation(pair=(before, answer))
        if isinstance(before, str) or isinstance(answer, str):
            raise ValueError("prompt and completion are both texts, or both lists of messages")
        turns, prompt = [*before, *answer], len(before)
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"a conversation is a list of turns, not {kind_of(turns)}")
    messages, untrained = list[Message](), set[int]()
    for place, turn in enumerate(turns):
        message = _message(turn, f"turn {place + 1}")
        messages.append(message)
        is_empty = not message.get("tool_calls") and not message["content"].strip()
        if is_empty or 0 in (turn.get("weight"), turn.get("train")):
            untrained.add(place)
    if (system := record.get("system")) and messages[0]["role"] != "system":
        messages.insert(0, _message({"role": "system", "content": system}, "system"))
        prompt, untrained = prompt + bool(prompt), {place + 1 for place in untrained}
    tools = record.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools or None
    if tools and not isinstance(tools, list):
        raise ValueError(f"tools are a list, not {kind_of(tools)}")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("the assistant gives no answer to learn from")
    extra = {**(record.get("chat_template_kwargs") or {}), "tools": tools or None}
    return Conversation(messages, extra, None, prompt, frozenset(untrained))


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"{where} is {kind_of(turn)}, not an object")
    calls = turn.get("tool_calls")
    names = ("from", "value") if "from" in turn else ("role", "content")
    for name in names:
        if name not in turn and not (calls and name == "content"):
            raise ValueError(f"{where} has no {name!r}; it has {', '.join(map(repr, turn))}")
    role, content = ROLE_ALIASES.get(str(turn[names[0]]).lower(), ""), turn.get(names[1])
    if not role:
        roles = ", ".join(ROLE_ALIASES)
        raise ValueError(f"{where} has the role {turn[names[0]]!r}; a role is one of {roles}")
    if isinstance(content, list):  # parts
        if any(part.get("type") != "text" for part in content):
            raise ValueError(f"{where}: the content must be text; Windlass does not take images")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not calls:
        raise ValueError(f"{where}: a content is text, not {kind_of(content)}")
    for key in ("weight", "train"):
        if turn.get(key) not in (None, 0, 1):
            raise ValueError(f"{where} has {key} {turn[key]!r}; it is 0 or 1, or true or false")
        if role != "assistant" and turn.get(key):
            raise ValueError(f"{where} is the {role}'s: omit weight and train")
    left_out = ("from", "value", "weight", "train")
    message = {k: v for k, v in turn.items() if v is not None and k not in left_out}
    if calls:
        message["tool_calls"] = []
    for call in calls or ():
        function = dict(call.get("function", call))
        if isinstance(function.get("arguments"), str):  # JSON for OpenAI, an object for templates
            function["arguments"] = json.loads(function["arguments"])
        whole = {**call, "function": function} if "function" in call else function
        message["tool_calls"].append(whole)
    return {**message, "role": role, "content": content}


def _encode_conversation(
    talk: Conversation, spec: SourceSpec, tokenizer: Tokenizer, template: Template
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and marks of each row."""
    learns_all = spec.answers == "everything"
    if talk.pair:  # two texts, then the end-of-text token
        if spec.special_tokens:
            parts = [(part, i) for i in (0, 1) for part in tokenizer.pieces(talk.pair[i])]
            both, counts = tokenizer.encode_marked(parts)
            has_begin = tuple(both[: len(tokenizer.begin)]) == tokenizer.begin
            both = [*(() if has_begin else tokenizer.begin), *both]
            prompt = len(both) - sum(counts)
        else:
            both, prompt = tokenizer.encode_pair(*talk.pair)
        end = [] if tokenizer.eot in (None, *both[-1:]) else [tokenizer.eot]
        marks = np.arange(len(both) + len(end)) >= prompt
        yield np.array([*both, *end], np.int64), (marks | learns_all) & bool(talk.pair[1].strip())
        return
    trained, is_completion = talk.trained(spec.answers), spec.answers == "auto" and talk.prompt > 0
    for pieces in template.rows(talk.messages, tokenizer, talk.extra, trained, is_completion):
        tokens, counted = tokenizer.encode_marked(pieces)
        yield np.array(tokens, np.int64), np.array(counted, bool) | learns_all


def _answer_mark(question: Question, tokenizer: Tokenizer) -> int:
    """The tokens of the end of a prompt, which a cut keeps."""
    return len(tokenizer.encode(ANSWER, question.prompt[: -len(ANSWER)]))


def question_prompt(question: Question, tokenizer: Tokenizer, room: int) -> list[int]:
    """The prompt in at most `room` tokens; a long context loses its end, as in training."""
    ids = tokenizer.prompt(question.prompt)
    if len(ids) <= room:
        return ids
    tail = min(room, _answer_mark(question, tokenizer))
    return [*ids[: room - tail], *ids[len(ids) - tail :]]
