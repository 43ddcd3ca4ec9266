"""`data.tokenizer` where it is not set: the one that the weights were trained with."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

import hf_fixtures
from helpers import refused, tiny_recipe, write_corpus
from windlass import Recipe
from windlass.data.open import open_data
from windlass.data.prepare import prepare

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
