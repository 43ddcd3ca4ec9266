"""SQuAD v1.1 as training rows: question, context, answer; only the answer counts in the loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from windlass.data.samples import Row, choose_places
from windlass.data.sources import load_dataset
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer
    from windlass.recipe import Recipe

HUB_NAME = "rajpurkar/squad"
# The answer follows after a space, then the end-of-text token.
PROMPT = "Question: {question} Context: {context} Answer:"


@dataclass(frozen=True)
class Question:
    """One question about a paragraph."""

    remarks: ClassVar[tuple[str, ...]] = ()
    id: str
    question: str
    context: str
    answers: tuple[str, ...]  # reference answers; the first is the one to learn
    start: int  # of the first answer in the context, in characters
    group: str = ""  # the article; a split never divides its questions

    @property
    def place(self) -> str:
        return f"question {self.id}"

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts from which a tokenizer learns."""
        return (PROMPT.format(question=self.question, context=self.context), *self.answers)

    @property
    def content(self) -> tuple[str, ...]:
        return (self.question, self.context, *self.answers)


def read_questions(source: str, split: str = "train", key: str = "data.source") -> list[Question]:
    """The questions of `squad:FILE.json` or `squad` (on the Hub), for the setting `key`; UserError
    if there are none, or the file is not SQuAD v1.1 JSON."""
    name, _, path = source.partition(":")
    if name != "squad":
        raise UserError(f"{key}: {source!r} has no questions; write squad or squad:FILE.json")
    try:
        if path:
            entries = [
                (qa, part["context"], str(article.get("title", "")), qa["answers"])
                for article in json.loads(Path(path).read_text(encoding="utf-8"))["data"]
                for part in article["paragraphs"]
                for qa in part["qas"]
            ]
        else:
            entries = []
            for row in load_dataset(HUB_NAME, split, setting=key):
                pairs = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
                answers = [{"text": text, "answer_start": start} for text, start in pairs]
                entries.append((row, row["context"], row["title"], answers))
        questions = [_question(*entry) for entry in entries]
    except UserError as error:
        if path:
            raise
        raise UserError(f"{error}; or give a file: squad:FILE.json, eval.squad_file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        problem = f"{type(error).__name__} {error}"
        raise UserError(f"{key}: {path} is not SQuAD v1.1 JSON: {problem}") from None
    if not questions:
        raise UserError(f"{key}: {path} has no questions")
    return questions


def read_all(sources: list[str], split: str = "train", key: str = "data.source") -> list[Question]:
    """The questions of all sources; UserError if an id occurs twice."""
    questions = [question for source in sources for question in read_questions(source, split, key)]
    if len({question.id for question in questions}) < len(questions):
        raise UserError(f"{key}: {', '.join(sources)} has two questions with one id")
    return questions


def _question(
    entry: dict[str, Any], context: str, group: str, answers: list[dict[str, Any]]
) -> Question:
    texts, start = tuple(str(a["text"]) for a in answers), int(answers[0]["answer_start"])
    if not texts[0] or context[start : start + len(texts[0])] != texts[0]:
        raise UserError(
            f"question {entry['id']}: its answer {texts[0]!r} "
            f"is not at character {start} of its context"
        )
    return Question(str(entry["id"]), entry["question"].strip(), context, texts, start, group)


def read_splits(recipe: Recipe) -> list[list[Question]]:
    """The training and validation questions of a recipe.

    Without `data.eval_source`: the Hub's validation split for `squad`, the last `data.val_fraction`
    of a file's articles.
    """
    data, train = recipe.data, read_all(recipe.data.sources)
    if separate := data.eval_sources or [source for source in data.sources if source == "squad"]:
        return [train, read_all(separate, "validation", "data.eval_source")]
    return split_articles(train, data.val_fraction) if data.val_fraction else [train, []]


def split_articles(questions: list[Question], fraction: float) -> list[list[Question]]:
    """The questions of the first articles, and of the last `fraction` of them."""
    articles = list(dict.fromkeys(question.group for question in questions))
    if len(articles) < 2:
        raise UserError("data.val_fraction: there is only one article; give data.eval_source")
    first = set(articles[: min(len(articles) - 1, max(1, round(len(articles) * (1 - fraction))))])
    return [[q for q in questions if (q.group in first) == training] for training in (True, False)]


def eval_questions(recipe: Recipe) -> list[Question]:
    """The suite's questions: `eval.squad_items` or `data.eval_size`, chosen by `run.seed`."""
    data, questions = recipe.data, list[Question]()
    if sources := suite_sources(recipe):
        setting = "eval.squad_file" if recipe.eval.squad_file else "data.eval_source"
        questions = read_all(sources, "validation", setting)
    elif data.val_fraction:
        questions = split_articles(read_all(data.sources), data.val_fraction)[1]
    if not questions:
        raise UserError(
            "no questions to evaluate: set eval.squad_file, data.eval_source or data.val_fraction"
        )
    size = recipe.eval.squad_items or data.eval_size
    places = choose_places([q.id for q in questions], size, recipe.run.seed, "eval")
    return [questions[i] for i in places]


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


# -- rows and prompts


def row(item: Question, tokenizer: Tokenizer, context: int) -> Row | None:
    """One question in at most `context` + 1 tokens; None if it does not fit.

    The answer and the end-of-text token count in the loss. A long context is cut in whole words,
    from both sides in proportion, to the longest part around the answer that fits.
    """
    if tokenizer.eot is None:
        raise UserError(
            "data.tokenizer has no end-of-text token to end an answer; use byte, bpe, gpt2 or hf:"
        )

    def encode(text: str) -> tuple[list[int], int]:
        prompt = PROMPT.format(question=item.question, context=text)
        return tokenizer.encode_pair(prompt, " " + item.answers[0])

    def fits(characters: int) -> bool:
        # n tokens make n - 1 positions, and the end-of-text token is one more
        return len(encode(around(item, characters))[0]) <= context

    ids, prompt_length = encode(item.context)
    whole = len(ids) + 1
    if len(ids) > context:
        if not fits(0):
            return None
        most = _bisect(len(item.context) - len(item.answers[0]), fits)
        ids, prompt_length = encode(around(item, most))
    marks = [False] * prompt_length + [True] * (len(ids) - prompt_length + 1)
    return Row([*ids, tokenizer.eot], marks, whole)


def _bisect(too_many: int, fits: Callable[[int], bool]) -> int:
    """The largest number below `too_many` that fits; 0 does, and larger ones fit less."""
    low = 0
    while too_many - low > 1:
        middle = (low + too_many) // 2
        low, too_many = (middle, too_many) if fits(middle) else (low, middle)
    return low


def around(item: Question, characters: int) -> str:
    """The answer with about `characters` of the context around it, cut between words."""
    left, right = item.context[: item.start], item.context[item.start + len(item.answers[0]) :]
    before = round(characters * len(left) / max(1, len(left) + len(right)))
    after = characters - before
    first = len(left) - before
    if first > 0 and not left[first - 1].isspace():
        first = next((i for i in range(first, len(left)) if left[i].isspace()), len(left))
    if after < len(right) and not right[after : after + 1].isspace():
        after = next((i for i in range(after, 0, -1) if right[i - 1].isspace()), 0)
    return left[first:].lstrip() + item.answers[0] + right[:after].rstrip()


def prompt(item: Question, tokenizer: Tokenizer, room: int) -> list[int]:
    """A question's prompt for generation in at most `room` tokens; a long context loses its end."""

    def encode(characters: int) -> list[int]:
        text = item.context[:characters].rstrip()
        return tokenizer.encode_with_bos(PROMPT.format(question=item.question, context=text))

    ids = encode(len(item.context))
    if len(ids) <= room:
        return ids
    most = _bisect(len(item.context), lambda characters: len(encode(characters)) <= room)
    words = [i for i in range(most + 1) if i == 0 or item.context[i : i + 1].isspace()]
    ids = encode(words[-1])
    bos = len(tokenizer.bos)
    return [*ids[:bos], *ids[bos + max(0, len(ids) - room) :]][-room:]
