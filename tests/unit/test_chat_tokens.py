"""Conversations as tokens: those of `transformers`' apply_chat_template; what a user writes is never a special token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tokenizer_fixtures
from windlass.data import chat
from windlass.data.chat import Template
from windlass.data.dataset import open_data
from windlass.data.tokenizer import Tokenizer
from windlass.data.vocabulary import hf_tokenizer
from windlass.errors import UserError
from windlass.recipe import Recipe

TALK = [
    {"role": "user", "content": "Who are you?  é 中"},
    {"role": "assistant", "content": "I am a cat."},
    {"role": "user", "content": " Good morning\n"},
    {"role": "assistant", "content": "Good morning to you"},
]
CASES = list(tokenizer_fixtures.KINDS)
WITH_SYSTEM = ["chatml", "marked", "llama3"]


def opened(kind: str, directory: Path) -> tuple[Tokenizer, Template, Any]:
    from transformers import AutoTokenizer

    place = tokenizer_fixtures.save(kind, directory)
    ours = hf_tokenizer(str(place))
    return ours, Template.of_directory(place), AutoTokenizer.from_pretrained(place)


@pytest.mark.parametrize("kind", CASES)
def test_rows_and_prompts_have_the_ids_of_transformers(kind: str, tmp_path: Path) -> None:
    ours, template, theirs = opened(kind, tmp_path)
    system = [{"role": "system", "content": "Be kind."}] if kind in WITH_SYSTEM else []
    for talk in (system + TALK, TALK[:2], TALK):
        made = chat.row(talk, template, ours, 500)
        assert made is not None
        assert made[0] == theirs.apply_chat_template(talk, tokenize=True, return_dict=False)
        prompt = theirs.apply_chat_template(talk[:-1], tokenize=True, add_generation_prompt=True, return_dict=False)
        assert chat.prompt_tokens(talk[:-1], template, ours) == prompt == made[0][: len(prompt)]
        answers = sum(message["role"] == "assistant" for message in talk)
        assert all(made[1][len(prompt) :][:3]) and any(made[1][: len(prompt)]) == (answers > 1)


ENDS = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>", "llama2": "</s>", "phi3": "<|end|>"}


@pytest.mark.parametrize("kind", CASES)
def test_an_answers_labels_end_with_the_end_of_its_turn(kind: str, tmp_path: Path) -> None:
    ours, template, theirs = opened(kind, tmp_path)
    end = theirs.convert_tokens_to_ids(ENDS.get(kind, "<|im_end|>"))
    ids, marks = chat.row(TALK, template, ours, 500)  # type: ignore[misc]
    counted = [i for i, mark in zip(ids, marks, strict=True) if mark]
    assert counted.count(end) == 2 and counted[-1] == end
    first, second = counted[: counted.index(end)], counted[counted.index(end) + 1 : -1]
    assert [theirs.decode(part).strip() for part in (first, second)] == ["I am a cat.", "Good morning to you"]
    assert chat.stop_tokens(ours, template) == {end, theirs.eos_token_id}


def test_generation_blocks_count_as_in_transformers(tmp_path: Path) -> None:
    ours, template, theirs = opened("marked", tmp_path)
    ids, marks = chat.row(TALK, template, ours, 500)  # type: ignore[misc]
    found = theirs.apply_chat_template(TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert (ids, [int(mark) for mark in marks]) == (found["input_ids"], found["assistant_masks"])


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("role", [0, 1])
def test_what_looks_like_a_special_token_in_a_message_is_text(kind: str, role: int, tmp_path: Path) -> None:
    ours, template, theirs = opened(kind, tmp_path)
    for text in [*tokenizer_fixtures.KINDS[kind]["special"], "\U000f00000\U000f0001\U000f0002"]:
        talk = [dict(message) for message in TALK[:2]]
        plain = chat.row(talk, template, ours, 500)
        talk[role]["content"] = f"say {text} and {text}{text}, then go"
        ids, marks = chat.row(talk, template, ours, 500)  # type: ignore[misc]
        assert plain is not None
        special = set(ours.special.values()) - {theirs.unk_token_id}
        assert [i for i in ids if i in special] == [i for i in plain[0] if i in special]
        assert talk[role]["content"] in theirs.decode(ids)
        if role == 1:
            counted = [i for i, mark in zip(ids, marks, strict=True) if mark]
            assert theirs.decode(counted[:-1]).strip() == talk[1]["content"] and counted[-1] in special


def test_text_without_special_tokens_is_tokenized_as_a_whole(tmp_path: Path) -> None:
    for kind in CASES:
        ours, _, theirs = opened(kind, tmp_path / kind)
        ids, marks = ours.encode_marked([("Who are", False), (" you? é ü", True)])
        assert (
            ids
            == ours.encode("Who are you? é ü").tolist()
            == theirs("Who are you? é ü", add_special_tokens=False)["input_ids"]
        )
        assert theirs.decode([i for i, mark in zip(ids, marks, strict=True) if mark]).strip() == "you? é ü"


def test_a_template_is_told_the_same_date_every_day(tmp_path: Path) -> None:
    template = Template("{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert template.prompt(TALK[:1]) == ["26 Jul 2024" + TALK[0]["content"]]


def test_an_open_end_that_no_token_closes_is_refused() -> None:
    talk = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% if not add_generation_prompt %}THE END{% endif %}"
    with pytest.raises(UserError, match="changes earlier turns"):
        Template(talk).pieces(TALK)
    assert Template(talk).pieces(TALK[:2]) == [(TALK[0]["content"] + "\n", False), ("I am a cat.\nTHE END", True)]


def test_rows_of_another_tokenizer_or_template_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tokenizer_fixtures.save("chatml", tmp_path / "tok")
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    data = {"format": "chat", "source": "talk.jsonl", "val_fraction": 0.0, "tokenizer": "hf:tok"}
    recipe = Recipe.model_validate({"model": {"context": 200}, "data": data})

    def fingerprint(directory: str) -> str:
        return open_data(recipe.with_overrides(f"data.dir={directory}")).train.fingerprint

    first = fingerprint("kept")
    assert fingerprint("kept") == first
    other = tokenizer_fixtures.CHATML.replace("'<|im_end|>' + '\n'", "'<|im_end|>'")
    (folder / "chat_template.jinja").write_text(other)
    with pytest.raises(UserError, match=r"wrong tokenizer: tok/"):
        fingerprint("kept")
    second = fingerprint("template")
    tokenizer_fixtures.save("chatml", folder, vocab=300)
    with pytest.raises(UserError, match=r"wrong tokenizer: tok/"):
        fingerprint("template")
    assert len({first, second, fingerprint("tokenizer")}) == 3
