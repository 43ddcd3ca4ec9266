import json
import re
import tomllib
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import refused, windlass
from windlass.errors import UserError
from windlass.estimate.calendar import occurrences, optimal_steps
from windlass.recipe import (
    Horizon,
    Recipe,
    RecipeError,
    parse_override,
    plan_batch,
    presets,
    settings,
)
from windlass.recipe.explain import explain
from windlass.recipe.keys import other_tools, values
from windlass.recipe.layers import located
from windlass.recipe.units import epochs_in

SUITES = 'eval.suites=["loss","squad"]'


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_loads_and_survives_its_own_toml(name):
    recipe = Recipe.load(name)
    assert recipe.preset == name
    assert Recipe.model_validate(tomllib.loads(recipe.toml())) == recipe


def test_every_setting_is_documented_with_the_values_that_it_takes():
    assert [key for key, field in settings().items() if not field.description] == []
    words = {key: values(field) for key, field in settings().items()}
    assert "1 epoch" in words["checkpoint.every"] and words["model.layers"] == "integer >= 1"
    assert words["train.compile"] == 'boolean or "auto"'
    assert all(words.values())


def test_overrides_take_toml_values_and_plain_text():
    overrides = "optim.lr=3e-4 model.norm=rmsnorm optim.betas=[0.8,0.9] train.compile=true"
    recipe = Recipe.load("quickstart", overrides.split())
    assert (recipe.optim.lr, recipe.optim.betas) == (3e-4, (0.8, 0.9))
    assert recipe.model.norm == "rmsnorm" and recipe.train.compile
    assert Recipe.load("quickstart", ["train.steps=1e4"]).train.steps == 10_000
    assert parse_override("data.source=a b=c") == ("data.source", "a b=c")
    assert parse_override("run.name=2024-01-01") == ("run.name", "2024-01-01")
    for key in ("checkpoint.resume", "run.notes", "data.source"):  # a number is text here
        assert Recipe.load("quickstart", [f"{key}=700"]).flat()[key] == "700"


def problems(*overrides: str) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        Recipe.load("quickstart", overrides)
    return dict(caught.value.problems)


def test_all_problems_are_reported_together():
    found = problems(
        *"optim.lrr=1 train.steps=0 data.order=foo checkpoint.every=1.5 lr=2 train.n=2".split()
    )
    assert set(found) == set("optim.lrr train.steps data.order checkpoint.every lr train.n".split())
    assert all(order in found["data.order"] for order in ("shuffled", "sequential", "foo"))


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("batch_size", "train.global_batch"),
        ("train.max_iters", "train.steps"),
        ("lr", "optim.lr"),
        ("lora.rank", "model.lora.rank"),
        ("bf16", "train.precision=bf16"),
        ("optim.lrr", "optim.lr"),
        ("modle.layers", "model.layers"),
        ("schedule.kind", "optim.schedule.kind"),
        ("lr_scheduler.min_lr_factor", "optim.schedule.final"),
        ("name", "run.name or model.name"),
        ("model.seq_len", "model.context"),
    ],
)
def test_a_wrong_key_is_answered_with_the_setting_that_was_meant(key, ours):
    text = problems(f"{key}=1")[key].partition("; ")[2]
    assert text.startswith((f"write {ours}", f"did you mean {ours}?")), text


def test_what_windlass_does_not_have_is_said_and_where_nothing_is_sure_no_key_is_suggested():
    for key, words in (
        ("rl", ["Windlass does not have it", "reinforcement", "DPO"]),
        ("train.ema_decay", ["train.average"]),
        ("train.backend", ["parallel.strategy=ddp", "NCCL"]),
    ):
        assert all(word in problems(f"{key}=1")[key] for word in words), key
    unsure = ("train.foo", "model.zz", "zzz", "data.xyz", "optim.x", "telemetry.interval")
    for key, text in problems(*(f"{key}=1" for key in unsure)).items():
        assert "there are" in text and "did you mean" not in text and "write" not in text, key


def test_a_wrong_table_is_answered_key_by_key(tmp_path):
    (tmp_path / "mine.toml").write_text(
        "[lora]\nr = 8\n[trainer]\nmax_steps = 3\nnonsense = 1\n[train]\nsteps = 4\n"
    )
    with pytest.raises(RecipeError) as caught:
        Recipe.load(tmp_path / "mine.toml")
    found = dict(caught.value.problems)
    assert list(found) == ["lora.r", "trainer.max_steps", "trainer.nonsense"]
    assert "model.lora.rank" in found["lora.r"] and "train.steps" in found["trainer.max_steps"]


def test_every_answer_about_another_tools_key_names_settings_that_there_are():
    fields = settings()
    for tool, keys in other_tools().items():
        for theirs, (ours, remark) in keys.items():
            assert (ours or remark) and theirs not in fields, (tool, theirs)
            key, _, value = ours.partition("=")
            if value:  # and it is a value that the setting takes
                Recipe.load("quickstart", [ours])
            assert not ours or key in fields, (tool, theirs)
            for named in re.findall(rf"\b(?:{'|'.join(Recipe.model_fields)})\.[a-z_.]+\b", remark):
                assert any(f"{k}.".startswith(f"{named}.") for k in fields), (tool, theirs, named)


def test_a_list_is_taken_as_a_shell_leaves_it():
    for text in ("wandb", "[wandb]", '["wandb"]', "'wandb'", "[wandb, mlflow]", "[]"):
        trackers = [name for name in ("wandb", "mlflow") if name in text]
        recipe = Recipe.load("quickstart", [f"telemetry.trackers={text}"])
        assert recipe.telemetry.trackers == trackers
    recipe = Recipe.load("quickstart", ["eval.suites=lm-eval:a,b", "model.freeze=a.[01].*,*.[23]"])
    assert (recipe.eval.suites, recipe.model.freeze) == (["lm-eval:a,b"], ["a.[01].*", "*.[23]"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.betas=[1.5,0.9]", ("less than 1", "1.5")),
        ("telemetry.trackers=comet", ("tensorboard", "mlflow", "wandb", "comet")),
        ("optim.lr=0", ("greater than 0", "0")),
        ("optim.betas=0.9,0.95", ("optim.betas=[0.9,0.95]", "list of")),
        ("optim.betas=[0.9]", ("optim.betas=[0.9,0.95]",)),
        ("data.columns=instruction:question", ("data.columns.instruction=question",)),
        ("optim.kind=AdamW", ("did you mean adamw?",)),
        ("model.lora.rank=8", ('model.kind = "hf"',)),
        ("train=3", ("section", "train.steps")),
        ("train.steps=1.5", ("4576", "1 epoch")),
        ("data.source=true", ("string", "list", "true")),
        ("data.sha256=xx", ("0-9a-f",)),
    ],
)
def test_a_wrong_value_is_answered_with_what_the_setting_takes(override, words):
    [(key, text)] = problems(override).items()
    assert override.startswith(key) and all(word in text for word in words), text
    assert "?," not in text and ("run.name" in text) == ("model.name" in override), text


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        ("eval.suites=loss,trivia", "eval.suites", "hellaswag"),
        ("model.width=100 model.heads=3", "model.heads", "nearest"),
        ("model.heads=4 model.kv_heads=3", "model.kv_heads", "write 2"),
        ("train.global_batch=10 train.micro_batch=4", "train.micro_batch", "write 2 or 5"),
        ("data.tokenizer=hf:", "data.tokenizer", "hf:"),
        ("model.vocab=200", "model.vocab", "257"),
        ("parallel.offload=true parallel.strategy=shard_optim", "parallel.offload", "FSDP2"),
        ("model.kind=hf", "model.name", "directory"),
        ("data.source=https://x.example/a.txt", "data.sha256", "SHA-256"),
        ("data.eval_source=https://x.example/a.txt", "data.eval_source", "download it"),
        ("data.eval_source=shards:*.bin data.format=chat", "data.format", "token shards"),
        ('data.source=["hf:a","b.jsonl"] data.eval_split=x', "data.eval_split", "data.eval_source"),
        ("data.source=", "data.source", "empty"),
        ("data.source=squad", "data.format", "squad"),
        ("data.source=shards:a.bin data.format=chat", "data.format", 'write "text"'),
        ("data.source=hf:a data.separator=<end>", "data.separator", "drop it"),
        ("data.answers=last", "data.answers", 'data.format = "chat"'),
        ("parallel.shard_size=2", "parallel.shard_size", "hybrid_shard"),
        ("parallel.pipeline=4 train.global_batch=2", "train.micro_batch", "larger train.global"),
        (
            "parallel.strategy=hybrid_shard parallel.shard_size=3",
            "train.micro_batch",
            "write 6 or 9",
        ),
        ("checkpoint.best=squad.f1", "checkpoint.best", SUITES),
        (f"{SUITES} checkpoint.best=f1", "checkpoint.best", "exact_match"),
    ],
)
def test_impossible_combinations_are_found_before_anything_starts(overrides, key, says):
    assert says in problems(*overrides.split())[key]


def test_a_name_that_takes_nothing_from_the_preset_is_answered_with_extends(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('preset = "quickstart"\n[train]\nsteps = 5\n')
    with refused('extends = "quickstart"'):
        Recipe.load(file)
    with refused('extends = "quickstart"'):
        Recipe.from_dict({"preset": "quickstart", "train.steps": 5})
    whole = Recipe.load("quickstart", {"train.steps": 5})
    file.write_text(whole.toml())
    assert Recipe.load(file) == whole == Recipe.from_dict(whole.tree())


def test_a_file_extends_a_preset_or_a_file_beside_it(tmp_path):
    (tmp_path / "base.toml").write_text('extends = "quickstart"\n[optim]\nlr = 0.5\n')
    # as Notepad writes it, with a byte order mark
    (tmp_path / "mine.toml").write_text('\ufeffextends = "base.toml"\n[train]\nsteps = 7\n')
    recipe = Recipe.load(tmp_path / "mine.toml", ["model.dropout=0.1"])
    assert (recipe.preset, recipe.optim.lr, recipe.train.steps) == ("mine", 0.5, 7)
    assert recipe.model.dropout == 0.1
    assert recipe.model.width == Recipe.load("quickstart").model.width


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"),
    [
        ("loop.toml", [], ("loop.toml", "extends")),
        ("bad.toml", [], ("bad.toml", "TOML", "line 2", "quotation marks")),
        ("latin.toml", [], ("latin.toml", "line 2", "UTF-8")),
        ("no.toml", [], ("no.toml", "quickstart")),
        ("quickstrat", [], ("did you mean quickstart?",)),
        ("wiki.txt", [], ("windlass train quickstart data.source=wiki.txt",)),
        ("config.yaml", [], ("TOML", "windlass init")),
        ("empty", [], ("empty is a directory without a recipe",)),
        ("model", [], ("model.kind=hf model.name=model",)),
        ("optim.lr=3", [], ("is a setting", "quickstart optim.lr=3")),
        ("quickstart", ["optim.lr"], ("optim.lr", "KEY=VALUE")),
        ("quickstart", ["optim.lr=2", "optim.lr.x=1"], ("optim.lr.x", "not a section")),
    ],
)
def test_what_cannot_be_read_is_one_message(tmp_path, monkeypatch, recipe, overrides, words):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "loop.toml": 'extends = "loop.toml"\n',
        "bad.toml": "[train]\nprecision = bf16\n",
        "wiki.txt": "[train\n",
        "config.yaml": "a: 1\n",
        "model/config.json": "{}",
        "empty/x": "",
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    Path("latin.toml").write_bytes(b"[run]\nnotes = 'caf\xe9'\n")
    with refused(*words):
        Recipe.load(recipe, overrides)


def test_the_config_hash_is_of_the_semantic_settings():
    base = Recipe.load("quickstart")
    same = "run.dir=x run.notes=y checkpoint.every=3 telemetry.every=1 data.workers=3".split()
    same += ["parallel.strategy=full_shard", "train.micro_batch=2"]
    other = "optim.lr=1 run.seed=2 train.steps=9 model.dropout=0.5 data.order=sequential".split()
    assert {base.replace(o).config_hash for o in same} == {base.config_hash}
    assert len({base.config_hash, *(base.replace(o).config_hash for o in other)}) == 1 + len(other)
    assert base.name == f"quickstart-{base.config_hash[:8]}"
    assert str(base.run_dir) == f"runs/{base.name}"
    assert base.replace({"run.dir": "~/x"}).run_dir == Path.home() / "x"


def test_batch_arithmetic():
    for world, micro, wanted in ((1, 0, (16, 1)), (2, 0, (8, 1)), (2, 4, (4, 2)), (4, 2, (2, 2))):
        plan = plan_batch(16, micro, world, context=128)
        assert (plan.micro_batch, plan.accumulation) == wanted
        assert plan.tokens_per_step == 16 * 128


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 4))
def test_micro_batches_are_divided_round_robin_and_none_is_lost(world, micro, accumulation):
    plan = plan_batch(world * micro * accumulation, micro, world, context=8)
    for rank in range(world):
        own = [k for k in range(world * accumulation) if k % world == rank]
        assert list(plan.micro_batches(rank)) == own
        assert len(plan.micro_batches(rank)) == plan.accumulation


def test_an_uneven_batch_names_the_sizes_that_work():
    with pytest.raises(UserError, match=r"train\.global_batch.* 63 or 66"):
        Recipe.load("quickstart", ["train.global_batch=64"]).batch(3)
    with pytest.raises(UserError, match=r"32 sequences .* each of 2 data ranks .* write 16 or 32"):
        plan_batch(64, 20, 2, context=8)
    text = problems("train.global_batch=64", "train.micro_batch=60")["train.micro_batch"]
    # `--world` is not known where a recipe is read
    assert "rank" not in text and "write 32 or 64" in text


@given(st.integers(1, 9), st.integers(1, 400), st.fractions(Fraction(1, 4), 3))
def test_epochs_end_where_the_samples_say(size, samples, epochs):
    epochs = Fraction(round(epochs * 100), 100)
    horizon = Horizon(50, samples, size)
    every, period = f"{float(epochs)} epochs", epochs * samples
    fired = [s for s in range(51) if horizon.due(every, s)]
    assert occurrences(horizon, every) == fired
    done = [size * s for s in range(51)]
    assert fired == [s for s in range(1, 51) if done[s] // period > done[s - 1] // period]
    if done[-1] >= period:
        assert done[horizon.steps_in(every)] >= period > done[horizon.steps_in(every) - 1]
        last = horizon.steps_before_last(every)
        assert done[-1] - done[last] >= period > done[-1] - done[last + 1]


def test_compute_optimal_steps_stay_within_the_tokens():
    recipe = Recipe.load("quickstart")
    steps, each = optimal_steps(recipe, 50_000), recipe.model.context * recipe.train.global_batch
    assert steps * each <= 20 * 50_000 < (steps + 1) * each


def test_durations_in_steps_fractions_and_never():
    horizon = Horizon(steps=1000, samples_per_epoch=300, samples_per_step=16)
    assert [s for s in range(1001) if horizon.due(0.25, s)] == [250, 500, 750, 1000]
    assert [s for s in range(1001) if horizon.due(400, s)] == [400, 800]
    assert not any(horizon.due(never, s) for never in (0, 0.0) for s in range(1001))
    # a share is at least twenty steps: a short run saves once, not at every second step
    for steps, share, due in ((16, 0.1, [16]), (50, 0.1, [20, 40]), (50, 0.5, [25, 50])):
        horizon = Horizon(steps, samples_per_epoch=300, samples_per_step=16)
        assert [s for s in range(steps + 1) if horizon.due(share, s)] == due
    horizon = Horizon(steps=1000, samples_per_epoch=300, samples_per_step=16)
    assert (horizon.steps_in(0.01), horizon.steps_in("1 epoch"), horizon.steps_in(7)) == (10, 19, 7)
    assert epochs_in("2.5 epochs") == Fraction(5, 2)


def test_explain_says_what_a_setting_takes(tmp_path, monkeypatch):
    for key in (*settings(), *Recipe.model_fields):
        assert explain(key).startswith(key)
    assert explain("optim.lr").startswith("optim.lr = 0.001\nPeak learning rate")
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('extends = "shakespeare-char-fast"\n[optim]\nlr = 0.5\n')
    text = explain("optim.lr", "mine.toml", ["optim.lr=0.25"])
    assert text.startswith("optim.lr = 0.25\n")
    assert "number > 0" in text and "default   0.001" in text
    assert "`heads`" in explain("model.kv_heads")
    overview = explain("optim", "mine.toml")
    assert "optim.lr = 0.5 " in overview and "optim.schedule.warmup = 0.02" in overview
    assert "train." not in overview
    with refused("learning_rate", "optim.lr"):
        explain("learning_rate")


def test_numbers_are_finite():
    """`lineage.json` could not hold them, and the run would not open again."""
    changes = ("train.grad_clip=inf", "optim.lr=nan", "eval.every=nan", "checkpoint.every=inf")
    assert problems(*changes).keys() == {change.partition("=")[0] for change in changes}


def test_urls_are_no_paths(tmp_path):
    for prefix in ("", "shards:"):
        for scheme in ("s3", "gs", "hf", "https"):
            source = f"{prefix}{scheme}://bucket/train-*.bin"
            assert located("data.source", source, tmp_path) == source
        local = located("data.source", f"{prefix}train.bin", tmp_path)
        assert local == f"{prefix}{tmp_path}/train.bin"


def test_the_version_and_the_schema():
    assert windlass("--version").stdout.split()[0] == "windlass"
    shown = windlass("recipe", "quickstart", "optim.lr=1", "--explain", "optim.lr").stdout
    assert shown.startswith("optim.lr = 1.0\nPeak learning rate")
    assert "Peak learning rate" in json.dumps(json.loads(windlass("recipe", "--schema").stdout))


@pytest.mark.parametrize("key", ["data.columns", "data.chat_template_kwargs"])
def test_an_empty_table_empties_a_setting_and_changes_no_section(key, tmp_path):
    name = key.partition(".")[2]
    plain = Recipe().replace("data.format=chat", "data.chat_template=x")
    full = plain.replace(f"{key}.a=b")
    assert getattr(full.data, name) == {"a": "b"}
    section = {"data": {name: {}}}
    for emptied in (full.replace({key: {}}), full.replace(f"{key}={{}}"), full.replace(section)):
        assert emptied == plain
    (tmp_path / "first.toml").write_text(f"data.format = 'chat'\n[{key}]\na = 'b'\n")
    (tmp_path / "second.toml").write_text(f"extends = 'first.toml'\n[optim]\n[{key}]\n")
    assert getattr(Recipe.load(tmp_path / "second.toml").data, name) == {}
    assert getattr(Recipe.load(tmp_path / "first.toml", {key: {}}).data, name) == {}
    for unchanged in ({"data": {}}, {"model.lora": {}}, {"data.no_such_setting": {}}):
        assert full.replace(unchanged) == full
    assert full.replace({"optim": {"lr": 3e-2}}, f"{key}.c=d").flat()[f"{key}.c"] == "d"
