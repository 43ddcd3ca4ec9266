"""The settings of a mixture: sections in a list, overridden by name, and checked together."""

import pytest

from helpers import refused
from windlass.recipe import Recipe, typed
from windlass.recipe.explain import explain

MIX = """
extends = "quickstart"

[[data.mix]]
name = "web"
source = "web.txt"
weight = 0.9

[[data.mix]]
name = "books"
source = "books.txt"
max_tokens = 4000

[[data.stages]]
from = 0.8
weights = { books = 0.5 }
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mix.toml"
    path.write_text(MIX)
    return path


def test_a_mixture_survives_its_toml_and_has_no_other_source(file, tmp_path):
    recipe = Recipe.load(file)
    assert recipe.data.sources == ["web.txt", "books.txt"]
    assert recipe.data.stages[0].start == 0.8
    again = tmp_path / "again.toml"
    again.write_text(recipe.toml())
    assert Recipe.load(again) == recipe and "data.source" not in recipe.flat()
    assert Recipe.load(again).config_hash == recipe.config_hash
    text = [f"data.{key}={typed(recipe.flat()[f'data.{key}'])}" for key in ("mix", "stages")]
    assert Recipe.load("quickstart", text).data.mix == recipe.data.mix
    assert "data.mix" not in Recipe.load("quickstart").flat()


def test_overrides_name_a_section_and_change_no_other(file):
    recipe = Recipe.load(file, ["data.mix.web.weight=0.3", "data.stages.0.weights.web=0"])
    assert [part.weight for part in recipe.data.mix] == [0.3, 1.0]
    assert recipe.data.stages[0].weights == {"books": 0.5, "web": 0.0}
    assert recipe.replace({"data.mix.books.max_tokens": 2}).data.mix[1].max_tokens == 2
    assert recipe.data.mix[1].max_tokens == 4000 and Recipe.load(file).data.mix[0].weight == 0.9
    alone = ["data.source=other.txt", "data.mix=[]", "data.stages=[]"]
    assert Recipe.load(file, alone).data.sources == ["other.txt"]
    with refused("data.mix.wb.weight", "there are: web, books"):
        Recipe.load(file, ["data.mix.wb.weight=1"])
    with refused("data.mix.weight", "write a key of it"):
        Recipe.load(file, ["data.mix.weight=1"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.mix.web.weight=-1"], ("data.mix.0.weight", "greater than or equal to 0", "-1")),
        (["data.mix.web.wieght=1"], ("data.mix.0.wieght", "data.mix.weight")),
        (['data.mix=[{source="a"}]'], ("data.mix.0.name", "required")),
        (['data.mix=[{name="a b", source="a"}]'], ("data.mix.0.name", "A-Za-z0-9")),
        (["data.mix.books.name=web"], ("data.mix", "two sources have the name web")),
        (["data.eval_source=x.txt"], ("data.eval_source", "each source of data.mix")),
        (["data.source=x.txt"], ("data.source", "data.mix=[]")),
        (["data.mix.web.source=squad"], ("data.mix.0.format", 'data.format = "squad"')),
        (["data.mix.web.source=shards:a", "data.format=chat"], ("data.mix.0.format", "text")),
        (["data.mix.web.weight=0", "data.mix.books.weight=0"], ("no source has a weight",)),
        (["data.stages.0.weights.x=1"], ("data.stages.0.weights", "source x", "web, books")),
        (["data.stages.0.from=0"], ("data.stages.0.from", "data.mix")),
        (["data.stages.0.from=1.5"], ("data.stages.0.from", "0.0 to 1.0")),
        (["data.mix=[]"], ("data.stages", "data.mix")),
    ],
)
def test_what_does_not_work_is_one_message(file, overrides, words):
    with refused("recipe", *words):
        Recipe.load(file, overrides)


def test_keys_of_sections_are_explained(file):
    assert "data.mix.weight: Share of the samples" in explain("data.mix")
    assert "default   1.0" in explain("data.mix.weight")
    assert "the run (0.0 to 1.0)" in explain("data.stages.from")


def test_sources_start_from_the_base_and_are_written_as_before(file, tmp_path, monkeypatch):
    recipe = Recipe.load(file).replace({"run.base": str(tmp_path)})
    monkeypatch.chdir("/")
    changed = recipe.replace({"data.mix.books.source": "tmp/new.txt", "train.steps": 3})
    sources = [part.source for part in changed.data.mix]
    assert sources == [str(tmp_path / "web.txt"), "/tmp/new.txt"]
    assert [part["source"] for part in changed.flat()["data.mix"]] == ["web.txt", "/tmp/new.txt"]
