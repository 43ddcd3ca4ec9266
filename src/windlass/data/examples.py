"""Conversations and questions as tokens with marks: a marked token has a loss.

A conversation is written in one of SHAPES, which each item shows by its keys. It becomes messages
for a chat template, or a prompt and a completion if both are plain texts. A question is an item of
SQuAD v1.1: question, context, answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from windlass.data.chat import Message, Template
from windlass.data.order import splitmix
from windlass.data.records import Item, SourceSpec, record_of
from windlass.data.sources import open_source
from windlass.data.split import held_out_examples
from windlass.errors import UserError
from windlass.seeds import seed_bytes

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer
    from windlass.recipe import Recipe

ROLES = ("system", "user", "assistant", "tool")
# Names of the roles in ShareGPT's files, OpenAI's `developer`, Llama's `ipython`; in any case.
ROLE_ALIASES = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation", "ipython"), "tool"),
    "human": "user",
    "developer": "system",
}
JSON_KINDS = {dict: "an object", list: "a list", str: "text", type(None): "null"}
# The prompt of a question; its answer follows after a space, then the end-of-text token.
QUESTION, ANSWER = "Question: {question} Context: {context}", " Answer:"
PROMPT = QUESTION + ANSWER


class Encoded(NamedTuple):
    """A conversation or question as tokens."""

    tokens: np.ndarray  # int64 [n], not cut
    marks: np.ndarray  # bool [n]: has a loss
    text: int  # 64-bit hash of the content
    group: int  # 64-bit hash that decides whether it is held out: the content's, or the article's
    tail: int = 0  # the last tokens, which a cut keeps
    reach: int = 0  # the first tokens, without which nothing can be learned


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


@dataclass(frozen=True)
class Conversation:
    """Messages and the tools offered in them; or a prompt and its completion as plain texts."""

    messages: list[Message]
    tools: list[Any] | None = None
    pair: tuple[str, str] | None = None  # prompt and completion; then there are no messages
    prompt: int = 0  # the messages of the prompt, if the item is a prompt with a completion
    untrained: frozenset[int] = frozenset()  # places of answers that are empty or have weight 0

    @property
    def hash(self) -> int:
        if self.pair:
            return hash64(*self.pair)
        content = [[m["role"], m["content"], m.get("tool_calls")] for m in self.messages]
        return hash64(json.dumps(content, sort_keys=True, default=str))

    def trained(self, answers: str) -> list[int]:
        """The places of the answers with a loss, by `data.answers`.

        In a completion of several turns these are the assistant's, and TRL learns all turns.
        """
        first = self.prompt if answers == "auto" else 0
        places = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        places = places[-1:] if answers == "last" else places
        return [place for place in places if place >= first and place not in self.untrained]


@dataclass(frozen=True)
class Question:
    """A question about a paragraph."""

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
        return PROMPT.format(question=self.question, context=self.context)


def hash64(*texts: str) -> int:
    """A 64-bit hash of texts."""
    content = "\0".join(texts).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def encode_example(
    item: Item, spec: SourceSpec, tokenizer: Tokenizer, template: Template
) -> Encoded:
    """The tokens of an item; UserError with its place if it is bad. Depends on nothing else."""
    if spec.format == "squad":
        return _encode_question(_question(item, spec), tokenizer)
    talk = _conversation(item, spec)
    try:
        tokens, marks = _encode_conversation(talk, spec.answers, tokenizer, template)
    except UserError as error:
        raise UserError(f"{item.place}: {error}") from None
    marks[:1] = False  # no token predicts the first one
    if not marks.any():
        problem = "there is nothing to learn, because its answers are empty or do not count"
        raise UserError(f"{item.place}: {problem}; remove the item")
    digest = talk.hash
    return Encoded(tokens, marks, digest, digest, reach=int(marks.argmax()) + 1)


def example_texts(item: Item, spec: SourceSpec) -> list[str]:
    """The texts of an item, from which a tokenizer learns."""
    if spec.format == "squad":
        question = _question(item, spec)
        return [question.prompt, *question.answers]
    talk = _conversation(item, spec)
    return list(talk.pair or (m["content"] for m in talk.messages if m["content"]))


def example_group(item: Item, spec: SourceSpec) -> int:
    """The hash that decides whether an item is held out."""
    is_question = spec.format == "squad"
    return _question(item, spec).group if is_question else _conversation(item, spec).hash


# -- conversations


def _conversation(item: Item, spec: SourceSpec) -> Conversation:
    record = record_of(item)
    shape = next((s for s in SHAPES if all(record.get(f) is not None for f in s.fields)), None)
    if shape is None:
        problem = f"the item has {', '.join(map(repr, list(record)[:12])) or 'no keys'}"
        examples = "\n".join(f"  {shape.example}" for shape in SHAPES)
        raise UserError(f"{item.place}: {problem}, and a conversation is one of\n{examples}")
    try:
        messages, pair, prompt = _parse(record, shape)
        untrained = _take_untrained(messages)
        tools = record.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools
        if tools and not isinstance(tools, list):
            raise ValueError(f"tools are a list, not {_kind(tools)}")
        if pair is None and not any(message["role"] == "assistant" for message in messages):
            raise ValueError("there is no answer of the assistant to learn from")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{item.place}: {problem}; the item has the shape {shape.name}: {shape.example}"
        ) from None
    return Conversation(messages, tools or None, pair, prompt, untrained)


def _parse(
    record: dict[str, Any], shape: Shape
) -> tuple[list[Message], tuple[str, str] | None, int]:
    """Messages, or prompt and completion if both are texts; and the messages of a prompt."""
    if len(shape.fields) == 1:
        return _messages(record[shape.fields[0]]), None, 0
    if shape.name == "Alpaca":
        request = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
        system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
        answer = {"role": "assistant", "content": record["output"]}
        return _messages([*system, {"role": "user", "content": request}, answer]), None, 0
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [], (prompt, completion), 0
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError("prompt and completion are both texts, or both lists of messages")
    return _messages([*prompt, *completion]), None, len(prompt)


def _messages(turns: Any) -> list[Message]:
    """A list of turns as messages; ValueError or TypeError if it is not one."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"a conversation is a list of turns, not {_kind(turns)}")
    return [_message(turn, number) for number, turn in enumerate(turns, 1)]


def _message(turn: Any, number: int) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"turn {number} is {_kind(turn)}, not an object")
    calls = turn.get("tool_calls")
    names = ("from", "value") if "from" in turn else ("role", "content")
    for name in names:
        if name not in turn and not (calls and name == "content"):
            keys = ", ".join(map(repr, turn))
            raise ValueError(f"turn {number} has no {name!r}; it has {keys}")
    role, content = turn[names[0]], turn.get(names[1])
    if isinstance(content, list):  # parts
        if any(part.get("type") != "text" for part in content):
            problem = "the content must be text; Windlass does not take images"
            raise ValueError(f"turn {number}: {problem}")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not calls:
        raise ValueError(f"turn {number}: a content is text, not {_kind(content)}")
    known = ROLE_ALIASES.get(str(role).lower())
    if known is None:
        roles = ", ".join(ROLE_ALIASES)
        raise ValueError(f"turn {number} has the role {role!r}; a role is one of {roles}")
    message = {k: v for k, v in turn.items() if v is not None and k not in ("from", "value")}
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return {**message, "role": known, "content": content}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object for templates; OpenAI has JSON in a string."""
    function = call.get("function", call)
    if not isinstance(function.get("arguments"), str):
        return call
    function = {**function, "arguments": json.loads(function["arguments"])}
    return {**call, "function": function} if "function" in call else function


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
            raise ValueError(f"{turn} is the {role}'s: omit weight and train")
        if weight == 0 or train is False or _is_empty(message):
            untrained.add(place)
    return frozenset(untrained)


def _kind(value: Any) -> str:
    return JSON_KINDS.get(type(value), "a number")


def _encode_conversation(
    talk: Conversation, answers: str, tokenizer: Tokenizer, template: Template
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and marks. A prompt and a completion are two texts, then the end-of-text token."""
    if talk.pair:
        both, prompt = tokenizer.encode_pair(*talk.pair)
        end = [] if tokenizer.eot is None else [tokenizer.eot]
        marks = np.arange(len(both) + len(end)) >= prompt
        return np.array([*both, *end], np.int64), marks & bool(talk.pair[1].strip())
    trained = talk.trained(answers)
    is_completion = answers == "auto" and talk.prompt > 0
    pieces = template.pieces(talk.messages, tokenizer, talk.tools, trained, is_completion)
    tokens, counted = tokenizer.encode_marked(pieces)
    return np.array(tokens, np.int64), np.array(counted, bool)


# -- questions


def _question(item: Item, spec: SourceSpec) -> Question:
    record = record_of(item)
    try:
        answers = tuple(str(answer["text"]) for answer in record["answers"])
        name, context, question = str(record["id"]), record["context"], record["question"]
        if not isinstance(context, str) or not isinstance(question, str):
            raise ValueError("question and context are texts")
        if not answers or not answers[0]:
            raise ValueError("it has no answer, as some questions of SQuAD 2.0; remove it")
        if answers[0] not in context:
            raise ValueError(f"its answer {answers[0]!r} is not in its context")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{item.place}: {problem}") from None
    group = hash64(str(record.get("title") or context))
    return Question(name, question.strip(), context, answers, group)


def _encode_question(question: Question, tokenizer: Tokenizer) -> Encoded:
    """A question's prompt and answer. The answer and the end-of-text token are marked."""
    if tokenizer.eot is None:
        problem = "data.tokenizer has no end-of-text token to end an answer"
        raise UserError(f"{problem}; use byte, bpe, gpt2 or hf:")
    answer = question.answers[0]
    both, prompt = tokenizer.encode_pair(question.prompt, f" {answer}")
    context = question.context[: question.context.index(answer) + len(answer)]
    first = QUESTION.format(question=question.question, context=context)
    tokens = np.array([*both, tokenizer.eot], np.int64)
    return Encoded(
        tokens,
        np.arange(len(tokens)) >= prompt,
        question.hash,
        question.group,
        tail=len(tokens) - prompt + _answer_mark(question, tokenizer),
        reach=len(tokenizer.prompt(first)),
    )


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


def eval_questions(recipe: Recipe) -> list[Question]:
    """The suite's questions: `eval.squad_items` or `data.eval_size`, chosen by `run.seed`."""
    data = recipe.data
    if sources := suite_sources(recipe):
        setting = "eval.squad_file" if recipe.eval.squad_file else "data.eval_source"
        questions = _read_questions(sources, "validation", setting, data.on_bad_item)
    else:
        questions = _read_questions(data.sources, "train", "data.source", data.on_bad_item)
        groups = np.array([question.group for question in questions], np.uint64)
        held = held_out_examples(groups, data.val_fraction)
        questions = [questions[i] for i in np.flatnonzero(held)]
    if not questions:
        remedy = "set eval.squad_file, data.eval_source or data.val_fraction"
        raise UserError(f"no questions to evaluate: {remedy}")
    twice = [name for name, count in Counter(q.id for q in questions).items() if count > 1]
    if twice:
        raise UserError(f"{', '.join(sources or data.sources)} has two questions {twice[0]!r}")
    size = recipe.eval.squad_items or data.eval_size or len(questions)
    key = np.frombuffer(seed_bytes(f"windlass/choose/eval/{recipe.run.seed}", 8), "<u8")[0]
    draws = splitmix(np.array([q.hash for q in questions], np.uint64) ^ key)
    return [questions[i] for i in sorted(np.argsort(draws, kind="stable")[:size].tolist())]


def suite_sources(recipe: Recipe) -> list[str]:
    """`eval.squad_file`, `data.eval_source`, or SQuAD's validation set; empty if the suite's
    questions are held out from the training questions."""
    data = recipe.data
    if recipe.eval.squad_file:
        return [f"squad:{recipe.eval.squad_file}"]
    if data.format == "squad":
        return data.eval_sources or [source for source in data.sources if source == "squad"]
    named = [source for source in data.eval_sources if source.partition(":")[0] == "squad"]
    return named or ["squad"]


def _read_questions(
    sources: list[str], split: str, setting: str, on_bad_item: str
) -> list[Question]:
    questions = []
    for source in sources:
        if source.partition(":")[0] != "squad":
            problem = f"{setting}: {source!r} has no questions"
            raise UserError(f"{problem}; write squad or squad:FILE.json")
        spec = SourceSpec(source, source, "squad", split=split, setting=setting)
        for item in open_source(spec, lambda _: None).items():
            with contextlib.suppress(*([UserError] if on_bad_item == "skip" else [])):
                questions.append(_question(item, spec))
    return questions
