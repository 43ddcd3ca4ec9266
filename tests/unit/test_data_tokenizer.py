"""Tokenizers: round trips, published ids, what is saved is what is loaded, and nothing is taken for
what it is not.
"""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenizer_fixtures
from helpers import refused
from windlass.data import tokenizer_kinds
from windlass.data.chat import Template
from windlass.data.tokenizer import END_OF_TEXT, Tokenizer, stretches
from windlass.data.tokenizer_kinds import (
    bpe_tokenizer,
    byte_tokenizer,
    char_tokenizer,
    hf_tokenizer,
    load_tokenizer,
    named_tokenizer,
    with_tokens,
)
from windlass.interop.export import save_tokenizer

TEXT = st.text(st.characters(codec="utf-8"), max_size=200)
SAMPLE = (
    "It's 3 o'clock.\n\n\tdef f(x):  return x**2   # \u00e4\u00f6\u00fc \u4e2d\u6587 🙂\r\n" * 3
)


@pytest.fixture(scope="module")
def gpt2(data_files):
    return named_tokenizer(f"gpt2:{data_files / 'gpt2'}")


@pytest.fixture
def make(data_files, tmp_path):
    """A function that gives a tokenizer of a kind; learned ones learn from a text."""

    def made(kind: str, text: str = SAMPLE) -> Tokenizer:
        if kind in tokenizer_fixtures.KINDS:
            return hf_tokenizer(str(tokenizer_fixtures.save(kind, tmp_path / kind)))
        makers = {
            "byte": byte_tokenizer,
            "char": lambda: char_tokenizer(text, True),
            "bpe": lambda: bpe_tokenizer(stretches(text), 600),
            "gpt2": lambda: named_tokenizer(f"gpt2:{data_files / 'gpt2'}"),
            "hf": lambda: named_tokenizer(f"hf:{data_files / 'gpt2' / 'gpt2-tokenizer.json'}"),
        }
        return makers[kind]()

    return made


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
    """The end-of-text token, else a line feed if the corpus has one, else its first character."""
    for text, with_eot, first in (("ba\nna", False, 0), ("\tb\n", False, 1), ("ba", True, 2)):
        assert char_tokenizer(text, with_eot).prompt("") == [first]
    assert char_tokenizer("banana", False).prompt("") == [0]


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


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that the library encodes at once."""
    return tokenizer.inner.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["gpt2", "bpe", *tokenizer_fixtures.KINDS])
def test_stretches_of_a_text_have_the_ids_of_the_whole_text(kind, make, data_files, monkeypatch):
    """Also for tokenizers that put a space before a text (`mistral`, `llama2`, `phi3`)."""
    stretch = 1 << 13
    monkeypatch.setattr("windlass.data.tokenizer.STRETCH", stretch)
    book = (data_files / "gutenberg" / "1661.txt").read_text(encoding="utf-8")[:60_000]
    tokenizer = make(kind, book)
    parts, before, ids = list(stretches(book)), "", list[int]()
    assert len(parts) > 5 and max(map(len, parts)) <= stretch and "".join(parts) == book
    for part in parts:
        ids += tokenizer.encode(part, before).tolist()
        before = part[-256:]
    assert ids == whole(tokenizer, book) == tokenizer.encode(book).tolist()
    marks = tokenizer.encode_marked([(book[:20_000], 1), (book[20_000:], 2)])
    assert marks[0] == ids and set(marks[1]) == {1, 2}
    # A run without a line or a word is cut within a token, which changes the tokens there alone.
    run = "".join(book.split())[: 3 * stretch]
    changed = len(tokenizer.encode(run)) - len(whole(tokenizer, run))
    assert 0 <= changed <= 2 * 3
    assert tokenizer.decode(tokenizer.encode(run)) == run


def test_byte_pairs_learn_in_bounded_memory(monkeypatch):
    """They stop at a number of distinct words, in bytes, whatever the number of texts."""
    monkeypatch.setattr(tokenizer_kinds, "BPE_WORD_BYTES", 5_000)
    read = []

    def texts():
        for number in range(10_000):
            read.append(number)
            yield " ".join(f"w{i}" for i in range(number * 100, number * 100 + 100))

    assert bpe_tokenizer(texts(), 300).vocab == 300 and 5 < len(read) < 20
    repeated = ["the same words " * 10] * 50
    assert bpe_tokenizer(iter(repeated), 270).encode("the same").size <= 4


@pytest.mark.parametrize("kind", ["byte", "char", "exported", *tokenizer_fixtures.KINDS])
def test_bytes_of_each_token_add_up(kind, make, tmp_path):
    text = " é ü ö \u00ff über naïve \u4e2d\u6587 \U0001f642 Žluťoučký<0x41>\u0120\u2581 x"
    spec = tokenizer_fixtures.KINDS.get(kind, {})
    if spec.get("pieces", "bytes") != "bytes":
        text = text.replace("\u2581", "")
    tokenizer = make("char" if kind == "exported" else kind, text)
    if kind == "exported":
        save_tokenizer(tokenizer, Template(), 64, tmp_path)
        tokenizer = named_tokenizer(f"hf:{tmp_path}")
    ids, lengths = tokenizer.encode(text), tokenizer.byte_lengths()
    before = len(" ") if spec.get("pieces") == "prepend" else 0
    assert lengths.shape == (tokenizer.vocab,)
    assert not lengths[list(tokenizer.special.values())].any()
    assert int(lengths[ids].sum()) == len(text.encode()) + before
    assert tokenizer.decode(ids) == (text[1:] if spec.get("pieces") == "first" else text)


@pytest.mark.parametrize("kind", tokenizer_fixtures.KINDS)
def test_a_text_begins_as_in_transformers_and_a_document_has_both_edges(kind, tmp_path):
    from transformers import AutoTokenizer

    place = tokenizer_fixtures.save(kind, tmp_path)
    ours, reference = hf_tokenizer(str(place)), AutoTokenizer.from_pretrained(place)
    for text in ("Who are you? \u00e9 \u4e2d", "  x\ny ", "The cat.\n\nIt sat"):
        assert ours.prompt(text) == reference(text)["input_ids"]
    begins = tokenizer_fixtures.KINDS[kind].get("starts", False)
    assert list(ours.begin) == ([reference.bos_token_id] if begins else [])
    assert ours.first == (ours.begin or (reference.eos_token_id,))
    assert ours.last == ((reference.eos_token_id,) if begins else ())
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved" / "tokenizer")
    assert again.describe() == ours.describe() and again.prompt("a") == ours.prompt("a")
    assert again.encode(ours.inner.id_to_token(ours.eot)).tolist().count(ours.eot) == 0
    (place / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<no>"}))
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 10**6]}))
    (place / "config.json").write_text(json.dumps({"bos_token_id": 4, "eos_token_id": 0}))
    ours = hf_tokenizer(str(place))
    assert ours.ends == {ours.eot, 3} and ours.start == 4
    assert ours.prompt("") == (list(ours.begin) or [4])


def test_equal_vocabularies_with_another_start_are_other_tokenizers(tmp_path):
    """Their documents have other tokens, so prepared data of one is not the other's."""
    place = tokenizer_fixtures.save("llama3", tmp_path)
    with_bos = hf_tokenizer(str(place)).fingerprint
    tree = json.loads((place / "tokenizer.json").read_text())
    (place / "tokenizer.json").write_text(json.dumps(tree | {"post_processor": None}))
    assert hf_tokenizer(str(place)).fingerprint != with_bos


@pytest.mark.parametrize("kind", ["byte", "char", "gpt2", "bpe", *tokenizer_fixtures.KINDS])
def test_a_token_has_the_largest_mark_of_its_pieces(kind, make):
    tokenizer = make(kind)
    pieces = [SAMPLE[:7], SAMPLE[7:8], "", SAMPLE[8:61], SAMPLE[61:]]
    ids, marks = tokenizer.encode_marked(list(zip(pieces, (0, 2, 5, 1, 3), strict=True)))
    assert ids == tokenizer.encode("".join(pieces)).tolist() and len(marks) == len(ids)
    assert {0, 2, 3} <= set(marks) <= {0, 1, 2, 3} and marks.count(2) <= 2
    sizes, end = tokenizer.byte_lengths()[ids], tokenizer.eot
    if kind not in ("mistral", "llama2", "phi3"):  # they put a space before a text
        ends = np.cumsum(sizes)
        first = int(np.searchsorted(ends, len(SAMPLE[:7].encode()), "right"))
        assert marks[first] == 2 and max(marks[:first]) == 0
    talk = [("f", True), (end, True), ("x", False), (end, False)]
    ids, marks = tokenizer.encode_marked([*talk, ("d", True)])
    assert [m for i, m in zip(ids, marks, strict=True) if i == end] == [True, False]
    assert marks[0] is True and tokenizer.encode_marked([]) == ([], [])
    assert tokenizer.encode_marked([(end, 4)]) == ([end], [4])


def test_an_exported_character_tokenizer_raises_on_unknown_characters(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = char_tokenizer("banana\n", True)
    save_tokenizer(tokenizer, Template(), 64, tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert reference("nab")["input_ids"] == tokenizer.encode("nab").tolist()
    with pytest.raises(Exception, match="UNK"):
        reference("bax")
    with refused("cannot encode"):
        hf_tokenizer(str(tmp_path)).encode("bax")


@pytest.mark.parametrize("kind", ["byte", "char", "gpt2", "bpe", "hf"])
def test_saved_is_loaded_and_wrong_changed_or_damaged_is_refused(kind, make, tmp_path):
    tokenizer = make(kind)
    tokenizer.save(tmp_path)
    folder = tmp_path / "tokenizer"
    loaded = load_tokenizer(folder)
    assert loaded.describe() == tokenizer.describe()
    assert loaded.encode(SAMPLE).tolist() == tokenizer.encode(SAMPLE).tolist()
    assert named_tokenizer(f"hf:{folder}").describe() == tokenizer.describe()
    description, file = folder / "windlass.json", folder / "tokenizer.json"
    text, raw = description.read_text(), file.read_bytes()
    for wrong in (json.dumps({**json.loads(text), "fingerprint": "0" * 64}), "{"):
        description.write_text(wrong)
        with refused(str(tmp_path), "prepare the data again"):
            load_tokenizer(folder)
    description.write_text(text)
    for damaged in (raw[: len(raw) // 2], b""):
        file.write_bytes(damaged)
        with refused("tokenizer.json"):
            load_tokenizer(folder)


@pytest.mark.parametrize("kind", ["byte", "char", "gpt2", "bpe", "chatml"])
def test_added_tokens_have_ids_that_only_a_template_writes(kind, make, tmp_path):
    text = "The cat sat on the mat.\n"
    plain, added = make(kind, f"{text}<|x>"), make(kind, f"{text}<|x>")
    added = with_tokens(added, ["<|x|>", "<y>"])
    new = [plain.vocab, plain.vocab + 1]
    assert [added.special[name] for name in ("<|x|>", "<y>")] == new
    assert added.vocab == plain.vocab + 2 and added.fingerprint != plain.fingerprint
    for line in (text, "<|x|> at"):
        assert added.encode(line).tolist() == plain.encode(line).tolist()
    ids = added.encode_marked([(new[0], 0), (text, 1), (new[1], 1)])[0]
    assert ids == [new[0], *plain.encode(text).tolist(), new[1]]
    assert added.decode(ids) == f"<|x|>{text}<y>"
    assert list(added.byte_lengths()[new[0] :]) == [0, 0]
    added.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved" / "tokenizer").fingerprint == added.fingerprint


@pytest.mark.parametrize("setting", ["char", "bpe"])
def test_a_tokenizer_that_needs_the_corpus(setting):
    with refused("data.tokenizer", "prepare the data first", "shards:"):
        named_tokenizer(setting)
