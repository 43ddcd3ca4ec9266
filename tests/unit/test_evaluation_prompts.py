"""Texts of tokenizers of every kind: first tokens, spaces after a prompt, endings, stops."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hf_fixtures
import tokenizer_fixtures
from windlass.data.chat import stop_tokens
from windlass.data.items import Question, question_prompt
from windlass.data.tokenizer import Tokenizer
from windlass.data.tokenizer_kinds import gpt2_tokenizer, hf_tokenizer
from windlass.evaluation.generate import in_order, text_after
from windlass.evaluation.hellaswag import Item, continuations, read_items
from windlass.evaluation.source import find_source

KINDS = list(tokenizer_fixtures.KINDS)


def opened(kind: str, directory: Path) -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    place = tokenizer_fixtures.save(kind, directory)
    return hf_tokenizer(str(place)), AutoTokenizer.from_pretrained(place)


@pytest.mark.parametrize("kind", KINDS)
def test_the_space_after_a_prompt_is_shown(kind: str, tmp_path: Path) -> None:
    ours, reference = opened(kind, tmp_path)
    prompt, whole = ours.prompt("Who are"), ours.prompt("Who are you? é 中 cat")
    rest = whole[len(prompt) :]
    assert whole[: len(prompt)] == prompt
    expected = reference.decode(whole)[len(reference.decode(prompt)) :]
    assert text_after(ours, prompt, rest) == expected == " you? é 中 cat"
    events = [(0, token) for token in [*rest, None]]
    assert "".join(piece for _, piece in in_order(events, ours, 1, after=prompt)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_an_ending_follows_its_context_in_one_text(kind: str, tmp_path: Path) -> None:
    ours, reference = opened(kind, tmp_path)
    item = Item("The cat sat on the mat, and", ("the dog ran after the cat.", "who are you?"), 0)
    for row, ending in zip(continuations([item], ours), item.endings, strict=True):
        assert row.context == reference(item.context)["input_ids"]
        assert [*row.context, *row.ending] == reference(f"{item.context} {ending}")["input_ids"]
    for ending in ("x", " x"):  # glued to a word that changes: the prompt keeps its tokens
        ids, before = ours.encode_pair("Who are you the ca", ending)
        assert ids[:before] == reference("Who are you the ca")["input_ids"]
        assert reference.decode(ids).endswith("Who are you the ca" + ending)


def test_gpt2_puts_nothing_before_a_text_and_its_endings_are_those_of_tokenizing_apart(data_files):
    ours = gpt2_tokenizer(str(data_files / "gpt2"))
    for one in (ours, hf_tokenizer(str(data_files / "gpt2" / "gpt2-tokenizer.json"))):
        assert one.prompt("Hello, é") == one.encode("Hello, é").tolist()
        assert one.prompt("") == [50256]
    for item in read_items(str(data_files / "hellaswag" / "hellaswag_val.jsonl"), limit=1500):
        for row, ending in zip(continuations([item], ours), item.endings, strict=True):
            assert row.context == ours.encode(item.context).tolist()
            assert row.ending == ours.encode(" " + ending).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_questions_prompt_begins_as_a_text_and_keeps_its_end(kind: str, tmp_path: Path) -> None:
    ours, reference = opened(kind, tmp_path)
    context = "The cat sat on the mat. " * 20 + "The dog ran."
    item = Question("q", "Who ran?", context, ("The dog",), 0)
    text = f"Question: Who ran? Context: {context} Answer:"
    assert question_prompt(item, ours, 2000) == reference(text)["input_ids"]
    for room in (40, 150):
        prompt = question_prompt(item, ours, room)
        assert len(prompt) == room and prompt[: len(ours.begin)] == list(ours.begin)
        assert reference.decode(prompt).endswith("Answer:")
    assert all(len(question_prompt(item, ours, room)) == room for room in (1, 2))


def test_a_text_ends_where_the_model_and_the_tokenizer_say(tmp_path: Path) -> None:
    place = hf_fixtures.save("llama", tmp_path / "model", vocab_size=1024)
    tokenizer_fixtures.save("llama3", place)

    def ends(name: Path) -> frozenset[int]:
        source = find_source(str(name))
        return stop_tokens(source.tokenizer, source.template)

    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4, 7, 10**6]}))
    assert ends(place) == {1, 4, 7}
    adapter = tokenizer_fixtures.save("llama3", tmp_path / "adapter")
    peft = {"peft_type": "LORA", "base_model_name_or_path": str(place), "r": 2, "lora_alpha": 2}
    peft |= {"target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(peft))
    save_file({"q_proj.lora_A.weight": torch.zeros(2, 2)}, adapter / "adapter_model.safetensors")
    assert ends(adapter) == {1, 4, 7}  # from beside the model
    tokenizer_fixtures.save(
        "llama3", adapter, vocab=350
    )  # the model's ids are another vocabulary's
    assert ends(adapter) == {1, 4}
    (place / "generation_config.json").write_text("{}")
    assert ends(place) == {1, 4}  # the end of a text, and of a turn
