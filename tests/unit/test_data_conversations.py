"""The shapes in which conversations are written down elsewhere: what becomes of them, and what is
said about a bad item.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from data_fixtures import recipe_for

import tokenizer_fixtures
from helpers import refused, windlass
from windlass.data import chat
from windlass.data.conversations import Conversation, read
from windlass.data.facts import describe, lines, warnings
from windlass.data.prepare import open_data
from windlass.data.vocabulary import byte_tokenizer, hf_tokenizer

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A cat."},
]
PARTS = [
    {**TALK[0], "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
    *TALK[1:],
]
SHAREGPT = [
    {"from": "system", "value": "Be kind."},
    {"from": "human", "value": "Who are you?"},
    {"from": "gpt", "value": "A cat."},
]
SAME: dict[str, Any] = {
    "messages": {"messages": TALK},
    "parts": {"messages": PARTS},
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
TOOL_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Say hello <|im_end|>"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "hello", "arguments": {"say": "a cat <|im_end|>"}},
            }
        ],
    },
    {"role": "tool", "name": "hello", "content": "hello cat"},
    {"role": "assistant", "content": "I said hello."},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "hello", "parameters": {"type": "object", "properties": {}}},
    }
]
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
    text = (
        json.dumps(items, indent=1)
        if ending == "json"
        else "".join(json.dumps(item) + "\r\n" for item in items)
    )
    path.write_bytes(
        gzip.compress(text.encode()) if ending.endswith("gz") else b"\xef\xbb\xbf" + text.encode()
    )
    said: list[str] = []
    found = read([str(path)], notify=said.append)
    assert [item.messages for item in found] == [TALK] * 3
    names = {"alpaca": "Alpaca", "trl": "prompt and completion"}
    assert names.get(shape, "ShareGPT" if "share" in shape else "messages") in said[0]
    assert "3 conversations" in said[0]


def test_alpaca_input_follows_its_instruction_and_a_completion_is_not_a_turn(tmp_path):
    (tmp_path / "a.json").write_text(
        json.dumps([{"instruction": "Add.", "input": "1 2", "output": "3"}])
    )
    assert read([str(tmp_path / "a.json")])[0].messages[0] == {
        "role": "user",
        "content": "Add.\n\n1 2",
    }
    (tmp_path / "p.jsonl").write_text('{"prompt": "The sky is", "completion": " blue."}\n')
    [item] = read([str(tmp_path / "p.jsonl")])
    tokenizer = byte_tokenizer()
    row = chat.row(item, chat.Template(), tokenizer, 100)
    assert row is not None and tokenizer.decode(row.tokens) == "The sky is blue.<|endoftext|>"
    assert (
        tokenizer.decode(i for i, mark in zip(row.tokens, row.marks, strict=True) if mark)
        == " blue.<|endoftext|>"
    )


def test_several_files_and_shapes_are_one_data_set_and_the_log_names_them(tmp_path, capsys):
    for shape in ("alpaca", "sharegpt", "messages"):
        (tmp_path / f"{shape}.jsonl").write_text((json.dumps(SAME[shape]) + "\n") * 4)
    one = [str(tmp_path / f"{shape}.jsonl") for shape in ("alpaca", "sharegpt", "messages")]
    recipe = recipe_for(one[0], tmp_path / "data", format="chat", context=100)
    data = open_data(recipe.replace(**{"data.source": one}))
    assert len(data.train) + len(data.val or ()) == 12
    err = capsys.readouterr().err
    assert "4 conversations (Alpaca)" in err and "4 conversations (ShareGPT)" in err
    data = open_data(recipe_for(tmp_path, tmp_path / "again", format="chat", context=100))
    assert len(data.train) + len(data.val or ()) == 12
    assert "in 3 files: alpaca.jsonl, messages.jsonl, sharegpt.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (
            {"conversations": [SHAREGPT[1], {"frm": "gpt", "value": "x"}]},
            ("turn 2 has no", "'frm', 'value'", '{"from": "human"'),
        ),
        ({"conversations": [{"from": "robot", "value": "x"}]}, ("'robot'", "human", "gpt")),
        ({"conversations": [{"from": "bot", "value": "x"}]}, ("turn 1", "'bot'", "assistant")),
        (
            {"conversations": [{**SHAREGPT[1], "train": True}, SHAREGPT[2]]},
            ("turn 1", "user", "train"),
        ),
        (
            {"conversations": [SHAREGPT[1], {**SHAREGPT[2], "weight": 0.5}]},
            ("turn 2", "0.5", "0 or 1"),
        ),
        (
            {"conversations": [SHAREGPT[1], {**SHAREGPT[2], "train": "no"}]},
            ("turn 2", "'no'", "true or false"),
        ),
        ({"conversations": SHAREGPT[:2]}, ("no answer",)),
        ({"messages": TALK}, ("'conversations'", "is missing", "ShareGPT")),
        ({"conversations": "text"}, ("a list of turns, not text",)),
        ({"conversations": ["text"]}, ("turn 1 is text",)),
        ([1], ("ShareGPT",)),
    ],
)
def test_a_bad_item_is_named_with_its_line_and_what_is_expected(item, words, tmp_path):
    good = json.dumps({"conversations": SHAREGPT}) + "\n"
    (tmp_path / "talk.jsonl").write_text(good * 6 + json.dumps(item) + "\n" + good)
    with refused("talk.jsonl, line 7", "the shape ShareGPT", *words):
        read([str(tmp_path / "talk.jsonl")])


def test_files_that_hold_no_conversations(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for content, words in (
        (b"", ("no conversation",)),
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
    config = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": TOOL_TEMPLATE})
    )
    (place / "chat_template.jinja").unlink(missing_ok=True)
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
    counted = ours.inner.decode(
        [i for i, mark in zip(row.tokens, row.marks, strict=True) if mark],
        skip_special_tokens=False,
    )
    call = json.dumps({"name": "hello", "arguments": {"say": "a cat <|im_end|>"}})
    assert counted == f"<|call|>{call}<|call|><|im_end|>I said hello.<|im_end|>"
    # the system's, the user's, ...: one a turn
    assert sum(i == ours.special["<|im_end|>"] for i in row.tokens) == 5
    with refused("tools.jsonl, line 1", "data.tokenizer"):
        chat.row(item, chat.Template(), byte_tokenizer(), 900)


TWO = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "a wrong answer"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "a right answer"},
]


def counted(item: Conversation, template: chat.Template, tokenizer: Any) -> str | None:
    row = chat.row(item, template, tokenizer, 500)
    return row and tokenizer.decode(
        i for i, mark in zip(row.tokens, row.marks, strict=True) if mark
    )


@pytest.mark.parametrize("kind", ["plain", "chatml", "marked"])
@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}])
def test_an_answer_of_weight_0_or_an_empty_one_does_not_count(kind, key, tmp_path):
    """With the templates that mark answers, and with those whose answers are looked for."""
    template, tokenizer, end = chat.Template(), byte_tokenizer(), "<|endoftext|>"
    if kind != "plain":
        place = tokenizer_fixtures.save(kind, tmp_path / "tok")
        template = chat.Template.of_directory(place)
        tokenizer = hf_tokenizer(str(place))
        end = "<|im_end|>"
    path = tmp_path / "talk.jsonl"
    first, last = [*TWO[:1], {**TWO[1], **key}, *TWO[2:]], [*TWO[:3], {**TWO[3], **key}]
    empty = [*TWO[:3], {**TWO[3], "content": " "}]
    talks = [TWO, first, last, empty, [*TWO[:1], {**TWO[1], **key}]]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    items = read([str(path)])
    both, one, other, without, nothing = (counted(item, template, tokenizer) for item in items)
    assert both is not None and both.count(end) == 2 and "wrong" in both and "right" in both
    assert one is not None and one.count(end) == 1 and "wrong" not in one and "right" in one
    assert other is not None and other == without and "right" not in other and nothing is None
    whole = [chat.row(items[i], template, tokenizer, 500) for i in (0, 1)]
    # the template does not see the key
    assert whole[0] and whole[1] and whole[0].tokens == whole[1].tokens
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
    recipe = recipe_for("x", tmp_path / "data", format="chat", context=60, val_fraction=0.1)
    open_data(
        recipe.replace(
            {"data.source": [str(tmp_path / "talk.jsonl"), str(tmp_path / "pair.jsonl")]}
        )
    )
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
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "chat_template"})
    )

    def facts(name: str, tokenizer: str) -> Any:
        source = tmp_path / f"{name}.jsonl"
        directory = tmp_path / f"{name}-{Path(tokenizer).name}"
        return describe(
            open_data(recipe_for(source, directory, format="chat", context=99, tokenizer=tokenizer))
        )

    own, other = facts("talk", f"hf:{place}"), facts("talk", f"hf:{bare}")
    assert str(place) in lines(own, 99)["template"] and warnings(own) == []
    assert "User:" in lines(other, 99)["template"] and str(bare) in lines(other, 99)["template"]
    assert any("User:" in text and str(bare) in text for text in warnings(other))
    scratch = facts("talk", "byte")
    assert "User:" in lines(scratch, 99)["template"] and warnings(scratch) == []
    assert "User:" not in lines(facts("pair", f"hf:{bare}"), 99)["template"]


def test_prepare_shows_a_row_with_what_counts_marked(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 4)
    settings = [
        f"data.source={tmp_path / 'talk.jsonl'}",
        "data.format=chat",
        f"data.dir={tmp_path / 'data'}",
        "data.max_tokens=0",
    ]
    printed = windlass("prepare", "quickstart", *settings).stdout
    assert "User: Who are you?" in printed
    assert "Assistant:\u27e6 A cat.<|endoftext|>\u27e7" in printed
