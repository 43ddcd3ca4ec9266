"""SQuAD as rows: layout, labels, cutting around the answer, splits, bad files; rows of unequal
length.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_fixtures import counted
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import refused
from windlass.data import squad
from windlass.data.open import open_data
from windlass.data.prepare import prepare
from windlass.data.samples import Rows, choose_places
from windlass.data.squad import Question
from windlass.data.tokenizer import byte_tokenizer
from windlass.recipe import Recipe

BYTES = byte_tokenizer()


def question(context: str, answer: str) -> Question:
    return Question("q", "What is it?", context, (answer,), context.index(answer))


def article(title: str, count: int) -> dict[str, Any]:
    context = f"In {title} there lived a king. He had many sons and one cat."
    answers = [{"text": "one cat", "answer_start": context.index("one cat")}]
    qas = [
        {"id": f"{title}-{i}", "question": f"Who {i}?", "answers": answers} for i in range(count)
    ]
    return {"title": title, "paragraphs": [{"context": context, "qas": qas}]}


def write(path: Path, articles: int, count: int = 3) -> Path:
    tree = {"version": "1.1", "data": [article(f"Land {a}", count) for a in range(articles)]}
    path.write_text(json.dumps(tree))
    return path


def recipe(source: str, folder: Path, context: int = 256, **data: Any) -> Recipe:
    tree = {"source": source, "format": "squad", "tokenizer": "byte", "dir": str(folder), **data}
    return Recipe.model_validate({"model": {"context": context}, "data": tree})


def test_only_the_answer_and_its_end_count_and_rows_are_padded_to_the_longest_of_a_batch() -> None:
    ids, marks, _ = squad.row(question("A cat sat.", "cat"), BYTES, 100)  # type: ignore[misc]
    assert BYTES.decode(ids) == "Question: What is it? Context: A cat sat. Answer: cat<|endoftext|>"
    assert counted(BYTES, ids, marks) == " cat<|endoftext|>"
    first = [1, 2, 3], [True, False, True]
    second = [4, 5, 6, 7, 8], [False, True, True, True, True]
    rows = Rows([first, second], pad=9)
    tokens, labels, *_ = rows.read(np.array([1, 0, 1]))
    assert tokens.tolist() == [[4, 5, 6, 7], [1, 2, 9, 9], [4, 5, 6, 7]]
    assert labels.tolist() == [[5, 6, 7, 8], [-100, 3, -100, -100], [5, 6, 7, 8]]
    assert rows.valid_tokens == 5 and rows.length(0) == 2


WORD = st.sampled_from(["a", "bb", "ccc", "dé", "(x)", "y-z,"])
WORDS = st.lists(WORD, max_size=60).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(
    WORDS,
    WORDS,
    st.sampled_from(["ANSWER", "THE ANSWER", "Ä 1"]),
    st.integers(70, 240),
    st.sampled_from(["", " "]),
)
def test_a_context_is_cut_around_the_answer(left, right, answer, room, gap):
    item = question(f"{left}{gap}{answer}{gap}{right}", answer)
    ids, marks, _ = squad.row(item, BYTES, room)  # type: ignore[misc]
    assert len(ids) <= room + 1
    text = BYTES.decode(i for i in ids if i != 256)
    context = text.split(" Context: ")[1].rsplit(" Answer:", 1)[0]
    assert answer in context and context in item.context and text.endswith(f" {answer}")
    whole = squad.PROMPT.format(question=item.question, context=item.context) + f" {answer}"
    if len(whole.encode()) <= room:
        assert context == item.context
    for side, whole_side in zip(context.split(answer), (left, right), strict=True):
        assert set(side.split()) <= set(whole_side.split()), "words are whole"
    assert sum(marks) == len(answer.encode()) + 2


def test_a_prompt_for_generation_does_not_look_at_the_answer() -> None:
    item = question("word " * 100 + "ANSWER", "ANSWER")
    ids = squad.prompt(item, BYTES, 120)
    text = BYTES.decode(ids)
    assert len(ids) <= 120 and text.endswith(" Answer:") and "ANSWER" not in text
    assert text.startswith("Question: What is it? Context: word word")
    whole = squad.PROMPT.format(question=item.question, context=item.context)
    assert BYTES.decode(squad.prompt(item, BYTES, 2000)) == whole


def test_the_suite_asks_its_own_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "asked.json", articles=3)

    def asked(tree: dict[str, Any], **settings: Any) -> list[Question]:
        return squad.eval_questions(Recipe.model_validate({**tree, "eval": settings}))

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a corpus, which is no SQuAD")
    text = {"data": {"source": "corpus.txt", "eval_source": str(corpus), "eval_size": 5}}
    everything = asked({}, squad_file=str(file))
    assert [q.id for q in everything] == [f"Land {a}-{i}" for a in range(3) for i in range(3)]
    assert len(asked(text, squad_file=str(file))) == 5
    assert len(asked(text, squad_file=str(file), squad_items=2)) == 2
    absent = {"format": "squad", "source": f"squad:{tmp_path / 'absent.json'}"}
    assert asked({"data": absent}, squad_file=str(file)) == everything
    assert asked({"data": {**absent, "eval_source": f"squad:{file}"}}) == everything
    mine = {"data": {"format": "squad", "source": f"squad:{file}", "val_fraction": 0.3}}
    assert asked(mine) == squad.read_splits(Recipe.model_validate(mine))[1]
    assert {q.group for q in asked(mine)} == {"Land 2"}
    with refused("eval.squad_file", "none.json"):
        asked(text, squad_file=str(tmp_path / "none.json"))
    answers = {"text": ["cat"], "answer_start": [2]}
    entry = {"id": "1", "title": "t", "question": "Who?", "context": "A cat.", "answers": answers}
    splits = {"train": [], "validation": [entry]}
    monkeypatch.setattr(squad, "load_dataset", lambda name, split, **_: splits[split])
    of_the_hub = asked({"data": {"format": "squad", "source": "squad"}})
    assert of_the_hub == [Question("1", "Who?", "A cat.", ("cat",), 2, "t")]


def test_a_choice_is_a_function_of_seed_purpose_and_keys_alone() -> None:
    keys = [f"id-{i}" for i in range(200)]
    first = choose_places(keys, 50, 1, "train")
    assert first == sorted(first) == choose_places(keys, 50, 1, "train") and len(set(first)) == 50
    assert first != choose_places(keys, 50, 2, "train")
    assert first != choose_places(keys, 50, 1, "eval")
    assert all(choose_places(keys, n, 1, "train") == list(range(200)) for n in (0, 500))
    chosen = {keys[i] for i in first}
    without = [k for k in keys if k in chosen or k < "id-5"]
    # others coming or going changes no rank
    assert {without[i] for i in choose_places(without, 50, 1, "train")} == chosen


def test_rows_are_made_once_and_a_change_of_anything_is_noticed(tmp_path: Path) -> None:
    file = write(tmp_path / "s.json", articles=4)
    sizes = {"eval_source": f"squad:{file}", "train_size": 5, "eval_size": 3}
    data = open_data(recipe(f"squad:{file}", tmp_path / "few", **sizes))
    assert (len(data.train), len(data.val or ())) == (5, 3)
    wanted = recipe(f"squad:{file}", tmp_path / "d", val_fraction=0.25)
    npz = tmp_path / "d" / "train.npz"
    data = open_data(wanted)
    assert (data.vocab, data.directory) == (257, tmp_path / "d")
    assert (len(data.train), len(data.val or ())) == (9, 3)
    prepared = prepare(wanted)
    assert not prepared.is_new and prepared.index.fingerprint == data.fingerprint
    assert prepared.index.rows["train"].tokens == data.train.real_tokens
    assert prepared.index.rows["val"].tokens == data.val.real_tokens
    with refused("context: prepared with 256", "128", "data.dir"):
        open_data(recipe(f"squad:{file}", tmp_path / "d", context=128, val_fraction=0.25))
    write(file, articles=4, count=2)
    with refused("s.json", "data.dir"):
        open_data(wanted)
    write(file, articles=4)
    raw = bytearray(npz.read_bytes())
    raw[len(raw) // 2] ^= 1
    npz.write_bytes(bytes(raw))
    with refused("train.npz", "prepare the data again"):
        open_data(wanted)


def with_answers(*answers: dict[str, Any]) -> dict[str, Any]:
    qas = [{"id": "k", "question": "q", "answers": answers}]
    return {"paragraphs": [{"context": "abc", "qas": qas}]}


@pytest.mark.parametrize(
    ("articles", "words"),
    [
        (None, "SQuAD"),
        ([], "no questions"),
        ([with_answers()], "SQuAD"),
        ([with_answers({"text": "b", "answer_start": 2})], "question k: its answer 'b'"),
        ([article("Land", 1), article("Land", 1)], "two questions with one id"),
    ],
)
def test_files_that_are_no_squad_are_refused_by_name(tmp_path, articles, words):
    (tmp_path / "s.json").write_text("[" if articles is None else json.dumps({"data": articles}))
    with refused(words):
        squad.read_all([f"squad:{tmp_path / 's.json'}"])


def test_the_real_file_is_read_whole(data_files: Path) -> None:
    items = squad.read_questions(f"squad:{data_files / 'squad' / 'dev-v1.1.json'}")
    assert len(items) == 10_570 and len({q.group for q in items}) == 48
    assert all(q.context[q.start :].startswith(q.answers[0]) for q in items)
