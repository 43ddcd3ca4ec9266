from pathlib import Path

import numpy as np
import pytest

from helpers import refused
from windlass.recipe import Recipe, parse_override, typed
from windlass.study.grid import NODES, WORLD, Axis, Cell, cells_of, expand, parse_axis, read_axes


@pytest.mark.parametrize(
    ("text", "keys", "values"),
    [
        ("optim.lr=1e-4:1e-2:log:3", ("optim.lr",), [(1e-4,), (1e-3,), (1e-2,)]),
        ("model.width=128:512:lin:4", ("model.width",), [(128,), (256,), (384,), (512,)]),
        ("optim.betas=[0.9,0.95],[0.9,0.99]", ("optim.betas",), [([0.9, 0.95],), ([0.9, 0.99],)]),
        ("a.x+b.y=1+2,1e+3+4", ("a.x", "b.y"), [(1, 2), (1000.0, 4)]),
        ("model.qk_norm=true,false", ("model.qk_norm",), [(True,), (False,)]),
        ("data.source='a,b','c'", ("data.source",), [("a,b",), ("c",)]),
    ],
)
def test_what_can_be_typed(text, keys, values):
    assert parse_axis(text) == Axis(keys, tuple(tuple(v) for v in values))


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("optim.lr", "KEY=A,B,C"),
        ("optim.lr=1,,2", "optim.lr"),
        ("optim.lr=0:1:log:3", "above 0"),
        ("optim.lr=1:2:lin:1", "at least 2"),
        ("optim.lr=x:2:lin:3", "LOW:HIGH:log:N"),
    ],
)
def test_what_cannot_be_typed(text, remedy):
    with refused(remedy):
        parse_axis(text)


def grid(*axes):
    return expand(Recipe.load("quickstart"), [parse_axis(text) for text in axes])


def test_axes_are_crossed_and_the_last_changes_fastest():
    cells = grid("optim.lr=1e-2,1e-3", "run.seed=1,2")
    assert [c.label for c in cells] == [f"lr={lr} seed={n}" for lr in (0.01, 0.001) for n in (1, 2)]
    assert cells[2].recipe == Recipe.load("quickstart", cells[2].overrides)
    assert cells[2].recipe.optim.lr == 1e-3 and cells[0].world is None
    assert len({c.key for c in cells}) == 4 and cells[0].key == cells[0].recipe.config_hash
    assert cells[0].directory == f"runs/lr=0.01-seed=1-{cells[0].key[:8]}"


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (["model.heads=3,4,5"], ["model.heads=3", "model.heads=5"]),
        (["optim.lr=0.1,1e-1"], ["lr=0.1"]),
        (["optim.lr=1,2", "optim.lr=3,4"], ["equal", "lr=3"]),
        (["optim.lrr=1,2"], ["optim.lrr", "optim.lr?"]),
        (["parallel.world=0,many"], ["parallel.world=0", "parallel.world=many"]),
    ],
)
def test_invalid_grids_name_every_cell(axes, words):
    with refused(*words):
        grid(*axes)


def test_settings_outside_the_config_hash_tell_cells_apart():
    cells = grid("parallel.strategy=full_shard,ddp", "train.micro_batch=2,4", "parallel.world=1,2")
    assert len({c.recipe.config_hash for c in cells}) == 1
    assert len({c.key for c in cells}) == len({c.directory for c in cells}) == 8
    assert [(c.recipe.train.micro_batch, c.world) for c in cells[:3]] == [(2, 1), (2, 2), (4, 1)]
    assert cells[1].overrides == ["parallel.strategy=full_shard", "train.micro_batch=2"]


def test_hosts_are_no_settings_of_a_cell():
    base = Recipe.load("quickstart")
    one, other = cells_of(base, [{WORLD: 4, NODES: 1}, {WORLD: 4, NODES: 2}])
    assert one.recipe == other.recipe and other.overrides == [] and other.nodes == 2
    assert other.key != one.key == Cell.of(base, {WORLD: 4}).key, "so that a study can grow"


@pytest.mark.parametrize(
    "value",
    [
        *(True, 3, 1e-4, float("inf"), "cosine", "2 epochs", "true", "1", " x", 'a "quoted" word'),
        *("it's", "'it''s'", "\\", "\\u0041", "C:\\new 'x' \"y\"", "a\nb", "1\nx = 2", "a\r\nb"),
        *("\t", "\x7f\x00\x1b", "über 🚂", "\udcff", "", "# x", "[a", "'" * 3, '"' * 3),
        *([0.9, 0.95], ["a,b", "1", "it's", "\n"], []),
        *([{"source": "it's", "weight": 0.5}], {"a b": [True, "x\ny"]}),
    ],
)
def test_a_typed_value_reads_back(value):
    text = f"key={typed(value)}"
    read = parse_override(text)[1]
    assert (read, type(read)) == (value, type(value)) and "\0" not in text


def test_axes_as_python_has_them():
    """Commas in values make no more values, and NumPy's numbers are numbers."""
    axes = {
        "data.source": ["a,b.txt", Path("it's [1].txt")],
        "optim.lr": np.logspace(-3, -2, 2),
        "run.seed": range(2),
        "optim.betas": [(0.9, 0.95)],
        "model.layers": [np.int64(2)],
    }
    assert {axis.keys[0]: [value for (value,) in axis.values] for axis in read_axes(axes)} == {
        "data.source": ["a,b.txt", "it's [1].txt"],
        "optim.lr": [0.001, 0.01],
        "run.seed": [0, 1],
        "optim.betas": [[0.9, 0.95]],
        "model.layers": [2],
    }
    assert all(type(row[0]) in (float, int) for axis in read_axes(axes)[1:3] for row in axis.values)
    for axes in ({"optim.lr": 0.1}, {"optim.lr": []}, {"optim.lr": "1,2"}):
        with refused(*axes, "list"):
            read_axes(axes)
