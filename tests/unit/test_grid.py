from __future__ import annotations

import pytest

from windlass.errors import UserError
from windlass.recipe import Recipe, parse_override, typed
from windlass.study.grid import Axis, expand, parse_axis


@pytest.mark.parametrize(
    ("text", "keys", "values"),
    [
        ("optim.lr=1e-2,1e-3,1e-4", ("optim.lr",), [(0.01,), (0.001,), (0.0001,)]),
        ("optim.lr=1e-4:1e-2:log:3", ("optim.lr",), [(1e-4,), (1e-3,), (1e-2,)]),
        ("model.width=128:512:lin:4", ("model.width",), [(128,), (256,), (384,), (512,)]),
        ("optim.schedule.kind=wsd,cosine", ("optim.schedule.kind",), [("wsd",), ("cosine",)]),
        ("optim.betas=[0.9,0.95],[0.9,0.99]", ("optim.betas",), [([0.9, 0.95],), ([0.9, 0.99],)]),
        ("a.x+b.y=1+2,1e+3+4", ("a.x", "b.y"), [(1, 2), (1000.0, 4)]),
        ("model.qk_norm=true,false", ("model.qk_norm",), [(True,), (False,)]),
        ("data.source='a,b','c'", ("data.source",), [("a,b",), ("c",)]),
    ],
)
def test_what_can_be_typed(text, keys, values):
    assert parse_axis(text) == Axis(keys, tuple(tuple(v) for v in values))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optim.lr", "not an axis"), ("optim.lr=", "not an axis"), ("=1,2", "not an axis"), ("optim.lr=1,,2", "empty value"),
        ("a+b=1,2+3", "1 values for the 2 keys"), ("optim.lr=0:1:log:3", "above 0"), ("optim.lr=1:2:lin:1", "at least 2"),
        ("optim.lr=x:2:lin:3", "with numbers"),
    ],
)  # fmt: skip
def test_what_cannot_is_one_message(text, says):
    with pytest.raises(UserError, match=says):
        parse_axis(text)


def test_axes_are_crossed_and_the_last_changes_fastest():
    cells = expand(Recipe.load("quickstart"), [parse_axis("optim.lr=1e-2,1e-3"), parse_axis("run.seed=1,2")])
    assert [c.label for c in cells] == ["lr=0.01 seed=1", "lr=0.01 seed=2", "lr=0.001 seed=1", "lr=0.001 seed=2"]
    assert cells[2].recipe.optim.lr == 1e-3
    assert cells[2].recipe == Recipe.load("quickstart", cells[2].overrides)
    assert len({c.recipe.config_hash for c in cells}) == 4


def test_bad_grids_name_every_cell():
    base = Recipe.load("quickstart")
    with pytest.raises(UserError, match=r"(?s)model.heads=3.*model.heads=5"):
        expand(base, [parse_axis("model.heads=3,4,5")])
    with pytest.raises(UserError, match="two axes"):
        expand(base, [parse_axis("optim.lr=1,2"), parse_axis("optim.lr=3,4")])
    with pytest.raises(UserError, match="equal"):
        expand(base, [parse_axis("optim.lr=0.1,1e-1")])
    with pytest.raises(UserError, match="no such setting"):
        expand(base, [parse_axis("optim.lrr=1,2")])


def test_settings_that_change_nothing_of_the_maths_tell_cells_apart():
    """The strategy, the micro-batch and the number of ranks are not in the digest."""
    base = Recipe.load("quickstart")
    axes = ["parallel.strategy=single,ddp", "train.micro_batch=2,4", "parallel.world=1,2"]
    cells = expand(base, [parse_axis(text) for text in axes])
    assert len({c.recipe.config_hash for c in cells}) == 1
    assert len({c.key for c in cells}) == len({c.directory for c in cells}) == 8
    assert [(c.recipe.parallel.strategy, c.recipe.train.micro_batch, c.world) for c in cells[:3]] == [
        ("single", 2, 1), ("single", 2, 2), ("single", 4, 1)
    ]  # fmt: skip
    assert cells[1].overrides == ["parallel.strategy=single", "train.micro_batch=2"]
    with pytest.raises(UserError, match="equal"):
        expand(base, [parse_axis("parallel.strategy=ddp,ddp")])


def test_a_cell_of_what_the_digest_knows_keeps_its_old_name():
    cell = expand(Recipe.load("quickstart"), [parse_axis("optim.lr=1e-2")])[0]
    assert (cell.key, cell.directory, cell.world) == (
        cell.recipe.config_hash,
        f"runs/lr=0.01-{cell.recipe.config_hash[:8]}",
        None,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [("parallel.world=0,1", "number of ranks"), ("parallel.world=many", "number of ranks"), ("run.dir=a,b", "run.dir")],
)
def test_what_cannot_be_an_axis(text, says):
    with pytest.raises(UserError, match=says):
        expand(Recipe.load("quickstart"), [parse_axis(text)])


@pytest.mark.parametrize(
    "value", [True, 3, 1e-4, "cosine", "2 epochs", "true", "1", " x", 'a "quoted" word', [0.9, 0.95], ["a,b", "1"]]
)
def test_a_typed_value_reads_back(value):
    found = parse_override(f"key={typed(value)}")[1]
    assert (found, type(found)) == (value, type(value))
