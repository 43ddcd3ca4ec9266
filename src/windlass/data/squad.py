"""SQuAD v1.1 as training rows: question, context and answer in one sequence, the loss on the answer alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data.samples import Row, choose
from windlass.data.sources import load_dataset
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer
    from windlass.recipe import Recipe

HUB_NAME = "rajpurkar/squad"
# What the model reads; the answer follows after a space, then the end-of-text token.
PROMPT = "Question: {question} Context: {context} Answer:"


@dataclass(frozen=True)
class Question:
    """One question about a paragraph."""

    id: str
    question: str
    context: str
    answers: tuple[str, ...]  # the reference answers; the first is the one to learn
    start: int  # where the first answer begins in the context, in characters
    group: str = ""  # the article: questions of one article are never on both sides of a split


# -- where the questions come from


def read_questions(source: str, split: str = "train", key: str = "data.source") -> list[Question]:
    """The questions of `squad:FILE.json` or, of `squad`, a split of the Hub's data set; `key` is the setting for messages.

    Raises UserError where there are none, or the file is not SQuAD v1.1 JSON.
    """
    name, _, path = source.partition(":")
    if name != "squad":
        raise UserError(f"{key}: {source!r} has no questions; write squad or squad:FILE.json")
    try:
        if path:
            tree = json.loads(Path(path).read_text(encoding="utf-8"))
            questions = [
                _question(qa, part["context"], str(article.get("title", "")), qa["answers"])
                for article in tree["data"]
                for part in article["paragraphs"]
                for qa in part["qas"]
            ]
        else:
            questions = []
            for row in load_dataset(HUB_NAME, split):
                pairs = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
                answers = [{"text": text, "answer_start": start} for text, start in pairs]
                questions.append(_question(row, row["context"], row["title"], answers))
    except UserError as error:
        raise (
            error
            if path
            else UserError(f"{error}; or give a file: squad:FILE.json, eval.squad_file")
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(
            f"{key}: {path} is not SQuAD v1.1 JSON: {type(error).__name__} {error}"
        ) from None
    if not questions or len({q.id for q in questions}) < len(questions):
        raise UserError(
            f"{key}: {path} has {'two questions with one id' if questions else 'no questions'}"
        )
    return questions


def read_all(sources: list[str], split: str = "train", key: str = "data.source") -> list[Question]:
    questions = [question for source in sources for question in read_questions(source, split, key)]
    if len({question.id for question in questions}) < len(questions):
        raise UserError(f"{key}: {', '.join(sources)} have two questions with one id")
    return questions


def _question(
    entry: dict[str, Any], context: str, group: str, answers: list[dict[str, Any]]
) -> Question:
    texts, start = tuple(str(a["text"]) for a in answers), int(answers[0]["answer_start"])
    if not texts[0] or context[start : start + len(texts[0])] != texts[0]:
        raise UserError(
            f"question {entry['id']}: its answer {texts[0]!r} is not at character {start} of its context"
        )
    return Question(str(entry["id"]), entry["question"].strip(), context, texts, start, group)


def read_splits(recipe: Recipe) -> list[list[Question]]:
    """The training and evaluation questions of a recipe.

    Without `data.eval_source`: the Hub's validation split for `squad`; of a file the last `data.val_fraction` of the
    articles.
    """
    data, train = recipe.data, read_all(recipe.data.sources)
    if elsewhere := data.eval_sources or [source for source in data.sources if source == "squad"]:
        return [train, read_all(elsewhere, "validation", "data.eval_source")]
    return split(train, data.val_fraction) if data.val_fraction else [train, []]


def split(items: list[Question], share: float) -> list[list[Question]]:
    """The questions without and with those of the last `share` of the articles."""
    articles = list(dict.fromkeys(item.group for item in items))
    if len(articles) < 2:
        raise UserError("data.val_fraction: there is but one article; give data.eval_source")
    first = set(articles[: min(len(articles) - 1, max(1, round(len(articles) * (1 - share))))])
    return [
        [item for item in items if (item.group in first) == learned] for learned in (True, False)
    ]


def eval_questions(recipe: Recipe) -> list[Question]:
    """The questions that the suite `squad` asks, `eval.squad_items` or `data.eval_size` of them as `run.seed` chooses."""
    data, asked = recipe.data, []
    if sources := asked_sources(recipe):
        setting = "eval.squad_file" if recipe.eval.squad_file else "data.eval_source"
        asked = read_all(sources, "validation", setting)
    elif data.val_fraction:
        asked = split(read_all(data.sources), data.val_fraction)[1]
    if not asked:
        raise UserError(
            "no questions to evaluate: set eval.squad_file, data.eval_source or data.val_fraction"
        )
    size = recipe.eval.squad_items or data.eval_size
    return [asked[i] for i in choose([q.id for q in asked], size, recipe.run.seed, "eval")]


def asked_sources(recipe: Recipe) -> list[str]:
    """Where the questions of the suite `squad` come from: `eval.squad_file`, `data.eval_source`, or SQuAD's own validation
    questions; empty: held out from the training questions."""
    data = recipe.data
    if recipe.eval.squad_file:
        return [f"squad:{recipe.eval.squad_file}"]
    if data.format == "squad":
        return data.eval_sources or [source for source in data.sources if source == "squad"]
    return [source for source in data.eval_sources if source.partition(":")[0] == "squad"] or [
        "squad"
    ]


# -- rows and prompts


def row(item: Question, tokenizer: Tokenizer, context: int) -> Row | None:
    """One question in at most `context` + 1 tokens; None where it does not fit.

    The answer and the end-of-text token count. Of a long context the longest part around the answer that fits is used, in
    whole words. What is cut is taken from both sides in proportion, so that the answer's relative place stays.
    """
    if tokenizer.eot is None:
        raise UserError(
            "data.tokenizer has no end-of-text token to end an answer with; use byte, bpe, gpt2 or hf:"
        )

    def encode(text: str) -> tuple[list[int], int]:
        return tokenizer.encode_pair(
            PROMPT.format(question=item.question, context=text), " " + item.answers[0]
        )

    def fits(
        characters: int,
    ) -> bool:  # n tokens make n - 1 positions, and the end-of-text is one more token
        return len(encode(around(item, characters))[0]) <= context

    ids, prompt_length = encode(item.context)
    whole = len(ids) + 1
    if len(ids) > context:
        if not fits(0):
            return None
        ids, prompt_length = encode(
            around(item, _bisect(len(item.context) - len(item.answers[0]), fits))
        )
    return Row(
        [*ids, tokenizer.eot],
        [False] * prompt_length + [True] * (len(ids) - prompt_length + 1),
        whole,
    )


def _bisect(too_many: int, fits: Callable[[int], bool]) -> int:
    """The largest number below `too_many` that fits, given that 0 does and that larger ones fit less."""
    low = 0
    while too_many - low > 1:
        middle = (low + too_many) // 2
        low, too_many = (middle, too_many) if fits(middle) else (low, middle)
    return low


def around(item: Question, characters: int) -> str:
    """The answer with about so many characters of the context around it, cut between words."""
    left, right = item.context[: item.start], item.context[item.start + len(item.answers[0]) :]
    before = round(characters * len(left) / max(1, len(left) + len(right)))
    after = characters - before
    if before < len(left) and not left[len(left) - before - 1 : len(left) - before].isspace():
        space = next(
            (i for i in range(len(left) - before, len(left)) if left[i].isspace()), len(left)
        )
        before = len(left) - space
    if after < len(right) and not right[after : after + 1].isspace():
        after = next((i for i in range(after, 0, -1) if right[i - 1].isspace()), 0)
    return left[len(left) - before :].lstrip() + item.answers[0] + right[:after].rstrip()


def prompt(item: Question, tokenizer: Tokenizer, room: int) -> list[int]:
    """The tokens of a question's prompt for generation, at most `room`: a long context loses its end, a question that is too
    long alone its beginning. Where the answer stands is not looked at: a model that is measured does not know it either."""

    def encode(characters: int) -> list[int]:
        text = item.context[:characters].rstrip()
        return tokenizer.encode_with_bos(PROMPT.format(question=item.question, context=text))

    ids = encode(len(item.context))
    if len(ids) <= room:
        return ids
    most = _bisect(len(item.context), lambda characters: len(encode(characters)) <= room)
    ids = encode(
        max((i for i in range(most + 1) if i == 0 or item.context[i : i + 1].isspace()), default=0)
    )
    bos = len(tokenizer.bos)
    return [*ids[:bos], *ids[bos + max(0, len(ids) - room) :]][-room:]
