"""The shapes of conversations and SQuAD's questions: their tokens, marks, hashes, and bad items."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizer_fixtures
from data_fixtures import counted, recipe_for
from helpers import refused
from windlass.data import sources
from windlass.data.chat import Template
from windlass.data.encode import BATCH_ITEMS, Encoder
from windlass.data.items import Item, Question, example_of, hash64, question_prompt
from windlass.data.open import open_data
from windlass.data.recipe_sources import SourceSpec
from windlass.data.shards import Row
from windlass.data.tokenizer_kinds import (
    byte_tokenizer,
    gpt2_tokenizer,
    hf_tokenizer,
)
from windlass.evaluation.squad import eval_questions
from windlass.recipe import Recipe

BYTES = byte_tokenizer()
CHAT, SQUAD = SourceSpec("x", "x", "chat"), SourceSpec("squad:x", "squad:x", "squad")
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A cat."},
]
PARTS = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}
SHAREGPT = [{"from": NAMES[turn["role"]], "value": turn["content"]} for turn in TALK]
ALPACA = {"instruction": "Who are you?", "input": "", "output": "A cat."}
SAME: dict[str, Any] = {
    "messages": {"messages": TALK, "system": "the messages have one"},
    "system": {"messages": TALK[1:], "system": "Be kind."},
    "capitals": {"messages": [{**turn, "role": turn["role"].capitalize()} for turn in TALK]},
    "parts": {"messages": [{**TALK[0], "content": PARTS}, *TALK[1:]]},
    "sharegpt": {"id": "7", "conversations": SHAREGPT},
    "sharegpt-system": {"conversations": SHAREGPT[1:], "system": "Be kind."},
    "sharegpt-roles": {"conversations": TALK},
    "developer": {"messages": [{**TALK[0], "role": "developer"}, *TALK[1:]]},
    "alpaca": {**ALPACA, "system": "Be kind."},
    "alpaca-list": {**ALPACA, "output": ["A cat.", "A dog."], "system": "Be kind."},
    "trl": {"prompt": TALK[:2], "completion": TALK[2:]},
    "trl-system": {"prompt": TALK[1:2], "completion": TALK[2:], "system": "Be kind."},
}


def item(record: Any, place: str = "talk.jsonl, line 7") -> Item:
    return Item(place, record)


def learned(found: Row, tokenizer: Any = BYTES) -> str:
    return counted(tokenizer, found.tokens, found.marks)


def rows_of(
    item: Item, spec: SourceSpec, template: Template | None = None, tokenizer: Any = BYTES
) -> list[Row]:
    return Encoder(spec, tokenizer, template or Template()).example_rows(item)


def encode(
    record: Any, template: Template | None = None, tokenizer: Any = BYTES, **how: Any
) -> Any:
    [row] = rows_of(item(record), SourceSpec("x", "x", "chat", **how), template, tokenizer)
    return row


# -- conversations


@pytest.mark.parametrize("name", SAME)
def test_every_shape_gives_the_same_tokens_and_hashes(name: str) -> None:
    found, first = encode(json.dumps(SAME[name]).encode()), encode(SAME["messages"])
    assert BYTES.decode(found.tokens).startswith("System: Be kind.\n\nUser: Who are you?\n\nAssis")
    assert learned(found) == " A cat.<|endoftext|>" and found.marks.dtype == bool
    assert found.tokens.dtype == np.int64 and found.tokens.tolist() == first.tokens.tolist()
    assert found.text == found.group == first.text == example_of(item(SAME[name]), CHAT).group
    assert found.reach == found.marks.argmax() + 1 and found.tail == 0
    assert example_of(item(SAME[name]), CHAT).texts == ["Be kind.", "Who are you?", "A cat."]


def test_alpaca_has_inputs_and_a_history_and_a_completion_is_not_a_turn() -> None:
    found = encode({"instruction": "Add.", "input": "1 2", "output": "3", "history": [["a", "b"]]})
    text = "User: a\n\nAssistant: b<|endoftext|>\n\nUser: Add.\n\n1 2\n\nAssistant: 3"
    assert BYTES.decode(found.tokens).startswith(text)
    with refused("talk.jsonl, line 7", "Alpaca"):
        encode({**ALPACA, "history": [["one?"]]})
    found = encode({"prompt": "The sky is", "completion": " blue."}, Template("no template"))
    assert BYTES.decode(found.tokens) == "The sky is blue.<|endoftext|>"
    assert learned(found) == " blue.<|endoftext|>" and found.reach == len("The sky is") + 1


def test_a_template_reads_the_values_of_an_item() -> None:
    switch = Template(
        "{% if loud %}LOUD{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    found = encode({"messages": TALK, "chat_template_kwargs": {"loud": True}}, switch)
    assert BYTES.decode(found.tokens).startswith("LOUDBe kind.")
    assert BYTES.decode(encode({"messages": TALK, "tools": ""}, switch).tokens).startswith("Be")


def test_keys_that_are_not_read_are_listed_and_columns_rename_them() -> None:
    record = {"question": "Who?", "answer": "A cat.", "label": True, "id": 3, "none": None}
    with refused("'question', 'answer'", "data.columns.instruction"):
        encode(record)
    columns = (("instruction", "question"), ("output", "answer"))
    same = encode({"instruction": "Who?", "output": "A cat."})
    assert encode(record, columns=columns).tokens.tolist() == same.tokens.tolist()
    talk = {"messages": TALK[1:], "system": "x", "tools": [], "chat_template_kwargs": {"a": 1}}
    pair = {**talk, "prompt": "Who?", "completion": " A cat."}
    del pair["messages"]
    for own, unread in (
        (talk, ()),
        ({"messages": TALK, "system": "x"}, ("system",)),
        (pair, ("system", "chat_template_kwargs")),
        ({**talk, "history": [["a", "b"]]}, ("history",)),
    ):
        assert example_of(item(own), CHAT).unread == unread
    assert example_of(squad_item("A cat.", "cat"), SQUAD).unread == ()


def test_a_note_lists_the_keys_of_all_items_that_are_not_read(tmp_path: Path, capsys: Any) -> None:
    """Each once, also if only an item after the first batch has it."""
    records: list[dict[str, Any]] = [{"messages": TALK, "label": True} for _ in range(BATCH_ITEMS)]
    records += [{"messages": TALK, "label": True, "score": 3, "none": None}] * 2
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    how = {"format": "chat", "tokenizer": "byte", "shard_tokens": 1 << 20}
    open_data(recipe_for(path, tmp_path / "data", context=128, **how))
    notes = [line for line in capsys.readouterr().err.splitlines() if "not read: " in line]
    assert [line.partition("not read: ")[2] for line in notes] == ["label", "score"]


def test_a_note_names_tokens_that_the_tokenizer_or_the_model_reads_as_plain_text() -> None:
    def remarks(record: Any, source: str = "", **how: Any) -> list[str]:
        spec = SourceSpec("x", "x", "chat", **how)
        return [*Encoder(spec, BYTES, Template(source)).remarks([item(record)])]

    [remark] = remarks({"messages": TALK}, "<|im_start|>{{ messages }}<|im_end|>")
    assert "data.add_tokens='<|im_start|>,<|im_end|>'" in remark
    pair = {"prompt": "Who?<|endoftext|>", "completion": " A cat."}
    [remark] = remarks(pair)
    assert "<|endoftext|>" in remark and "data.special_tokens=true" in remark
    assert not remarks(pair, special_tokens=True)


def test_everything_may_have_a_loss_and_pairs_may_have_special_tokens(tmp_path: Path) -> None:
    found = encode({"messages": TALK}, answers="everything")
    assert found.marks.tolist() == [False] + [True] * (len(found.tokens) - 1)
    place = tokenizer_fixtures.save("llama3", tmp_path / "tok")
    tokenizer = hf_tokenizer(str(place))
    pair = {"prompt": "<|begin_of_text|>say<|eot_id|>", "completion": "hello<|end_of_text|>"}
    plain = encode(pair, tokenizer=tokenizer)
    assert list(plain.tokens).count(tokenizer.special["<|eot_id|>"]) == 0
    row = encode(pair, tokenizer=tokenizer, special_tokens=True)
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(place)
    whole = theirs("".join(pair.values()), add_special_tokens=False)["input_ids"]
    assert row.tokens.tolist() == whole
    assert learned(row, tokenizer) == pair["completion"]
    without = {**pair, "prompt": "say<|eot_id|>", "completion": "hello"}
    assert encode(without, tokenizer=tokenizer, special_tokens=True).tokens.tolist() == whole


TWO = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "a wrong answer"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "a right answer"},
]


@pytest.fixture(params=["plain", "chatml", "marked"])
def layout(request: Any, tmp_path: Path) -> Any:
    """A template, its tokenizer, and the token that ends an answer."""
    if request.param == "plain":
        return Template(), BYTES, "<|endoftext|>"
    place = tokenizer_fixtures.save(request.param, tmp_path / "tok")
    return Template.of_directory(place), hf_tokenizer(str(place)), "<|im_end|>"


def test_which_answers_have_a_loss_is_a_setting(layout: Any) -> None:
    template, tokenizer, end = layout
    talk, pair = {"messages": TWO}, {"prompt": TWO[:3], "completion": TWO[3:]}
    for record, answers, number in (
        (talk, "auto", 2),
        (talk, "all", 2),
        (talk, "last", 1),
        (pair, "auto", 1),
        (pair, "all", 2),
        (pair, "last", 1),
        ({"prompt": TWO[:1], "completion": TWO[1:]}, "auto", 2),
    ):
        found = encode(record, template, tokenizer, answers=answers)
        text = learned(found, tokenizer)
        assert text.count(end) == number and text.count("wrong") == number - 1 and "right" in text
        assert "?" not in text and found.text == encode(talk).text


@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}])
def test_an_answer_of_weight_0_or_an_empty_one_does_not_count(layout, key):
    template, tokenizer, end = layout
    first, last = [*TWO[:1], {**TWO[1], **key}, *TWO[2:]], [*TWO[:3], {**TWO[3], **key}]
    empty = [*TWO[:3], {**TWO[3], "content": " "}]
    found = [encode({"messages": talk}, template, tokenizer) for talk in (TWO, first, last, empty)]
    both, one, other, without = (learned(example, tokenizer) for example in found)
    assert both.count(end) == 2 and "wrong" in both and "right" in both
    assert one.count(end) == 1 and "wrong" not in one and "right" in one
    assert other == without and "right" not in other
    assert found[0].tokens.tolist() == found[1].tokens.tolist()  # the template does not see the key
    assert found[0].text == found[1].text


BAD_TURNS = [
    ([SHAREGPT[1], {"frm": "gpt", "value": "x"}], ("turn 2", "role")),
    ([{"from": "robot", "value": "x"}], ("turn 1", "'robot'", "human", "gpt", "assistant")),
    ([{"from": ["x"], "value": "x"}], ("turn 1", "role")),
    (SHAREGPT[:2], ("no answer",)),
    ("text", ("a list of turns",)),
    ([], ("a list of turns",)),
    ([{"role": "user", "content": 3}], ("turn 1", "content is text")),
    ([{"role": "user", "content": [{"type": "image"}]}], ("turn 1", "images")),
    ([SHAREGPT[1], {"from": "gpt", "value": "x", "tool_calls": ["y"]}], ("ShareGPT",)),
]
BAD: list[tuple[Any, tuple[str, ...]]] = [
    *(({"conversations": turns}, ("the shape ShareGPT", *words)) for turns, words in BAD_TURNS),
    (b"{", ("JSON",)),
    (b"[1]", ("list",)),
    (None, ("NoneType",)),
    ({}, ("no keys", "messages", "instruction")),
    ({"messages": TALK, "tools": 3}, ("tools",)),
    ({"messages": TALK, "tools": "{"}, ("the shape messages",)),
    ({"messages": TALK, "tools": [{"name": "f"}]}, ("data.tokenizer",)),
    ({"messages": [*TALK[:2], {**TALK[2], "content": " "}]}, ("nothing to learn",)),
    ({"messages": [*TALK[:2], {**TALK[2], "weight": 0}]}, ("nothing to learn",)),
    ({"prompt": "a", "completion": " "}, ("nothing to learn",)),
    ({"prompt": "a", "completion": []}, ("turn 1",)),
    ({"prompt": TALK, "completion": TALK[:2]}, ("nothing to learn",)),
]


@pytest.mark.parametrize(("record", "words"), BAD)
def test_a_bad_conversation_is_named_with_its_place_and_what_is_expected(record, words):
    with refused("talk.jsonl, line 7", *words):
        encode(record)


CALL = {"name": "hello", "arguments": {"say": "a cat <|im_end|>"}}
TOOL_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Say hello <|im_end|>"},
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "name": "hello", "content": "hello cat"},
    {"role": "assistant", "content": "I said hello."},
]
FUNCTION = {"name": "hello", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '<|call|>' + (call.function | tojson) + '<|call|>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_tools_are_written_as_transformers_writes_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    place = tokenizer_fixtures.save("chatml", tmp_path / "tok")
    inner = json.loads((place / "tokenizer.json").read_text())  # with a special token inside a call
    inner["added_tokens"].append({**inner["added_tokens"][0], "id": 480, "content": "<|call|>"})
    (place / "tokenizer.json").write_text(json.dumps(inner))
    (place / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    as_openai = json.loads(json.dumps(TOOL_TALK))  # arguments are JSON in a string there
    function = as_openai[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    ours, template = hf_tokenizer(str(place)), Template.of_directory(place)
    call = f"<|call|>{json.dumps(CALL)}<|call|>"
    for role in ("tool", "ipython", "function"):
        as_openai[2]["role"] = role
        found = encode({"messages": as_openai, "tools": json.dumps(TOOLS)}, template, ours)
        assert learned(found, ours) == f"{call}<|im_end|>\nI said hello.<|im_end|>\n"
        # the system's, the user's, ...: one a turn
        assert sum(i == ours.special["<|im_end|>"] for i in found.tokens) == 5
    theirs = AutoTokenizer.from_pretrained(place)
    # transformers reads a special token's text in a message as that token, and we as text
    plain = json.loads(json.dumps(TOOL_TALK).replace(" <|im_end|>", " x"))
    expected = theirs.apply_chat_template(plain, tools=TOOLS, return_dict=False)
    same = encode({"messages": plain, "tools": TOOLS}, template, ours)
    assert same.tokens.tolist() == expected


# -- questions


def squad_item(context: str, *answers: str, title: str = "", question: str = "What is it?") -> Item:
    listed = [{"text": text, "answer_start": context.find(text)} for text in answers]
    names = {"id": "q1", "title": title, "question": question}
    return Item("s.json, question q1", {**names, "context": context, "answers": listed})


def test_a_question_keeps_its_tail_and_its_hashes() -> None:
    [found] = rows_of(squad_item("A cat sat. A cat.", "cat"), SQUAD)
    text = "Question: What is it? Context: A cat sat. A cat. Answer: cat<|endoftext|>"
    assert BYTES.decode(found.tokens) == text and learned(found) == " cat<|endoftext|>"
    assert BYTES.decode(found.tokens[-found.tail :]) == " Answer: cat<|endoftext|>"
    # up to the first occurrence of the answer
    assert BYTES.decode(found.tokens[: found.reach]) == "Question: What is it? Context: A cat"
    [other] = rows_of(squad_item("A cat sat. A cat.", "sat"), SQUAD)
    assert found.text == other.text and found.group == other.group == hash64("A cat sat. A cat.")
    titled = squad_item("A dog.", "dog", title="Dogs")
    assert example_of(titled, SQUAD).group == hash64("Dogs")
    assert example_of(titled, SQUAD).texts == [
        "Question: What is it? Context: A dog. Answer:",
        "dog",
    ]


WORDS = st.lists(st.sampled_from(["a", "bb", "ccc", "dé", "(x)", "y-z,"]), max_size=60).map(
    " ".join
)


@pytest.mark.parametrize("kind", ["byte", "gpt2", "llama2", "llama3"])
def test_a_prompt_is_cut_as_training_cuts_and_does_not_know_the_answer(
    kind, tmp_path, data_files, request
):
    if kind == "byte":
        tokenizer = BYTES
    elif kind == "gpt2":
        tokenizer = gpt2_tokenizer(str(data_files / "gpt2"))
    else:
        tokenizer = hf_tokenizer(str(tokenizer_fixtures.save(kind, tmp_path)))

    @settings(max_examples=60, deadline=None)
    @given(WORDS, st.integers(1, 240))
    def check(words: str, room: int) -> None:
        context = f"{words} ANSWER {words}"
        [found] = rows_of(squad_item(context, "ANSWER"), SQUAD, tokenizer=tokenizer)
        asked = Question("q", "What is it?", context, ("ANSWER",))
        other = Question("q", "What is it?", context, (words or "x",))
        prompt = question_prompt(asked, tokenizer, room)
        assert prompt == question_prompt(other, tokenizer, room) and len(prompt) <= room
        answer = len(found.tokens) - int(found.marks.sum())  # its tokens begin here
        whole, tail = found.tokens[:answer].tolist(), found.tail - int(found.marks.sum())
        assert question_prompt(asked, tokenizer, 10_000) == whole
        if room > tail:
            cut = [*whole[: room - tail], *whole[answer - tail :]] if answer > room else whole
            assert prompt == cut and tokenizer.decode(prompt).endswith("Answer:")
        reached = tokenizer.decode(found.tokens[: found.reach + 1])
        assert "ANSWER" in reached

    check()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({}, ("'answers' is missing",)),
        (squad_item("A cat.").value, ("no answer",)),
        (squad_item("A cat.", "dog").value, ("'dog'", "context")),
        ({**squad_item("A cat.", "cat").value, "id": None, "context": 3}, ("SQuAD",)),
    ],
)
def test_a_bad_question_is_named_with_its_place(record, words):
    with refused("s.json, question q1", *words):
        rows_of(Item("s.json, question q1", record), SQUAD)


def article(title: str, count: int) -> dict[str, Any]:
    context = f"In {title} there lived a king. He had many sons and one cat."
    answers = [{"text": "one cat", "answer_start": context.index("one cat")}]
    qas = [
        {"id": f"{title}-{i}", "question": f"Who {i}?", "answers": answers} for i in range(count)
    ]
    return {"title": title, "paragraphs": [{"context": context, "qas": qas}]}


def write(path: Path, articles: list[dict[str, Any]]) -> Path:
    path.write_text("\ufeff" + json.dumps({"version": "1.1", "data": articles}))
    return path


def test_the_suite_asks_its_own_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "asked.json", [article(f"Land {a}", 3) for a in range(3)])

    def asked(tree: dict[str, Any], **settings: Any) -> list[Question]:
        return eval_questions(Recipe.model_validate({**tree, "eval": settings}))

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a corpus, which is no SQuAD")
    everything = asked({}, squad_file=str(file))
    assert [q.id for q in everything] == [f"Land {a}-{i}" for a in range(3) for i in range(3)]
    text = {"source": "corpus.txt", "eval_source": str(corpus)}
    five, two = (asked({"data": text | {"eval_size": n}}, squad_file=str(file)) for n in (5, 2))
    assert len(five) == 5 and len(two) == 2 and set(two) < set(five) < set(everything)
    absent = {"format": "squad", "source": f"squad:{tmp_path / 'absent.json'}"}
    assert asked({"data": absent}, squad_file=str(file)) == everything
    assert asked({"data": {**absent, "eval_source": f"squad:{file}"}}) == everything
    mine = {"data": {"format": "squad", "source": f"squad:{file}", "val_fraction": 0.3}}
    held = asked(mine)  # one article of three
    assert len(held) == 3 and len({q.group for q in held}) == 1
    with refused("eval.squad_file", "none.json"):
        asked({}, squad_file=str(tmp_path / "none.json"))
    with refused("no questions", "data.val_fraction"):
        asked({"data": {**mine["data"], "val_fraction": 0}})
    with refused("data.eval_source", "squad:FILE.json"):
        asked({"data": {**mine["data"], "eval_source": str(corpus)}})
    write(file, [article("Land", 1), article("Land", 1)])
    with refused("eval.squad_file", "Land-0"):
        asked({}, squad_file=str(file))
    entry = squad_item("A cat.", "cat", title="t")
    source = sources.Source(SQUAD, {}, lambda: iter([entry, Item("bad", {})]))
    monkeypatch.setattr("windlass.evaluation.squad.open_source", lambda spec, notify: source)
    of_the_hub = {"format": "squad", "source": "squad", "on_bad_item": "skip"}
    expected = Question("q1", "What is it?", "A cat.", ("cat",), hash64("t"))
    assert asked({"data": of_the_hub}) == [expected]
    with refused("bad"):
        asked({"data": {**of_the_hub, "on_bad_item": "stop"}})


def test_the_suite_asks_what_training_holds_out_of_each_source(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{s}.json", [article(f"{s}{a}", 3) for a in range(60)]) for s in "ab"
    ]
    names: list[str] = [f"squad:{file}" for file in files]
    recipe = recipe_for(names, tmp_path / "data", format="squad", context=512)
    division = open_data(recipe).division
    assert division is not None
    (held,) = division.val
    hashes = held.field("text").view(np.uint64).tolist()
    assert {q.hash for q in eval_questions(recipe)} == set(hashes)
    for key in ("val_shards", "max_tokens"):
        data = recipe.data.model_copy(update={key: 1})
        with refused(f"data.{key}", "eval.squad_file"):
            eval_questions(recipe.model_copy(update={"data": data}))
