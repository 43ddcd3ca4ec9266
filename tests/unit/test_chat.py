"""Conversations as rows: which tokens count, templates plain and in jinja, bad lines; streaming of the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windlass.data import chat
from windlass.data.chat import Template
from windlass.data.dataset import open_data
from windlass.data.vocabulary import byte_tokenizer
from windlass.errors import UserError
from windlass.evaluation.generate import TextDecoder, in_order
from windlass.recipe import Recipe

BYTES = byte_tokenizer()
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long."},
]
JINJA = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = Template(JINJA, (("eos_token", "<|endoftext|>"),))


def parts(template: Template) -> tuple[str, str]:
    ids, marks = chat.row(TALK, template, BYTES, 500)  # type: ignore[misc]
    return BYTES.decode(ids), BYTES.decode(i for i, m in zip(ids, marks, strict=True) if m)


def test_only_the_answers_and_their_ends_count() -> None:
    whole, counted = parts(Template())
    assert whole.startswith(
        "System: Be kind.\n\nUser: Hi\n\nAssistant: Hello.<|endoftext|>\n\nUser: Bye\n\nAssistant: So"
    )
    assert counted == " Hello.<|endoftext|> So long.<|endoftext|>"
    whole, counted = parts(MARKED)
    assert whole.startswith("<system>Be kind.<|endoftext|><user>Hi<|endoftext|><assistant>Hello.<|endoftext|><user>")
    assert counted == "Hello.<|endoftext|>So long.<|endoftext|>"


@pytest.mark.parametrize("template", [Template(), MARKED])
def test_a_prompt_is_what_comes_before_an_answer_in_training(template: Template) -> None:
    ids, marks = chat.row(TALK, template, BYTES, 500)  # type: ignore[misc]
    second = [t for t in range(1, len(ids)) if marks[t] and not marks[t - 1]][1]
    assert chat.prompt_tokens(TALK[:4], template, BYTES) == ids[:second]


def test_a_conversation_is_cut_at_the_context_and_left_out_where_no_answer_is_left() -> None:
    ids, marks = chat.row(TALK, Template(), BYTES, 60)  # type: ignore[misc]
    assert len(ids) == 61 and any(marks)
    assert chat.row(TALK, Template(), BYTES, 20) is None
    with pytest.raises(UserError, match="too short"):
        chat.rows([TALK], Template(), BYTES, 20)


def test_a_template_that_rewrites_the_past_or_refuses_is_said() -> None:
    with pytest.raises(UserError, match="changes earlier turns"):
        Template("{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}").pieces(TALK)
    with pytest.raises(UserError, match="no system here"):
        Template("{{ raise_exception('no system here') }}").pieces(TALK)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    with pytest.raises(UserError):
        Template("{{ ''.__class__.__mro__[1].__subclasses__() }}").pieces(TALK)


def test_a_template_comes_from_the_tokenizers_directory_and_survives_a_file(tmp_path: Path) -> None:
    config: dict[str, Any] = {"chat_template": "X", "eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = Template.of_directory(tmp_path)
    assert found.source == "X" and dict(found.special) == {"bos_token": "<s>", "eos_token": "</s>"}
    found.save(tmp_path)
    assert Template.of_directory(tmp_path) == found
    (tmp_path / "chat_template.jinja").write_text("Y")
    assert Template.of_directory(tmp_path).source == "Y"
    assert Template.of_directory(tmp_path / "none") == Template()


def test_files_become_training_and_validation_rows(tmp_path: Path) -> None:
    lines = [
        json.dumps({"messages": [*TALK[1:2], {"role": "assistant", "content": f"Answer {i}."}]}) for i in range(10)
    ]
    (tmp_path / "talk.jsonl").write_text("\n".join(lines) + "\n")
    data = {"format": "chat", "source": str(tmp_path / "talk.jsonl"), "val_fraction": 0.2, "dir": str(tmp_path / "d")}
    found = open_data(Recipe.model_validate({"model": {"context": 64}, "data": data}))
    assert (len(found.train), len(found.val or ())) == (8, 2) and found.template == Template()
    tokens, labels = found.train.read(np.array([0]))
    assert BYTES.decode(label for label in labels[0] if label != -100).startswith(" Answer ") and tokens.shape[0] == 1


def talks(path: Path, answers: list[str]) -> Path:
    lines = [{"messages": [*TALK[1:2], {"role": "assistant", "content": answer}]} for answer in answers]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("changed", ["a.jsonl", "b.jsonl"])
def test_a_change_in_any_file_of_a_corpus_is_noticed(changed: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        talks(tmp_path / name, [f"Answer {i} of {name}." for i in range(3)])
    data: dict[str, Any] = {"format": "chat", "source": f"{tmp_path}/*.jsonl", "val_fraction": 0}
    anywhere = Recipe.model_validate({"model": {"context": 64}, "data": data})
    kept = anywhere.with_overrides("data.dir=kept")
    before = open_data(anywhere).fingerprint
    assert open_data(kept).fingerprint == before
    talks(tmp_path / changed, ["Another answer."] * 3)
    assert open_data(anywhere).fingerprint != before
    with pytest.raises(UserError) as caught:
        open_data(kept)
    assert changed in str(caught.value) and "data.dir" in str(caught.value)


def test_conversations_of_a_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    answers = [f"Answer {i}." for i in range(8)]
    file = talks(tmp_path / "talk.jsonl", answers)
    table = datasets.Dataset.from_list([json.loads(line) for line in file.read_text().splitlines()])
    splits = {"train": table, "validation": table.select(range(3))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    data: dict[str, Any] = {"format": "chat", "source": f"hf:{tmp_path / 'set'}", "dir": str(tmp_path / "d")}
    recipe = Recipe.model_validate({"model": {"context": 64}, "data": {**data, "eval_split": "validation"}})
    opened = open_data(recipe)
    assert (len(opened.train), len(opened.val or ())) == (8, 3)
    same = {"format": "chat", "source": str(file), "val_fraction": 0, "dir": str(tmp_path / "f")}
    from_file = open_data(Recipe.model_validate({"model": {"context": 64}, "data": same}))
    for left, right in zip(opened.train.read(np.arange(8)), from_file.train.read(np.arange(8)), strict=True):
        assert np.array_equal(left, right)
    with pytest.raises(UserError, match="'messages'; it has text"):
        datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(tmp_path / "other")
        chat.read(f"hf:{tmp_path / 'other'}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: write"), ("[]", "line 2: write"), ('{"messages": [{"role": "user"}]}', "line 2: write"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "a message has a role"),
        ('{"messages": [{"role": "user", "content": 3}]}', "a message has a role"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no answer of the assistant"),
    ],
)  # fmt: skip
def test_bad_lines_are_named(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": TALK}) + "\n" + line + "\n")
    with pytest.raises(UserError, match=said):
        chat.read(str(tmp_path / "talk.jsonl"))


def test_text_is_shown_when_its_characters_are_whole() -> None:
    decoder, text = TextDecoder(BYTES), "aé🙂b"
    shown = [decoder.add(i) for i in BYTES.encode(text).tolist()]
    assert shown == ["a", "", "é", "", "", "", "🙂", "b"]
    assert decoder.add(0xC3) == "" and decoder.rest() == "\ufffd" and decoder.rest() == ""


def test_texts_made_together_are_shown_one_after_the_other() -> None:
    events = [(0, 97), (1, 98), (2, 99), (1, None), (0, 100), (2, 101), (0, None), (3, None), (2, None)]
    shown = list(in_order(iter(events), BYTES, 4))
    assert [index for index, _ in shown] == sorted(index for index, _ in shown)
    assert ["".join(piece for i, piece in shown if i == text) for text in range(4)] == ["ad", "b", "ce", ""]
    assert shown[-1] == (3, "")  # a text without a token is told too
