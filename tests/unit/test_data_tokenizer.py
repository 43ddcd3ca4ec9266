"""Tokenizers: round trips, published ids, what is saved is what is loaded, and nothing is taken for
what it is not.
"""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenizer_fixtures
from helpers import refused
from windlass.data import tokenizer as tokenizer_module
from windlass.data.chat import Template
from windlass.data.tokenizer import (
    END_OF_TEXT,
    byte_tokenizer,
    char_tokenizer,
    cut_at_lines,
    load_tokenizer,
    named_tokenizer,
    train_bpe,
)
from windlass.interop.export import save_tokenizer
from windlass.recipe import Recipe

TEXT = st.text(st.characters(codec="utf-8"), max_size=200)
SAMPLE = (
    "It's 3 o'clock.\n\n\tdef f(x):  return x**2   # \u00e4\u00f6\u00fc \u4e2d\u6587 🙂\r\n" * 3
)


def load(setting, directory=None):
    return load_tokenizer(Recipe.model_validate({"data": {"tokenizer": setting}}), directory)


@pytest.fixture(scope="module")
def gpt2(data_files):
    return named_tokenizer(f"gpt2:{data_files / 'gpt2'}")


@given(TEXT.filter(bool))
def test_bytes_and_characters_round_trip(text):
    ids = byte_tokenizer().encode(text)
    assert ids.dtype == np.int64
    assert ids.tolist() == list(text.encode())
    assert byte_tokenizer().decode(ids) == text
    tokenizer = char_tokenizer(text, with_eot=False)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab == len(set(text)) and int(ids.max()) == tokenizer.vocab - 1


def test_an_empty_prompt_of_characters_is_in_the_vocabulary():
    """A line feed if the corpus has one, else its first character; the end-of-text token comes
    before both.
    """
    for text, with_eot, first in (
        ("ba\nna", False, 0),
        ("banana", False, 0),
        ("\tb\n", False, 1),
        ("banana", True, 3),
    ):
        assert char_tokenizer(text, with_eot).encode_prompt("") == [first]


def test_bytes_and_characters_are_numbered_by_code_point_and_unknown_ones_named():
    tokenizer = byte_tokenizer()
    assert (tokenizer.vocab, tokenizer.eot) == (257, 256)
    assert tokenizer.decode([65, 256, 66, 0xFF, 300]) == f"A{END_OF_TEXT}B\ufffd\ufffd"
    # half a surrogate pair, as JSON can hold it
    assert tokenizer.encode("\ud800x").tolist() == list(b"?x")
    tokenizer = char_tokenizer("banana", with_eot=True)
    assert tokenizer.encode("nab").tolist() == [2, 0, 1]
    assert (tokenizer.vocab, tokenizer.eot) == (4, 3)
    assert tokenizer.decode([0, 3, 9]) == f"a{END_OF_TEXT}\ufffd"
    with refused(repr("\U0001f642")):
        tokenizer.encode("ba\U0001f642")
    with refused("at least one character"):
        char_tokenizer("", with_eot=False)


def test_gpt2_has_its_published_ids_and_those_of_an_independent_tokenizer_file(gpt2, data_files):
    from tokenizers import Tokenizer

    assert (gpt2.vocab, gpt2.eot) == (50257, 50256)
    published = [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert gpt2.encode("Hello, I'm a language model,").tolist() == published
    assert gpt2.decode([15496, 11, 50256, 60000]) == f"Hello,{END_OF_TEXT}\ufffd"
    # what looks like the end of a text in a text is text
    assert int(gpt2.encode(f"a{END_OF_TEXT}b").max()) < 50256
    other = Tokenizer.from_file(str(data_files / "gpt2" / "gpt2-tokenizer.json"))
    book = (data_files / "gutenberg" / "1661.txt").read_text(encoding="utf-8")
    for text in (SAMPLE, book[:200_000], "  \n\n  x  "):
        assert gpt2.encode(text).tolist() == gpt2.inner.encode(text).ids == other.encode(text).ids
        assert gpt2.decode(gpt2.encode(text)) == text
    ours = named_tokenizer(f"hf:{data_files / 'gpt2' / 'gpt2-tokenizer.json'}")
    assert (ours.vocab, ours.eot, ours.fingerprint) == (50257, 50256, gpt2.fingerprint)
    text = f"{SAMPLE}{END_OF_TEXT} \ud800"
    assert ours.encode(text).tolist() == gpt2.encode(text).tolist()
    # long runs once overran the library
    for text in (" " * 1_500_000 + "x", "\n" * 1_200_000, "a b\n" * 300_000):
        assert gpt2.decode(gpt2.encode(text)) == text


@given(st.text(st.sampled_from("ab1 '!\n\t\r\u00e9\u00a0s"), max_size=60))
def test_cutting_a_long_text_changes_no_token(gpt2, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "LONGEST_PIECE", 12)
        parts, cut = list(cut_at_lines(text)), gpt2.encode(text).tolist()
    assert "".join(parts) == text
    places = np.cumsum([len(p) for p in parts])[:-1].tolist()
    if all(re.fullmatch(r"\S\n\S", text[p - 2 : p + 1]) for p in places):  # at lines' ends
        assert cut == gpt2.encode(text).tolist()


@pytest.mark.parametrize("kind", ["byte", "char", "exported", *tokenizer_fixtures.KINDS])
def test_bytes_of_each_token_add_up(kind, tmp_path):
    text = " é ü ö \u00ff über naïve \u4e2d\u6587 \U0001f642 Žluťoučký<0x41>\u0120\u2581 x"
    spec = tokenizer_fixtures.KINDS.get(kind, {})
    if spec.get("pieces", "bytes") != "bytes":
        text = text.replace("\u2581", "")
    if spec:
        tokenizer_fixtures.save(kind, tmp_path)
    tokenizer = byte_tokenizer() if kind == "byte" else char_tokenizer(text, True)
    if kind == "exported":
        save_tokenizer(tokenizer, Template(), 64, tmp_path)
    if spec or kind == "exported":
        tokenizer = named_tokenizer(f"hf:{tmp_path}")
    ids, lengths = tokenizer.encode(text), tokenizer.byte_lengths()
    before = len(" ") if spec.get("pieces") == "prepend" else 0
    assert lengths.shape == (tokenizer.vocab,)
    assert not lengths[list(tokenizer.special.values())].any()
    assert int(lengths[ids].sum()) == len(text.encode()) + before
    assert tokenizer.decode(ids) == (text[1:] if spec.get("pieces") == "first" else text)


@pytest.mark.parametrize("kind", ["byte", "char", "gpt2", "bpe", "hf"])
def test_saved_is_loaded_and_wrong_changed_or_damaged_is_refused(kind, tmp_path, data_files):
    gpt2 = data_files / "gpt2"
    settings = {"gpt2": f"gpt2:{gpt2}", "hf": f"hf:{gpt2 / 'gpt2-tokenizer.json'}"}
    made = {"char": lambda: char_tokenizer(SAMPLE, True), "bpe": lambda: train_bpe([SAMPLE], 300)}
    setting = settings.get(kind, kind)
    tokenizer = made[kind]() if kind in made else named_tokenizer(setting)
    tokenizer.save(tmp_path)
    loaded = load(setting, tmp_path)
    assert loaded.describe() == tokenizer.describe()
    assert loaded.encode(SAMPLE).tolist() == tokenizer.encode(SAMPLE).tolist()
    description = tmp_path / "tokenizer" / "windlass.json"
    file = tmp_path / "tokenizer" / "tokenizer.json"
    whole, raw = description.read_text(), file.read_bytes()
    for text in (json.dumps({**json.loads(whole), "fingerprint": "0" * 64}), "{"):
        description.write_text(text)
        with refused(str(tmp_path), "prepare the data again"):
            load(setting, tmp_path)
    description.write_text(whole)
    for damaged in (raw[: len(raw) // 2], b""):
        file.write_bytes(damaged)
        with refused("tokenizer.json"):
            load(setting, tmp_path)


def test_a_tokenizer_that_needs_the_corpus(tmp_path):
    for setting in ("char", "bpe"):
        with refused("data.tokenizer", "prepare the data first"):
            load(setting, tmp_path)
        with refused("data.tokenizer", "shards:"):  # shards that others wrote come without one
            load(setting)
