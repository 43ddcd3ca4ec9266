"""Tokenizers: round trips, published ids, what is saved is what is loaded, and nothing is taken for what it is not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenizer_fixtures
from windlass.data import tokenizer as tokenizer_module
from windlass.data.gpt2 import END_OF_TEXT
from windlass.data.tokenizer import cut_at_lines
from windlass.data.vocabulary import byte_tokenizer, char_tokenizer, load_tokenizer, named_tokenizer, train_bpe
from windlass.errors import UserError
from windlass.recipe import DataSettings, Recipe

TEXT = st.text(st.characters(codec="utf-8"), max_size=200)
SAMPLE = "It's 3 o'clock.\n\n\tdef f(x):  return x**2   # \u00e4\u00f6\u00fc \u4e2d\u6587 \U0001f642\r\n" * 3


@pytest.fixture(scope="module")
def gpt2(data_files):
    return named_tokenizer(f"gpt2:{data_files / 'gpt2'}")


@given(TEXT)
def test_bytes_round_trip(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64 and ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_special():
    tokenizer = byte_tokenizer()
    assert (tokenizer.vocab, tokenizer.eot) == (257, 256)
    assert tokenizer.decode([65, 256, 66, 0xFF, 300]) == f"A{END_OF_TEXT}B\ufffd\ufffd"
    assert tokenizer.decode(np.array([104, 105])) == "hi"
    assert tokenizer.encode("\ud800x").tolist() == list(b"?x")  # half a surrogate pair, as JSON can hold it


@given(TEXT.filter(bool))
def test_characters_round_trip(text):
    tokenizer = char_tokenizer(text, with_eot=False)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab == len(set(text)) and int(ids.max()) == tokenizer.vocab - 1


def test_characters_are_numbered_by_code_point_and_unknown_ones_named():
    tokenizer = char_tokenizer("banana", with_eot=True)
    assert tokenizer.encode("nab").tolist() == [2, 0, 1]
    assert (tokenizer.vocab, tokenizer.eot) == (4, 3)
    assert tokenizer.decode([0, 3, 9]) == f"a{END_OF_TEXT}\ufffd"
    for unknown in "c!\u00e9\U0001f642A":
        with pytest.raises(UserError, match="does not know"):
            tokenizer.encode("ba" + unknown)
    with pytest.raises(UserError, match="at least one character"):
        char_tokenizer("", with_eot=False)


def test_shakespeare_has_65_characters(data_files):
    text = (data_files / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    tokenizer = char_tokenizer(text, with_eot=False)
    assert tokenizer.vocab == 65
    assert tokenizer.encode("hii there").tolist() == [46, 47, 47, 1, 58, 46, 43, 56, 43]  # as nanoGPT numbers them


def test_gpt2_ids_as_published(gpt2):
    assert (gpt2.vocab, gpt2.eot) == (50257, 50256)
    assert gpt2.encode("Hello, I'm a language model,").tolist() == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert gpt2.decode([15496, 11, 50256, 60000]) == f"Hello,{END_OF_TEXT}\ufffd"
    assert int(gpt2.encode(f"a{END_OF_TEXT}b").max()) < 50256  # what looks like the end of a text in a text is text


def test_gpt2_agrees_with_an_independent_tokenizer(gpt2, data_files):
    """The `tokenizers` library, with the same vocabulary from another source."""
    from tokenizers import Tokenizer

    other = Tokenizer.from_file(str(data_files / "gpt2" / "gpt2-tokenizer.json"))
    for text in (SAMPLE, (data_files / "gutenberg" / "1661.txt").read_text(encoding="utf-8")[:200_000], "  \n\n  x  "):
        assert gpt2.encode(text).tolist() == other.encode(text).ids
        assert gpt2.decode(gpt2.encode(text)) == text


@given(st.text(st.sampled_from("ab1 '!\n\t\r\u00e9\u00a0s"), max_size=60))
def test_cutting_a_long_text_changes_no_token(gpt2, text):
    before = tokenizer_module.LONGEST_PIECE
    try:
        tokenizer_module.LONGEST_PIECE = 12
        parts = list(cut_at_lines(text))
        cut = gpt2.encode(text).tolist()
    finally:
        tokenizer_module.LONGEST_PIECE = before
    assert "".join(parts) == text
    places = np.cumsum([len(p) for p in parts])[:-1].tolist()
    if all(text[p - 1] == "\n" and not text[p - 2].isspace() and not text[p].isspace() for p in places):
        assert cut == gpt2.encode(text).tolist()


@pytest.mark.parametrize(
    "text", [" " * 1_500_000 + "x", "\n" * 1_200_000, "a b\n" * 300_000], ids=["spaces", "lines", "words"]
)
def test_gpt2_survives_long_runs(gpt2, text):
    assert gpt2.decode(gpt2.encode(text)) == text


def test_bytes_of_each_token_add_up(gpt2, data_files):
    for tokenizer in (gpt2, byte_tokenizer(), char_tokenizer(SAMPLE, True), named_hf(data_files)):
        ids = tokenizer.encode(SAMPLE)
        lengths = tokenizer.byte_lengths()
        assert lengths.shape == (tokenizer.vocab,) and lengths[tokenizer.eot] == 0
        assert int(lengths[ids].sum()) == len(SAMPLE.encode())


@pytest.mark.parametrize("kind", tokenizer_fixtures.KINDS)
def test_bytes_of_each_token_add_up_for_every_kind_of_pieces(kind, tmp_path):
    tokenizer = named_tokenizer(f"hf:{tokenizer_fixtures.save(kind, tmp_path)}")
    text = " é ü ö \u00ff über naïve \u4e2d\u6587 \U0001f642 Žluťoučký<0x41>\u0120\u2581 x"
    text = text if kind in ("chatml", "marked", "llama3") else text.replace("\u2581", "")
    ids = tokenizer.encode(text)
    before = len(" ") if tokenizer_fixtures.KINDS[kind].get("pieces") == "prepend" else 0
    assert int(tokenizer.byte_lengths()[ids].sum()) == len(text.encode()) + before
    assert tokenizer.decode(ids) == (text[1:] if tokenizer_fixtures.KINDS[kind].get("pieces") == "first" else text)
    assert not tokenizer.byte_lengths()[list(tokenizer.special.values())].any()


def test_bytes_of_each_character_add_up_in_a_tokenizer_file(tmp_path):
    from windlass.data.chat import Template
    from windlass.interop.export import save_tokenizer

    text = "é ü \u2581 \u0120 \u4e2d \U0001f642 x" + END_OF_TEXT
    save_tokenizer(char_tokenizer(text, True), Template(), 64, tmp_path)
    tokenizer = named_tokenizer(f"hf:{tmp_path}")
    assert int(tokenizer.byte_lengths()[tokenizer.encode(text)].sum()) == len(text.encode())


def named_hf(data_files):
    return named_tokenizer(f"hf:{data_files / 'gpt2' / 'gpt2-tokenizer.json'}")


def test_a_tokenizer_file(gpt2, data_files):
    tokenizer = named_hf(data_files)
    assert (tokenizer.vocab, tokenizer.eot) == (50257, 50256)
    text = f"{SAMPLE}{END_OF_TEXT} and on \ud800"
    assert tokenizer.encode(text).tolist() == gpt2.encode(text).tolist()
    assert tokenizer.decode([15496, 60000, 11, 50256]) == f"Hello\ufffd,{END_OF_TEXT}"


def test_a_tokenizer_directory_says_how_a_text_ends(tmp_path):
    tokenizer = train_bpe([SAMPLE], 300)
    tokenizer.save(tmp_path)
    saved = tmp_path / "tokenizer" / "tokenizer.json"
    folder = tmp_path / "model"
    folder.mkdir()
    tree = json.loads(saved.read_text())
    tree["added_tokens"].append({**tree["added_tokens"][0], "id": tokenizer.vocab, "content": "<stop>"})
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    assert named_tokenizer(f"hf:{folder}").eot == 0
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert named_tokenizer(f"hf:{folder}").eot == tokenizer.vocab
    assert named_tokenizer(f"hf:{folder}").fingerprint != named_tokenizer(f"hf:{saved}").fingerprint


def test_trained_byte_pairs():
    texts = ["the cat sat on the mat\n", "that other hat is another matter\n"] * 50
    tokenizer = train_bpe(texts, 280)
    assert tokenizer.vocab == 280 and tokenizer.eot == 0
    assert len(tokenizer.encode("the cat")) < 7
    for text in ("the cat", SAMPLE, f"x{END_OF_TEXT}y"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert 0 not in tokenizer.encode(text)
    assert train_bpe(texts, 280).fingerprint == tokenizer.fingerprint
    assert train_bpe(texts, 270).fingerprint != tokenizer.fingerprint


def every_kind(data_files):
    return {
        "byte": byte_tokenizer(),
        "char": char_tokenizer(SAMPLE, True),
        "gpt2": named_tokenizer(f"gpt2:{data_files / 'gpt2'}"),
        "bpe": train_bpe([SAMPLE], 300),
        f"hf:{data_files / 'gpt2' / 'gpt2-tokenizer.json'}": named_hf(data_files),
    }


def test_saved_is_loaded_and_wrong_or_changed_is_refused(tmp_path, data_files):
    for number, (setting, tokenizer) in enumerate(every_kind(data_files).items()):
        folder = tmp_path / str(number)
        tokenizer.save(folder)
        loaded = load_tokenizer(Recipe(data=DataSettings(tokenizer=setting)), folder)
        assert (loaded.fingerprint, loaded.vocab, loaded.eot) == (tokenizer.fingerprint, tokenizer.vocab, tokenizer.eot)
        assert loaded.encode(SAMPLE).tolist() == tokenizer.encode(SAMPLE).tolist()
        wrong = "byte" if setting != "byte" else "char"
        with pytest.raises(UserError, match="wrong tokenizer"):
            load_tokenizer(Recipe(data=DataSettings(tokenizer=wrong)), folder)
        description = folder / "tokenizer" / "windlass.json"
        changed = {**json.loads(description.read_text()), "fingerprint": "0" * 64}
        description.write_text(json.dumps(changed))
        with pytest.raises(UserError, match="was changed after it was saved"):
            load_tokenizer(Recipe(data=DataSettings(tokenizer=setting)), folder)
        description.write_text("{")
        with pytest.raises(UserError, match="cannot be read"):
            load_tokenizer(Recipe(data=DataSettings(tokenizer=setting)), folder)


@pytest.mark.parametrize("kind", ["gpt2", "bpe"])
def test_a_damaged_file_is_refused(tmp_path, data_files, kind):
    setting = f"gpt2:{data_files / 'gpt2'}" if kind == "gpt2" else "bpe"
    tokenizer = named_tokenizer(setting) if kind == "gpt2" else train_bpe([SAMPLE], 280)
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer" / "tokenizer.json"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"\x00" + whole[1:], b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError):
            load_tokenizer(Recipe(data=DataSettings(tokenizer=setting)), tmp_path)
    path.unlink()
    with pytest.raises(UserError):
        load_tokenizer(Recipe(data=DataSettings(tokenizer=setting)), tmp_path)


@pytest.mark.parametrize("setting", ["bytes", "byte:x", "gpt3", "hf", "hf:", "", "bpe:500"])
def test_there_is_no_such_tokenizer(setting):
    with pytest.raises(UserError, match=r"data\.tokenizer: there is no tokenizer"):
        load_tokenizer(Recipe(data=DataSettings(tokenizer=setting)))


@pytest.mark.parametrize("setting", ["char", "bpe"])
def test_made_from_the_corpus(setting, tmp_path):
    with pytest.raises(UserError, match="run `windlass prepare` first"):
        load_tokenizer(Recipe(data=DataSettings(tokenizer=setting)), tmp_path)


@pytest.mark.parametrize("setting", ["char", "bpe"])
def test_shards_of_others_come_without_a_tokenizer(setting):
    with pytest.raises(UserError, match="come with none: name theirs"):
        load_tokenizer(Recipe(data=DataSettings(tokenizer=setting)))


def test_gpt2_from_a_wrong_directory(tmp_path, data_files):
    with pytest.raises(UserError, match=r"there is no vocab\.bpe"):
        named_tokenizer(f"gpt2:{tmp_path}")
    merges = (data_files / "gpt2" / "vocab.bpe").read_text(encoding="utf-8")
    (tmp_path / "encoder.json").write_bytes((data_files / "gpt2" / "encoder.json").read_bytes())
    lines = merges.split("\n")
    lines[7], lines[8] = lines[8], lines[7]
    (tmp_path / "vocab.bpe").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UserError, match="do not belong together"):
        named_tokenizer(f"gpt2:{tmp_path}")
    for broken in ("[]", "{", '{"\u00ff\u0fff": 1}'):
        (tmp_path / "encoder.json").write_text(broken, encoding="utf-8")
        with pytest.raises(UserError, match="does not hold GPT-2's"):
            named_tokenizer(f"gpt2:{tmp_path}")


def test_gpt2_without_a_network_names_the_way_out(monkeypatch):
    import tiktoken

    def unreachable(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(UserError, match="gpt2:DIR"):
        named_tokenizer("gpt2")


def test_a_wrong_tokenizer_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match=r"is no tokenizer of the `tokenizers` library"):
        named_tokenizer(f"hf:{tmp_path}")
    with pytest.raises(UserError, match=r"there is no directory"):
        named_tokenizer("hf:/nowhere/at/all")
