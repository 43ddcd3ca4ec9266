"""Conversations as rows: the tokens of `transformers`, which of them count, bad lines, changed
files; streamed text.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenizer_fixtures
from helpers import refused
from windlass.data import chat
from windlass.data.chat import Template
from windlass.data.conversations import Conversation
from windlass.data.conversations import read as read_conversations
from windlass.data.prepare import open_data
from windlass.data.tokenizer import Tokenizer
from windlass.data.vocabulary import byte_tokenizer, hf_tokenizer
from windlass.evaluation.generate import in_order
from windlass.recipe import Recipe

BYTES = byte_tokenizer()
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Who are you?  é 中"},
    {"role": "assistant", "content": "I am a cat."},
    {"role": "user", "content": " Good morning\n"},
    {"role": "assistant", "content": "Good morning to you"},
]
JINJA = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITH_EOS = Template(JINJA, {"eos_token": "<|endoftext|>"})
KINDS = list(tokenizer_fixtures.KINDS)
ENDS = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi3": "<|end|>"}
ENDS |= dict.fromkeys(("mistral", "llama2"), "</s>")


def row(talk: list[Any], template: Template, tokenizer: Tokenizer, context: int = 500) -> Any:
    ids, marks, _ = chat.row(Conversation(talk), template, tokenizer, context)  # type: ignore[misc]
    return ids, marks, [i for i, mark in zip(ids, marks, strict=True) if mark]


def opened(kind: str, directory: Path) -> tuple[Tokenizer, Template, Any]:
    from transformers import AutoTokenizer

    place = tokenizer_fixtures.save(kind, directory)
    theirs = AutoTokenizer.from_pretrained(place)
    return hf_tokenizer(str(place)), Template.of_directory(place), theirs


def test_only_answers_count_and_a_row_is_cut_at_the_context_or_left_out() -> None:
    ids, _, counted = row(TALK, Template(), BYTES)
    start = "System: Be kind.\n\nUser: Who are you?  é 中\n\nAssistant: I am a cat.<|endo"
    assert BYTES.decode(ids).startswith(start)
    assert BYTES.decode(counted) == " I am a cat.<|endoftext|> Good morning to you<|endoftext|>"
    ids, _, counted = row(TALK, WITH_EOS, BYTES)
    start = "<system>Be kind.<|endoftext|><user>Who are you?  é 中<|endoftext|><assista"
    assert BYTES.decode(ids).startswith(start)
    assert BYTES.decode(counted) == "I am a cat.<|endoftext|>Good morning to you<|endoftext|>"
    ids, marks, _ = row(TALK, Template(), BYTES, 70)
    assert len(ids) == 71 and any(marks)
    assert chat.row(Conversation(TALK), Template(), BYTES, 20) is None


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_prompts_have_the_ids_of_transformers_and_answers_their_end(kind, tmp_path):
    ours, template, theirs = opened(kind, tmp_path)
    end = theirs.convert_tokens_to_ids(ENDS.get(kind, "<|im_end|>"))
    assert chat.stop_tokens(ours, template) == {end, theirs.eos_token_id}
    with_system = [TALK] if kind in ("chatml", "marked", "llama3") else []
    for talk in (*with_system, TALK[1:3], TALK[1:]):
        ids, marks, counted = row(talk, template, ours)
        has_marks = kind == "marked"
        whole = theirs.apply_chat_template(talk, return_assistant_tokens_mask=has_marks)
        assert ids == whole["input_ids"]
        assert not has_marks or marks == [*map(bool, whole["assistant_masks"])]
        asked = theirs.apply_chat_template(talk[:-1], add_generation_prompt=True)
        prompt = asked["input_ids"]
        assert chat.prompt_tokens(talk[:-1], template, ours) == prompt == ids[: len(prompt)]
        answers = [message["content"] for message in talk if message["role"] == "assistant"]
        assert all(marks[len(prompt) :][:3]) and any(marks[: len(prompt)]) == (len(answers) > 1)
        assert counted.count(end) == len(answers) and counted[-1] == end
        parts = theirs.decode(counted).split(theirs.decode([end]))[:-1]
        assert [part.strip() for part in parts] == answers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", [0, 1])
def test_what_looks_like_a_special_token_in_a_message_is_text(kind, role, tmp_path):
    ours, template, theirs = opened(kind, tmp_path)
    special = set(ours.special.values()) - {theirs.unk_token_id}
    plain = [i for i in row(TALK[1:3], template, ours)[0] if i in special]
    for text in tokenizer_fixtures.KINDS[kind]["special"]:
        talk = [dict(message) for message in TALK[1:3]]
        talk[role]["content"] = f"say {text} and {text}{text}, then go"
        ids, _, counted = row(talk, template, ours)
        assert [i for i in ids if i in special] == plain
        assert talk[role]["content"] in theirs.decode(ids)
        if role == 1:
            assert theirs.decode(counted[:-1]).strip() == talk[1]["content"]
            assert counted[-1] in special


def test_templates_that_cannot_be_used_are_refused() -> None:
    talk = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% if not add_generation_prompt %}THE END{% endif %}"
    pieces = [(TALK[1]["content"] + "\n", False), ("I am a cat.\nTHE END", True)]
    assert Template(talk).pieces(TALK[1:3], BYTES) == pieces
    changing = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for source, words in [
        (talk, "one answer"),  # nothing closes the earlier answer
        (changing, "one answer"),
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"),  # out of the sandbox
    ]:
        with refused(words):
            Template(source).pieces(TALK[1:], BYTES)


def test_a_template_comes_from_the_tokenizers_directory_and_survives_a_file(tmp_path: Path) -> None:
    config = {"chat_template": "X", "eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = Template.of_directory(tmp_path)
    assert template == Template("X", {"bos_token": "<s>", "eos_token": "</s>"})
    template.save(tmp_path)
    assert Template.of_directory(tmp_path) == template
    (tmp_path / "chat_template.jinja").write_text("Y")
    assert Template.of_directory(tmp_path).source == "Y"
    assert Template.of_directory(tmp_path / "none") == Template()
    dated = Template("{{ strftime_now('%d %b %Y') }}{{ messages[0]['content'] }}")
    assert dated.render(TALK[:1], BYTES, ask=True) == "26 Jul 2024Be kind."  # on every day


# -- files


def talks(path: Path, answers: list[str]) -> Path:
    replies = [{"role": "assistant", "content": answer} for answer in answers]
    path.write_text("".join(json.dumps({"messages": [TALK[1], x]}) + "\n" for x in replies))
    return path


def recipe(source: Path | str, **data: Any) -> Recipe:
    tree = {"format": "chat", "source": str(source), "val_fraction": 0, **data}
    return Recipe.model_validate({"model": {"context": 200}, "data": tree})


def test_files_and_data_sets_become_training_and_validation_rows(tmp_path: Path) -> None:
    file = talks(tmp_path / "talk.jsonl", [f"Answer {i}." for i in range(10)])
    data = open_data(recipe(file, val_fraction=0.2, dir=str(tmp_path / "d")))
    assert (len(data.train), len(data.val or ())) == (8, 2) and data.template == Template()
    tokens, labels, *_ = data.train.read(np.array([0]))
    assert BYTES.decode(label for label in labels[0] if label != -100).startswith(" Answer ")
    assert tokens.shape[0] == 1
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    table = datasets.Dataset.from_list([json.loads(line) for line in file.read_text().splitlines()])
    splits = datasets.DatasetDict({"train": table, "validation": table.select(range(3))})
    splits.save_to_disk(place := tmp_path / "set")
    data = open_data(recipe(f"hf:{place}", eval_split="validation", dir=str(tmp_path / "e")))
    assert (len(data.train), len(data.val or ())) == (10, 3)
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(tmp_path / "other")
    with refused("has 'text'", "messages"):
        read_conversations([f"hf:{tmp_path / 'other'}"])


@pytest.mark.parametrize("changed", ["a.jsonl", "b.jsonl"])
def test_a_change_in_any_file_of_a_corpus_is_noticed(changed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        talks(tmp_path / name, [f"Answer {i} of {name}." for i in range(3)])
    anywhere, kept = recipe(f"{tmp_path}/*.jsonl"), recipe(f"{tmp_path}/*.jsonl", dir="kept")
    before = open_data(anywhere).fingerprint
    assert open_data(kept).fingerprint == before
    talks(tmp_path / changed, ["Another answer."] * 3)
    assert open_data(anywhere).fingerprint != before
    with refused(changed, "data.dir"):
        open_data(kept)


def test_rows_of_another_template_are_not_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    template = tokenizer_fixtures.save("chatml", tmp_path / "tok") / "chat_template.jinja"
    talks(tmp_path / "talk.jsonl", ["I am a cat."])
    first, second = (recipe("talk.jsonl", tokenizer="hf:tok", dir=name) for name in ("a", "b"))
    before = open_data(first).fingerprint
    template.write_text(tokenizer_fixtures.CHATML.replace("'<|im_end|>' + '\n'", "'<|im_end|>'"))
    with refused("tokenizer_files", "tok/chat_template.jinja", "data.dir"):
        open_data(first)
    assert open_data(second).fingerprint != before


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "write"),
        ('{"messages": [{"role": "user"}]}', "'content'"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "role"),
        ('{"messages": [{"role": "user", "content": 3}]}', "content"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "assistant"),
    ],
)
def test_bad_lines_are_named(line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": TALK}) + "\n" + line + "\n")
    with refused("talk.jsonl, line 2", words):
        read_conversations([str(tmp_path / "talk.jsonl")])


# -- streams


def test_texts_are_shown_one_after_the_other_as_soon_as_their_characters_are_whole() -> None:
    events = [(0, token) for token in [*BYTES.encode("aé🙂b").tolist(), 0xC3, None]]
    assert [piece for _, piece in in_order(events, BYTES, 1)] == ["a", "é", "🙂", "b", "\ufffd"]
    events = [(0, 97), (1, 98), (2, 99), (1, None), (0, 100)]
    events += [(2, 101), (0, None), (3, None), (2, None)]
    shown = list(in_order(iter(events), BYTES, 4))
    assert [index for index, _ in shown] == sorted(index for index, _ in shown)
    texts = ["".join(piece for i, piece in shown if i == text) for text in range(4)]
    assert texts == ["ad", "b", "ce", ""]
    assert shown[-1] == (3, "")  # a text without a token is told too
