"""Tokenizers: round trips, published ids, saved and loaded; and the default one, of the weights."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hf_fixtures
import tokenizer_fixtures
from helpers import refused, tiny_recipe, write_corpus
from windlass import Recipe
from windlass.data import tokenizer_kinds
from windlass.data.chat import Template
from windlass.data.open import open_data
from windlass.data.prepare import prepare
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
    tokenizer = char_tokenizer(text, with_eot=False)
    assert byte_tokenizer().encode(text).tolist() == list(text.encode())
    for each in (byte_tokenizer(), tokenizer):
        assert each.encode(text).dtype == np.int64 and each.decode(each.encode(text)) == text
    assert tokenizer.vocab == len(set(text)) == int(tokenizer.encode(text).max()) + 1


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
    # an empty prompt: the end-of-text token, else a line feed, else the first character
    for text, with_eot, first in (("ba\nna", False, 0), ("\tb\n", False, 1), ("ba", True, 2)):
        assert char_tokenizer(text, with_eot).prompt("") == [first]
    assert char_tokenizer("banana", False).prompt("") == [0]


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
    parts, ids = list(stretches(book)), list[int]()
    assert len(parts) > 5 and max(map(len, parts)) <= stretch and "".join(parts) == book
    for part in parts:
        ids += tokenizer.encode(part, continues=bool(ids)).tolist()
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
    ids, lengths = tokenizer.encode(text), tokenizer.byte_lengths
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
    # without its begin-of-text token it gives documents other tokens
    tree = json.loads((place / "tokenizer.json").read_text())
    (place / "tokenizer.json").write_text(json.dumps(tree | {"post_processor": None}))
    assert (hf_tokenizer(str(place)).fingerprint != ours.fingerprint) == begins


@pytest.mark.parametrize("kind", ["byte", "char", "gpt2", "bpe", *tokenizer_fixtures.KINDS])
def test_a_token_has_the_largest_mark_of_its_pieces(kind, make):
    tokenizer = make(kind)
    pieces = [SAMPLE[:7], SAMPLE[7:8], "", SAMPLE[8:61], SAMPLE[61:]]
    ids, marks = tokenizer.encode_marked(list(zip(pieces, (0, 2, 5, 1, 3), strict=True)))
    assert ids == tokenizer.encode("".join(pieces)).tolist() and len(marks) == len(ids)
    assert {0, 2, 3} <= set(marks) <= {0, 1, 2, 3} and marks.count(2) <= 2
    sizes, end = tokenizer.byte_lengths[ids], tokenizer.eot
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
    assert list(added.byte_lengths[new[0] :]) == [0, 0]
    added.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved" / "tokenizer").fingerprint == added.fingerprint


@pytest.mark.parametrize("setting", ["char", "bpe"])
def test_a_tokenizer_that_needs_the_corpus(setting):
    with refused("data.tokenizer", "prepare the data first", "shards:"):
        named_tokenizer(setting)


RUN = 'preset = "x"\n[data]\ntokenizer = "{}"\n'


def tokenizer_of(**model: str) -> str:
    return Recipe.model_validate({"model": model}).data.tokenizer


def test_it_is_the_models_own(tmp_path: Path) -> None:
    assert tokenizer_of() == "byte"
    assert tokenizer_of(kind="hf", name="some/model") == "hf:some/model"
    names = {name: name for name in ("gpt2", "hf:a/b", "byte")} | {
        "bpe": f"hf:{tmp_path}/tokenizer"
    }
    for name, own in names.items():
        (tmp_path / "recipe.toml").write_text(RUN.format(name))
        for place in (f"{tmp_path}", f"{tmp_path}@best", f"{tmp_path}/checkpoints/step-00000010"):
            assert tokenizer_of(kind="gpt", init_from=place) == own
    (tmp_path / "recipe.toml").write_text(RUN.format("hf:a/b") + 'add_tokens = ["<|turn|>"]\n')
    assert tokenizer_of(kind="gpt", init_from=f"{tmp_path}") == f"hf:{tmp_path}/tokenizer"
    (tmp_path / "model").mkdir()
    assert tokenizer_of(kind="gpt", init_from=f"{tmp_path}/model") == "byte"  # it has none
    (tmp_path / "model" / "tokenizer.json").touch()
    assert tokenizer_of(kind="gpt", init_from=f"{tmp_path}/model") == f"hf:{tmp_path}/model"


def test_it_follows_the_model_until_it_is_set() -> None:
    recipe = Recipe.load("quickstart")
    own = recipe.replace("model.kind=hf", "model.name=a", "model.revision=r")
    assert (own.data.tokenizer, own.tokenizer) == ("hf:a", "hf:a@r")
    assert own.replace("model.name=b").data.tokenizer == "hf:b"
    chosen = own.replace("data.tokenizer=gpt2")
    assert chosen.replace("model.name=b").data.tokenizer == "gpt2"
    assert chosen.replace("data.tokenizer=auto").data.tokenizer == "hf:a"
    # all that reads it has the one that is used
    assert recipe.data.vocab_ == 257 and recipe.flat()["data.tokenizer"] == "byte"
    assert own.config_hash == own.replace("data.tokenizer=hf:a").config_hash
    assert Recipe.load("bloom-560m-squad").data.tokenizer == "hf:bigscience/bloom-560m"


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_weights_of_a_run_take_its_tokenizer_alone(tmp_path, kind):
    """Another one of the same size learns other merges or characters, and its ids mean others."""
    origin, other = tmp_path / "origin", tmp_path / "other.txt"
    own = {"data__tokenizer": kind, "data__tokenizer_vocab": 270, "model__vocab": 270}
    recipe = tiny_recipe(write_corpus(tmp_path / "text.txt", 400), origin, **own)
    open_data(recipe).save_tokenizer(origin)
    (origin / "recipe.toml").write_text(recipe.toml())
    other.write_text("zyx wvu tsr qpo nml kji " * 200)
    own |= {"model__init_from": str(origin), "data__dir": str(tmp_path / "new")}
    new = tiny_recipe(other, tmp_path / "run", **own)
    for wrong in ("bpe", "char"):
        with refused(f"data.tokenizer = {wrong}", str(origin), "leave data.tokenizer out"):
            prepare(new.replace({"data.tokenizer": wrong, "data.dir": str(tmp_path / wrong)}))
    own_again = new.replace("data.tokenizer=auto")
    if kind == "char":  # its corpus has no z
        with refused("character tokenizer's corpus has no"):
            prepare(own_again)
        own_again = own_again.replace(f"data.source={tmp_path / 'text.txt'}")
    assert prepare(own_again).tokenizer.fingerprint == open_data(recipe).tokenizer.fingerprint


def test_another_one_than_the_models_is_refused(tmp_path):
    text = write_corpus(tmp_path / "text.txt").read_text()
    own, added, same_size, small = (
        hf_fixtures.save_tokenizer([learned], tmp_path / f"{number}", vocab)
        for number, (learned, vocab) in enumerate(
            ((text, 320), (text, 320), (text[::-1], 320), (text, 300))
        )
    )
    tree = json.loads((added / "tokenizer.json").read_text())
    tree["added_tokens"].append({**tree["added_tokens"][0], "id": 320, "content": "<|turn|>"})
    (added / "tokenizer.json").write_text(json.dumps(tree))

    def ids(tokenizer: str, **model: Any) -> int:
        place = {"source": str(tmp_path / "text.txt"), "dir": tempfile.mkdtemp(dir=tmp_path)}
        model = {"kind": "hf", "name": str(own), **model}
        recipe = {"model": model, "data": {**place, "tokenizer": tokenizer}}
        return prepare(Recipe.model_validate(recipe)).tokenizer.vocab

    assert ids("auto") == ids(f"hf:{own / 'tokenizer.json'}") == 320
    assert ids(f"hf:{added}") == 321
    with refused("data.tokenizer = byte", "257", "320", f"hf:{own}"):
        ids("byte")
    with refused("data.tokenizer", "300"):
        ids(f"hf:{small}")
    with refused("data.tokenizer", "300"):
        ids(f"hf:{small}", kind="gpt", name="", init_from=str(own))
    assert ids(f"hf:{small}", from_scratch=True) == 300
    with refused("data.tokenizer", "320", "leave data.tokenizer out"):
        ids(f"hf:{same_size}")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model.kind": "hf", "model.name": "./nowhere"}, ("model.name: ", "is not a directory")),
        ({"data.tokenizer": "hf:./nowhere"}, ("data.tokenizer: ", "is not a directory")),
        ({"model.kind": "hf", "model.name": "MODEL"}, ("tokenizer.json", "name another")),
    ],
)
def test_a_place_without_a_tokenizer_is_named_by_its_setting(tmp_path, settings, words):
    hf_fixtures.config("llama").save_pretrained(tmp_path)
    corpus = write_corpus(tmp_path / "text.txt", words=200)
    data = {"data.source": str(corpus), "data.dir": str(tmp_path / "data")}
    places = {key: value.replace("MODEL", str(tmp_path)) for key, value in settings.items()}
    with refused(*words):
        prepare(Recipe.from_dict({**data, **places}))
