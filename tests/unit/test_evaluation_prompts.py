"""Texts of tokenizers of every kind: first tokens, spaces after a prompt, endings, stops."""

import json
from pathlib import Path
from typing import Any

import pytest

import hf_fixtures
import tokenizer_fixtures
from windlass.data import squad
from windlass.data.squad import Question
from windlass.data.tokenizer import Tokenizer, gpt2_tokenizer, hf_tokenizer, load_tokenizer
from windlass.evaluation.generate import in_order, text_after
from windlass.evaluation.likelihood import Item, continuations, read_items
from windlass.evaluation.source import alone, find_source, open_model, stop_tokens
from windlass.recipe import Recipe

KINDS = list(tokenizer_fixtures.KINDS)
STARTS = ["llama3", "gemma", "mistral", "llama2"]


def opened(kind: str, directory: Path) -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    place = tokenizer_fixtures.save(kind, directory)
    return hf_tokenizer(str(place)), AutoTokenizer.from_pretrained(place)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_the_ids_of_transformers_the_first_token_included(kind, tmp_path):
    ours, reference = opened(kind, tmp_path)
    text = "Who are you? é 中"
    assert ours.encode_prompt(text) == ours.encode_with_bos(text) == reference(text)["input_ids"]
    assert list(ours.bos) == ([reference.bos_token_id] if kind in STARTS else [])
    assert ours.encode_prompt("") == (list(ours.bos) or [reference.eos_token_id])
    ours.save(tmp_path / "saved")
    tree = {"data": {"tokenizer": f"hf:{tmp_path}"}, "model": {"kind": "hf", "name": "x"}}
    again = load_tokenizer(Recipe.model_validate(tree), tmp_path / "saved")
    assert again.encode_with_bos(text) == reference(text)["input_ids"]


def test_a_model_of_texts_alone_knows_no_first_token(tmp_path: Path) -> None:
    place = tokenizer_fixtures.save("llama3", tmp_path)

    def load(model: dict[str, Any], **data: str) -> Tokenizer:
        tree = {"model": model, "data": {"tokenizer": f"hf:{place}", **data}}
        return load_tokenizer(Recipe.model_validate(tree))

    model = {"kind": "hf", "name": "x"}
    assert load(model).bos and load({"init_from": "x"}).bos and load({}, format="chat").bos
    ours = load({**model, "from_scratch": True})
    assert ours.bos == () and ours.encode_with_bos("Who") == ours.encode("Who").tolist()
    ours.save(tmp_path / "saved")
    assert hf_tokenizer(str(tmp_path / "saved" / "tokenizer" / "tokenizer.json")).bos == ()


def test_our_gpt_starts_an_empty_prompt_as_the_model_it_was_made_from(tmp_path: Path) -> None:
    """By the BOS of the configuration, which the tokenizer does not write; after a save as well."""
    directory = hf_fixtures.save_tokenizer(["the cat and the dog " * 20], tmp_path / "base")
    (directory / "config.json").write_text(json.dumps({"bos_token_id": 5, "eos_token_id": 0}))
    data = {"tokenizer": f"hf:{directory}"}
    recipe = Recipe.model_validate({"data": data, "model": {"init_from": str(directory)}})
    ours = load_tokenizer(recipe)
    assert ours.encode_prompt("") == [5]
    assert ours.encode_prompt("cat") == ours.encode("cat").tolist()
    assert ours.first == 5
    ours.save(tmp_path / "run")
    assert load_tokenizer(recipe, tmp_path / "run").encode_prompt("") == [5]
    assert hf_tokenizer(str(tmp_path / "run" / "tokenizer")).encode_prompt("") == [5]
    plain = Recipe.model_validate({"data": data})
    assert load_tokenizer(plain, tmp_path / "run").encode_prompt("") == [0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_space_after_a_prompt_is_shown(kind: str, tmp_path: Path) -> None:
    ours, reference = opened(kind, tmp_path)
    prompt, whole = ours.encode_prompt("Who are"), ours.encode_prompt("Who are you? é 中 cat")
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
        assert one.encode_prompt("Hello, é") == one.encode("Hello, é").tolist()
        assert one.encode_prompt("") == [50256]
    for item in read_items(str(data_files / "hellaswag" / "hellaswag_val.jsonl"), limit=1500):
        for row, ending in zip(continuations([item], ours), item.endings, strict=True):
            assert row.context == ours.encode(item.context).tolist()
            assert row.ending == ours.encode(" " + ending).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_questions_begin_and_end_as_texts_of_the_tokenizer_do(kind: str, tmp_path: Path) -> None:
    ours, reference = opened(kind, tmp_path)
    assert reference.pad_token_id is None
    context = "The cat sat on the mat. " * 20 + "The dog ran after Žluťoučký kůň."
    item = Question("q", "Who ran?", context, ("Žluťoučký kůň.",), context.index("Ž"))
    for room in (2000, 150):
        ids, marks, _ = squad.row(item, ours, room)  # type: ignore[misc]
        text = reference.decode(ids[len(ours.bos) : -1])
        assert len(ids) <= room + 1 and text.endswith("Žluťoučký kůň. Answer: Žluťoučký kůň.")
        assert ids == [*reference(text)["input_ids"], reference.eos_token_id]
        answer = [i for i, mark in zip(ids, marks, strict=True) if mark]
        assert reference.decode(answer[:-1]).strip() == "Žluťoučký kůň."
        assert answer[-1] == reference.eos_token_id
        prompt = squad.prompt(item, ours, room)
        assert len(prompt) <= room and prompt[: len(ours.bos)] == list(ours.bos)
        assert reference.decode(prompt).endswith(" Answer:")
    long = Question("long", "who are you " * 300, context, item.answers, item.start)
    assert squad.row(long, ours, 150) is None
    for room in (1, 2, 40):
        prompt = squad.prompt(long, ours, room)
        assert len(prompt) == room and (room < 3 or prompt[: len(ours.bos)] == list(ours.bos))


def test_a_text_ends_where_the_model_and_the_tokenizer_say(tmp_path: Path) -> None:
    place = hf_fixtures.save("llama", tmp_path, vocab_size=1024)
    tokenizer_fixtures.save("llama3", place)
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4, 7]}))
    source = find_source(str(place))
    model = open_model(source, alone("cpu"))
    assert stop_tokens(source, model) == {1, 4, 7}
    (place / "generation_config.json").write_text("{}")
    assert stop_tokens(source, model) == {1, 4}  # the end of a text, and of a turn
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    tokenizer_fixtures.save("llama3", place, vocab=300)  # the model's ids are of another vocabulary
    assert stop_tokens(source, model) == {1, 4}
