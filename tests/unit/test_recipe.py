import json
import tomllib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import refused, windlass
from windlass.errors import UserError
from windlass.recipe import Horizon, Recipe, RecipeError, plan_batch, presets
from windlass.recipe.load import parse_override, settings
from windlass.recipe.units import epochs_in

SUITES = 'eval.suites=["loss","squad"]'


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_loads_and_survives_its_own_toml(name):
    recipe = Recipe.load(name)
    assert recipe.preset == name
    assert Recipe.model_validate(tomllib.loads(recipe.toml())) == recipe


def test_every_setting_is_documented():
    assert [key for key, field in settings().items() if not field.description] == []


def test_overrides_take_toml_values_and_plain_text():
    overrides = ["optim.lr=3e-4", "model.norm=rmsnorm", "optim.betas=[0.8, 0.9]", "train.compile=true"]
    recipe = Recipe.load("quickstart", overrides)
    assert (recipe.optim.lr, recipe.optim.betas) == (3e-4, (0.8, 0.9))
    assert recipe.model.norm == "rmsnorm" and recipe.train.compile
    assert parse_override("data.source=a b=c") == ("data.source", "a b=c")
    assert Recipe.load("quickstart", ["checkpoint.resume=700"]).checkpoint.resume == "700"


def test_all_problems_are_reported_together_with_the_nearest_key():
    with pytest.raises(RecipeError) as caught:
        Recipe.load("quickstart", ["optim.lrr=1", "train.steps=0", "data.order=foo", "checkpoint.every=1.5", "lr=2"])
    problems = dict(caught.value.problems)
    assert set(problems) == {"optim.lrr", "train.steps", "data.order", "checkpoint.every", "lr"}
    assert "did you mean optim.lr?" in problems["optim.lrr"]
    assert "did you mean optim.lr?" in problems["lr"]
    assert "'shuffled', 'shards-shuffled' or 'sequential'" in problems["data.order"]


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["zzz=1"], "zzz", "run, model, data"),
        (["train.steps=abc"], "train.steps", "compute-optimal"),
        (['eval.suites=["loss", "trivia"]'], "eval.suites", "hellaswag"),
        (["model.width=100", "model.heads=3"], "model.heads", "nearest that does is"),
        (["model.heads=4", "model.kv_heads=3"], "model.kv_heads", "do not divide"),
        (["train.global_batch=10", "train.micro_batch=4"], "train.micro_batch", "nearest that does is 5"),
        (["model.vocab=200"], "model.vocab", "smaller than the tokenizer's vocabulary of 257"),
        (["parallel.offload=true"], "parallel.offload", "FSDP2"),
        (["model.kind=hf"], "model.name", "directory"),
        (["data.source=https://x.example/a.txt"], "data.sha256", "SHA-256"),
        (["data.source=squad"], "data.format", "squad"),
        (["optim.schedule.warmup=300", "optim.schedule.decay=300"], "optim.schedule.decay", "longer than the run"),
        (["optim.schedule.warmup=0.6", "optim.schedule.decay=0.6"], "optim.schedule.decay", "longer than the run"),
        (["parallel.shard_size=2"], "parallel.shard_size", "hybrid_shard"),
        (["checkpoint.best=squad.f1"], "checkpoint.best", SUITES),
        ([SUITES, "checkpoint.best=f1"], "checkpoint.best", "squad.exact_match"),
    ],
)
def test_impossible_combinations_are_found_before_anything_starts(overrides, key, says):
    with pytest.raises(RecipeError) as caught:
        Recipe.load("quickstart", overrides)
    assert says in dict(caught.value.problems)[key]


def test_a_file_extends_a_preset_or_a_file_beside_it(tmp_path):
    (tmp_path / "base.toml").write_text('extends = "quickstart"\n[optim]\nlr = 0.5\n')
    (tmp_path / "mine.toml").write_text('extends = "base.toml"\n[train]\nsteps = 7\n')
    recipe = Recipe.load(tmp_path / "mine.toml", ["model.dropout=0.1"])
    assert (recipe.preset, recipe.optim.lr, recipe.train.steps, recipe.model.dropout) == ("mine", 0.5, 7, 0.1)
    assert recipe.model.width == Recipe.load("quickstart").model.width


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"),
    [
        ("loop.toml", [], ("loop.toml", "extends")),
        ("bad.toml", [], ("bad.toml", "TOML")),
        ("no.toml", [], ("no.toml", "recipe --list")),
        ("quickstrat", [], ("did you mean quickstart?",)),
        ("quickstart", ["optim.lr"], ("optim.lr", "KEY=VALUE")),
        ("quickstart", ["optim.lr=2", "optim.lr.x=1"], ("optim.lr.x", "not a section")),
    ],
)
def test_what_cannot_be_read_is_one_message(tmp_path, monkeypatch, recipe, overrides, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.toml").write_text('extends = "loop.toml"\n')
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(UserError) as caught:
        Recipe.load(recipe, overrides)
    assert all(word in str(caught.value) for word in words)


def test_the_config_hash_is_of_the_semantic_settings():
    base = Recipe.load("quickstart")
    same = ["run.dir=x", "run.notes=y", "checkpoint.every=3", "telemetry.every=1", "parallel.strategy=full_shard",
            "train.micro_batch=2", "data.workers=3"]  # fmt: skip
    other = ["optim.lr=1", "run.seed=2", "train.steps=9", "model.dropout=0.5", "data.order=sequential"]
    assert {base.with_overrides(o).config_hash for o in same} == {base.config_hash}
    assert len({base.config_hash, *(base.with_overrides(o).config_hash for o in other)}) == 1 + len(other)
    assert base.name == f"quickstart-{base.config_hash[:8]}"
    assert str(base.run_dir) == f"runs/{base.name}"


@pytest.mark.parametrize(
    ("world", "micro", "expected"), [(1, 0, (16, 1)), (2, 0, (8, 1)), (2, 4, (4, 2)), (4, 2, (2, 2))]
)
def test_batch_arithmetic(world, micro, expected):
    plan = plan_batch(16, micro, world, context=128)
    assert (plan.micro_batch, plan.accumulation) == expected
    assert plan.tokens_per_step == 16 * 128


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 4))
def test_micro_batches_are_divided_round_robin_and_none_is_lost(world, micro, accumulation):
    plan = plan_batch(world * micro * accumulation, micro, world, context=8)
    for rank in range(world):
        assert list(plan.micro_batches(rank)) == [k for k in range(world * accumulation) if k % world == rank]
        assert len(plan.micro_batches(rank)) == plan.accumulation


def test_an_uneven_batch_names_the_sizes_that_work():
    with pytest.raises(UserError, match=r"train\.global_batch.* 63 or 66"):
        Recipe.load("quickstart", ["train.global_batch=64"]).batch(3)


@given(st.integers(1, 50), st.integers(1, 400), st.integers(1, 40), st.fractions(Fraction(1, 4), 3))
def test_an_epochs_edge_fires_at_the_first_step_at_or_past_it(steps, samples, batch, epochs):
    epochs = Fraction(round(epochs * 100), 100)
    horizon = Horizon(steps, samples, batch)
    fired = [s for s in range(steps + 1) if horizon.due(f"{float(epochs)} epochs", s)]
    edges = [k * epochs * samples for k in range(1, 1 + int(steps * batch / (epochs * samples)))]
    assert fired == sorted({-int(-edge // batch) for edge in edges})


def test_durations_in_steps_fractions_and_never():
    horizon = Horizon(steps=1000, samples_per_epoch=300, samples_per_step=16)
    assert [s for s in range(1001) if horizon.due(0.25, s)] == [250, 500, 750, 1000]
    assert [s for s in range(1001) if horizon.due(400, s)] == [400, 800]
    assert not any(horizon.due(never, s) for never in (0, 0.0) for s in range(1001))
    assert (horizon.steps_in(0.01), horizon.steps_in("1 epoch"), horizon.steps_in(7)) == (10, 19, 7)
    assert epochs_in("2.5 epochs") == Fraction(5, 2)


def test_the_version_and_what_a_setting_means():
    assert windlass("--version").stdout.split()[0] == "windlass"
    assert windlass("recipe", "--explain", "optim.lr").stdout.startswith("optim.lr = 0.001\nPeak learning rate")
    assert "Peak learning rate" in json.dumps(json.loads(windlass("recipe", "--schema").stdout))


HF = ["model.kind=hf", "model.name=some/model"]


@pytest.mark.parametrize(
    ("overrides", "lr"),
    [
        ([], 3e-3),
        (HF, 5e-5),
        ([*HF, "model.lora.rank=4"], 2e-4),
        ([*HF, "model.from_scratch=true"], 1e-3),
        ([*HF, "optim.lr=3e-4"], 3e-4),
    ],
)
def test_the_learning_rate_follows_the_model_where_none_is_set(overrides, lr):
    recipe = Recipe.load("quickstart", overrides)
    assert recipe.optim.lr == recipe.flat()["optim.lr"] == tomllib.loads(recipe.toml())["optim"]["lr"] == lr
    assert Recipe().optim.lr == 1e-3 and Recipe.load("quickstart", HF).train.precision == "auto"


def test_settings_of_the_other_kind_of_model_are_left_out_or_refused(tmp_path):
    recipe = Recipe.load("quickstart", HF)  # the preset's own network is not the user's words
    assert [key for key in recipe.flat() if key.startswith("model.")] == [
        "model.kind", "model.name", "model.revision", "model.trust_remote_code", "model.from_scratch", "model.context",
        "model.init_from", "model.lora.rank", "model.lora.alpha", "model.lora.dropout", "model.lora.targets",
    ]  # fmt: skip
    assert "model.name" not in Recipe.load("quickstart").flat()
    (tmp_path / "mine.toml").write_text('[model]\nkind = "hf"\nname = "x"\nlayers = 6\nactivation = "gelu"\n')
    with refused("model.layers, model.activation", "config.json", "leave them out"):
        Recipe.load(tmp_path / "mine.toml")
    with refused("model.heads", "config.json", "model.name a directory"):
        Recipe.load("quickstart", [*HF, "model.heads=2", "model.from_scratch=true"])
    with refused("model.name, model.lora", 'model.kind = "hf"'):
        Recipe.load("quickstart", ["model.name=x", "model.lora.rank=2"])
    (tmp_path / "again.toml").write_text(recipe.toml())
    assert Recipe.load(tmp_path / "again.toml", ["model.context=64"]).model.context == 64
