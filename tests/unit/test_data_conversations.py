"""The shapes in which conversations are written down elsewhere: what becomes of them, and what is
said about a bad item.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from data_fixtures import counted, recipe_for

import tokenizer_fixtures
from helpers import refused, windlass
from windlass.data import chat
from windlass.data.conversations import Conversation, read
from windlass.data.describe import describe, lines, warnings
from windlass.data.open import open_data
from windlass.data.tokenizer import byte_tokenizer, hf_tokenizer

BYTES = byte_tokenizer()
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A cat."},
]
PARTS = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
SHAREGPT = [
    {"from": "system", "value": "Be kind."},
    {"from": "human", "value": "Who are you?"},
    {"from": "gpt", "value": "A cat."},
]
SAME: dict[str, Any] = {
    "messages": {"messages": TALK},
    "parts": {"messages": [{**TALK[0], "content": PARTS}, *TALK[1:]]},
    "sharegpt": {"id": "7", "conversations": SHAREGPT},
    "sharegpt-roles": {"conversations": TALK},
    "developer": {"messages": [{**TALK[0], "role": "developer"}, *TALK[1:]]},
    "alpaca": {
        "system": "Be kind.",
        "instruction": "Who are you?",
        "input": "",
        "output": "A cat.",
    },
    "trl": {"prompt": TALK[:2], "completion": TALK[2:]},
}
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


@pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz"])
@pytest.mark.parametrize("shape", SAME)
def test_every_shape_gives_the_same_messages(shape: str, ending: str, tmp_path: Path) -> None:
    path, items = tmp_path / f"talk.{ending}", [SAME[shape]] * 3
    lines = "".join(json.dumps(item) + "\r\n" for item in items)
    raw = (json.dumps(items, indent=1) if ending == "json" else lines).encode()
    path.write_bytes(gzip.compress(raw) if ending.endswith("gz") else b"\xef\xbb\xbf" + raw)
    said: list[str] = []
    found = read([str(path)], notify=said.append)
    assert [item.messages for item in found] == [TALK] * 3
    names = {"alpaca": "Alpaca", "trl": "prompt and completion"}
    assert names.get(shape, "ShareGPT" if "share" in shape else "messages") in said[0]
    assert "3 conversations" in said[0]


def test_alpaca_input_follows_its_instruction_and_a_completion_is_not_a_turn(tmp_path):
    (tmp_path / "a.json").write_text('[{"instruction": "Add.", "input": "1 2", "output": "3"}]')
    [item] = read([str(tmp_path / "a.json")])
    assert item.messages[0] == {"role": "user", "content": "Add.\n\n1 2"}
    (tmp_path / "p.jsonl").write_text('{"prompt": "The sky is", "completion": " blue."}\n')
    [item] = read([str(tmp_path / "p.jsonl")])
    row = chat.row(item, chat.Template(), BYTES, 100)
    assert row is not None and BYTES.decode(row.tokens) == "The sky is blue.<|endoftext|>"
    assert counted(BYTES, row.tokens, row.marks) == " blue.<|endoftext|>"


def test_several_files_and_shapes_are_one_data_set_and_the_log_names_them(tmp_path, capsys):
    files = [tmp_path / f"{shape}.jsonl" for shape in ("alpaca", "sharegpt", "messages")]
    for file in files:
        file.write_text((json.dumps(SAME[file.stem]) + "\n") * 4)
    sources = list(map(str, files))
    data = open_data(recipe_for(sources, tmp_path / "data", format="chat", context=100))
    assert len(data.train) + len(data.val or ()) == 12
    err = capsys.readouterr().err
    assert "4 conversations (Alpaca)" in err and "4 conversations (ShareGPT)" in err
    data = open_data(recipe_for(tmp_path, tmp_path / "again", format="chat", context=100))
    assert len(data.train) + len(data.val or ()) == 12
    assert "in 3 files: alpaca.jsonl, messages.jsonl, sharegpt.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        (
            [SHAREGPT[1], {"frm": "gpt", "value": "x"}],
            ("turn 2 has no", "'frm', 'value'", '{"from": "human"'),
        ),
        ([{"from": "bot", "value": "x"}], ("turn 1", "'bot'", "human", "gpt", "assistant")),
        ([{**SHAREGPT[1], "train": True}, SHAREGPT[2]], ("turn 1", "user", "train")),
        ([SHAREGPT[1], {**SHAREGPT[2], "weight": 0.5}], ("turn 2", "0.5", "0 or 1")),
        ([SHAREGPT[1], {**SHAREGPT[2], "train": "no"}], ("turn 2", "'no'", "true or false")),
        (SHAREGPT[:2], ("no answer",)),
        ("text", ("a list of turns, not text",)),
        (["text"], ("turn 1 is text",)),
        ({"messages": TALK}, ("'conversations'", "is missing")),
        (1, ("ShareGPT",)),
    ],
)
def test_a_bad_item_is_named_with_its_line_and_what_is_expected(turns, words, tmp_path):
    good = json.dumps({"conversations": SHAREGPT}) + "\n"
    item = {"conversations": turns} if isinstance(turns, list | str) else turns
    (tmp_path / "talk.jsonl").write_text(good * 6 + json.dumps(item) + "\n" + good)
    with refused("talk.jsonl, line 7", "the shape ShareGPT", *words):
        read([str(tmp_path / "talk.jsonl")])


def test_files_that_hold_no_conversations(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for content, words in (
        (b"", ("no conversation",)),
        (b"[1]", ("line 1", "the item is a list")),
        (b'{"text": "x"}', ("line 1", "'text'", "messages", "instruction", "completion")),
        (b'{"messages": 1}\n{', ("line 1", "a list of turns, not a number")),
        (b"\n\n{", ("line 3", "not JSON", ".jsonl")),
        ('{"é": 1}'.encode("latin1"), ("line 1", "UTF-8", "iconv")),
    ):
        path.write_bytes(content)
        with refused("x.jsonl", *words):
            read([str(path)])
    (tmp_path / "x.json").write_text('[{"messages": [')
    with refused("x.json is not JSON", "array"):
        read([str(tmp_path / "x.json")])
    with refused("there is no file a.jsonl,b.jsonl", 'data.source=["a.jsonl", "b.jsonl"]'):
        read(["a.jsonl,b.jsonl"])


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
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"messages": as_openai, "tools": json.dumps(TOOLS)}) + "\n")
    [item] = read([str(path)])
    ours, template = hf_tokenizer(str(place)), chat.Template.of_directory(place)
    row = chat.row(item, template, ours, 900)
    assert row is not None
    theirs = AutoTokenizer.from_pretrained(place)
    # transformers reads a special token's text in a message as that token, and we as text
    plain = json.loads(json.dumps(TOOL_TALK).replace(" <|im_end|>", " x"))
    expected = theirs.apply_chat_template(plain, tools=TOOLS, return_dict=False)
    same = chat.row(Conversation(plain, tools=TOOLS), template, ours, 900)
    assert same is not None and same.tokens == expected
    call = f"<|call|>{json.dumps(CALL)}<|call|>"
    learned = counted(ours, row.tokens, row.marks)
    assert learned == f"{call}<|im_end|>I said hello.<|im_end|>"
    # the system's, the user's, ...: one a turn
    assert sum(i == ours.special["<|im_end|>"] for i in row.tokens) == 5
    with refused("tools.jsonl, line 1", "data.tokenizer"):
        chat.row(item, chat.Template(), BYTES, 900)


TWO = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "a wrong answer"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "a right answer"},
]


@pytest.mark.parametrize("kind", ["plain", "chatml", "marked"])
@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}])
def test_an_answer_of_weight_0_or_an_empty_one_does_not_count(kind, key, tmp_path):
    """With the templates that mark answers, and with those whose answers are looked for."""
    template, tokenizer, end = chat.Template(), BYTES, "<|endoftext|>"
    if kind != "plain":
        place, end = tokenizer_fixtures.save(kind, tmp_path / "tok"), "<|im_end|>"
        template, tokenizer = chat.Template.of_directory(place), hf_tokenizer(str(place))
    path = tmp_path / "talk.jsonl"
    first, last = [*TWO[:1], {**TWO[1], **key}, *TWO[2:]], [*TWO[:3], {**TWO[3], **key}]
    empty = [*TWO[:3], {**TWO[3], "content": " "}]
    talks = [TWO, first, last, empty, [*TWO[:1], {**TWO[1], **key}]]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    items = read([str(path)])
    rows: list[Any] = [chat.row(item, template, tokenizer, 500) for item in items]
    both, one, other, without = (counted(tokenizer, row.tokens, row.marks) for row in rows[:4])
    assert both.count(end) == 2 and "wrong" in both and "right" in both
    assert one.count(end) == 1 and "wrong" not in one and "right" in one
    assert other == without and "right" not in other and rows[4] is None
    assert rows[0].tokens == rows[1].tokens  # the template does not see the key
    assert [item.remarks for item in items[:3]] == [[]] * 3
    assert "talk.jsonl, line 4, turn 4" in items[3].remarks[0]


def test_items_that_are_cut_or_left_out_are_named_with_their_lines(tmp_path, capsys):
    talks = [
        TALK[1:],
        [TALK[1], {**TALK[2], "content": "A cat. " * 30}],
        [TALK[1], {**TALK[2], "content": ""}],
    ]
    texts = [json.dumps({"messages": talk}) for talk in [*talks, *[TALK[1:]] * 20]]
    (tmp_path / "talk.jsonl").write_text("\n".join(texts) + "\n")
    (tmp_path / "pair.jsonl").write_text('{"prompt": "a", "completion": " "}\n')
    sources = [str(tmp_path / name) for name in ("talk.jsonl", "pair.jsonl")]
    open_data(recipe_for(sources, tmp_path / "data", format="chat", context=60))
    remarks = (tmp_path / "data" / "remarks.txt").read_text().splitlines()
    err = capsys.readouterr().err
    assert len(remarks) == 4 and all(remark in err for remark in remarks)
    by_place = {remark.rpartition("/")[2].split(":")[0]: remark for remark in remarks}
    assert "tokens lost" in by_place["talk.jsonl, line 2"]
    assert "model.context = 60" in by_place["talk.jsonl, line 2"]
    assert "left out" in by_place["talk.jsonl, line 3"]
    assert "empty" in by_place["talk.jsonl, line 3, turn 2"]
    assert "left out" in by_place["pair.jsonl, line 1"]


def test_the_template_is_named_and_a_makeshift_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": TALK[1:]}) + "\n") * 4)
    (tmp_path / "pair.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    place = tokenizer_fixtures.save("chatml", tmp_path / "tok")
    bare = tokenizer_fixtures.save("chatml", tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')

    def facts(name: str, tokenizer: str) -> Any:
        data = {"format": "chat", "context": 99, "tokenizer": tokenizer}
        directory = tmp_path / f"{name}-{Path(tokenizer).name}"
        return describe(open_data(recipe_for(tmp_path / f"{name}.jsonl", directory, **data)))

    own, other = facts("talk", f"hf:{place}"), facts("talk", f"hf:{bare}")
    assert str(place) in lines(own, 99)["template"] and warnings(own) == []
    assert "User:" in lines(other, 99)["template"] and str(bare) in lines(other, 99)["template"]
    assert any("User:" in text and str(bare) in text for text in warnings(other))
    scratch = facts("talk", "byte")
    assert "User:" in lines(scratch, 99)["template"] and warnings(scratch) == []
    assert "User:" not in lines(facts("pair", f"hf:{bare}"), 99)["template"]


def test_prepare_shows_a_row_with_what_counts_marked(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 4)
    places = [f"data.source={tmp_path / 'talk.jsonl'}", f"data.dir={tmp_path / 'data'}"]
    settings = [*places, "data.format=chat", "data.max_tokens=0"]
    printed = windlass("prepare", "quickstart", *settings).stdout
    assert "User: Who are you?" in printed
    assert "Assistant:\u27e6 A cat.<|endoftext|>\u27e7" in printed
