"""The numbers of the published pieces of work that presets stand for, worked out by the plan."""

import pytest

from helpers import refused
from windlass.estimate.calendar import milestones, most_checkpoints, resolve_steps
from windlass.estimate.plan import plan
from windlass.model.size import count
from windlass.optim.schedule import lr_multiplier, phases
from windlass.recipe import Horizon, Recipe
from windlass.study.grid import cells_of, expand, parse_axis
from windlass.study.scale import assignments, scaling_of
from windlass.study.study import load_study

EPOCHS = 500  # training items of the exercises on SQuAD


@pytest.mark.parametrize(
    ("preset", "world", "overrides", "parameters", "steps", "tokens", "warmup", "local_batch"),
    [
        ("c4-30m", 2, [], 29_995_520, 4576, 599_785_472, 46, 256),
        ("c4-29m", 2, ["train.steps=4400"], 28_952_064, 4400, 576_716_800, 44, 256),
        ("c4-29m", 2, [], 28_952_064, 4417, 578_945_024, 44, 256),
        ("shakespeare-char", 1, ["model.vocab=65"], 10_745_088, 5000, 81_920_000, 100, 64),
        ("shakespeare-char", 8, ["model.vocab=65"], 10_745_088, 5000, 655_360_000, 100, 64),
        ("gpt2-124m", 4, [], 124_475_904, 5 * 19_073, 49_998_725_120, 715, 128),
        ("smollm2-135m", 8, [], 134_515_008, 2565, 2_689_597_440, 103, 64),
        ("nanochat-d12", 8, [], 185_617_152, 7080, 3_711_959_040, 0, 32),
    ],
)
def test_steps_parameters_and_tokens(
    preset, world, overrides, parameters, steps, tokens, warmup, local_batch
):
    if preset == "shakespeare-char":  # its batch is of one rank
        overrides = [*overrides, f"train.global_batch={64 * world}"]
    recipe = Recipe.load(preset, overrides)
    found = plan(preset, overrides, world=world, device="A100-80GB")
    assert (found.size.parameters, found.steps) == (parameters, steps)
    assert found.steps * recipe.batch(world).tokens_per_step == tokens
    assert phases(recipe.optim.schedule, Horizon(steps, 0, 1))[0] == warmup
    assert recipe.train.global_batch == local_batch * world
    if preset.startswith("c4"):
        assert found.optimal_tokens == {"c4-30m": 599_910_400, "c4-29m": 579_041_280}[preset]
        events = milestones(recipe, Horizon(steps, 0, 512))
        assert {m.step for m in events if m.what == "evaluation"} >= {100, 200, 4400}


@pytest.mark.parametrize(
    ("shape", "blocks", "total"),
    [  # the models' own cards: Pythia 14M, 31M, 70M, 160M
        ((6, 128, 4), 1_189_888, 14_067_712),
        ((6, 256, 8), 4_739_072, 30_494_720),
        ((6, 512, 8), 18_915_328, 70_426_624),
        ((12, 768, 12), 85_056_000, 162_322_944),
    ],
)
def test_a_recipe_of_pythia_s_shape_has_its_parameters(shape, blocks, total):
    names = ("layers", "width", "heads")
    network = dict(zip(names, shape, strict=True)) | {"context": 2048, "vocab": 50_304}
    network |= {"norm": "layernorm", "position": "rope", "activation": "gelu", "tie_head": False}
    network |= dict.fromkeys(("attn_bias", "ff_bias", "norm_bias"), True)
    settings = Recipe.from_dict({"preset": "pythia", "model": network}).model
    size = count(settings, 50_304)
    assert (size.non_embedding, size.total) == (blocks, total)


def check_optimizer(recipe: Recipe) -> None:
    """The optimizer of the exercises on SQuAD."""
    o = recipe.optim
    assert (o.lr, o.weight_decay, o.betas) == (5e-5, 0.01, (0.9, 0.999))


@pytest.mark.parametrize(
    ("preset", "batch", "steps", "epoch_ends"),
    [
        ("bloom-squad-baseline", 16, 94, [32, 63, 94]),
        ("bloom-560m-squad", 4, 625, [125, 250, 375, 500, 625]),
        ("gpt-squad", 4, 625, [125, 250, 375, 500, 625]),
    ],
)
def test_fine_tuning_is_evaluated_and_saved_at_each_epoch(preset, batch, steps, epoch_ends):
    """Of 93.75 steps transformers makes 93: it leaves out the rest of each epoch, which here is
    trained on.
    """
    recipe = Recipe.load(preset)
    horizon = Horizon(0, EPOCHS, recipe.train.global_batch)
    horizon = Horizon(horizon.steps_in(recipe.train.steps), EPOCHS, recipe.train.global_batch)
    events = milestones(recipe, horizon)
    assert (recipe.train.global_batch, horizon.steps) == (batch, steps)
    assert [m.step for m in events if m.what == "evaluation"] == [0, *epoch_ends]
    assert [m.step for m in events if m.what == "checkpoint"] == epoch_ends
    assert (recipe.data.train_size, recipe.data.eval_size) == (EPOCHS, 50 if batch == 16 else 100)
    assert recipe.train.precision == "auto"
    check_optimizer(recipe)


def test_a_short_run_of_shakespeare_keeps_the_schedule_of_the_long_one():
    """The published run stops at step 100 of 5,000, where the warm-up has just ended; alone it
    would end at a tenth.
    """
    whole = Recipe.load("shakespeare-char")
    changes = "train.global_batch=512", "train.steps=100", "optim.schedule.steps=5000"
    recipe = whole.replace(*changes)
    short, long = Horizon(100, 3921, 512), Horizon(5000, 3921, 64)
    assert recipe.batch(8).tokens_per_step == 131_072 and recipe.train.global_batch == 8 * 64
    for step in (0, 50, 99):
        expected = lr_multiplier(whole.optim.schedule, long, step)
        assert lr_multiplier(recipe.optim.schedule, short, step) == pytest.approx(expected), step
    assert lr_multiplier(recipe.optim.schedule, short, 99) == 1.0
    assert lr_multiplier(whole.optim.schedule, short, 99) < 0.2


def test_quotas_of_gpt2_124m():
    """The last ten, the best, one an epoch and two of stops, which alone come at no multiple of
    250.
    """
    recipe = Recipe.load("gpt2-124m")
    horizon = Horizon(recipe.train.steps, 9_900_000_000 // 1024, 512)  # 99 shards
    every = recipe.checkpoint.keep_every
    kept = [step for step in range(horizon.steps + 1) if horizon.due(every, step)]
    assert kept == [18883, 37766, 56649, 75531, 94414]
    assert (recipe.checkpoint.keep_last, recipe.checkpoint.keep_best) == (10, True)
    saves = {m.step for m in milestones(recipe, horizon) if m.what == "checkpoint"}
    assert saves >= {250, 500, 95_250, *kept, horizon.steps}
    assert most_checkpoints(recipe, horizon) == 10 + 4 + 1 + 1, (
        "four epochs before the last ten, one being written"
    )
    assert lr_multiplier(recipe.optim.schedule, horizon, horizon.steps) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        # ranks, samples of a step on each, steps of the run, layers of a model of our own
        ("bloom-squad-strategies", [(4, 4, 32, 0)]),
        ("bloom-squad-scaling", [(1, 4, 625, 0), (2, 4, 313, 0), (4, 4, 157, 0), (8, 4, 79, 0)]),
        ("gpt-squad-scaling", [(1, 4, 625, 3), (2, 4, 313, 3), (4, 4, 157, 3), (8, 4, 79, 3)]),
        ("gpt-squad-weak", [(2, 8, 157, 3), (4, 4, 157, 6), (8, 2, 157, 12), (16, 1, 157, 24)]),
    ],
)
def test_cells_of_scaling_studies(name, wanted):
    base, options, _ = load_study(name, "scale")
    worlds = options.pop("worlds")
    scaling = scaling_of(None, **options)
    found = []
    for cell in cells_of(base, assignments(base, scaling, worlds)):
        own, layers = cell.recipe, cell.recipe.model.layers if "gpt" in name else 0
        steps = Horizon(0, EPOCHS, own.train.global_batch).steps_in(own.train.steps)
        found.append((cell.world, own.train.global_batch // cell.world, steps, layers))
        assert own.batch(cell.world, "cuda").accumulation == (1 if name == "gpt-squad-weak" else 4)
        assert (own.data.train_size, own.data.eval_size, own.model.context) == (EPOCHS, 100, 512)
        check_optimizer(own)
        assert (own.eval.every, own.eval.suites) == ("1 epoch", ["loss"])
        assert own.checkpoint.best == "loss"
        assert name == "bloom-squad-strategies" or own.parallel.strategy == "full_shard"
    assert [*dict.fromkeys(found)] == wanted


@pytest.mark.parametrize(
    ("name", "rates", "steps", "strategy"),
    [
        ("c4-30m-grid", [3e-4, 1e-3, 3e-3, 1e-2], 4576, "full_shard"),
        ("c4-29m-grid", [1e-2, 1e-3, 1e-4], 4400, "ddp"),
    ],
)
def test_grids_of_learning_rates(name, rates, steps, strategy):
    base, options, _ = load_study(name, "sweep")
    cells = expand(base, map(parse_axis, options["axes"]))
    assert [cell.recipe.optim.lr for cell in cells] == rates and options["world"] == 2
    for own in (cell.recipe for cell in cells):
        assert (resolve_steps(own), own.parallel.strategy, own.eval.every) == (steps, strategy, 100)
        assert own.batch(2, "cuda").global_batch // 2 == 256


def test_a_preset_of_studies_is_named_with_its_recipe():
    with refused("c4-29m-grid", "sweep", "its recipe, c4-29m"):
        Recipe.load("c4-29m-grid")
