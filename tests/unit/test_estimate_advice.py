"""Each advice of a plan, and of the message when memory runs out, lowers the planned memory; the
guide's table of cards is what a plan says.
"""

import re
from pathlib import Path

import pytest

import hf_fixtures
from windlass.estimate.advice import PlannedMemory, advise, savings
from windlass.estimate.devices import USABLE
from windlass.estimate.inputs import PlanInputs, read_inputs
from windlass.estimate.plan import plan
from windlass.recipe import Recipe, typed

WIDE = {"layers": 4, "width": 1024, "heads": 8, "context": 256, "vocab": 20_000}
OWN = {f"model.{key}": value for key, value in WIDE.items()}
OWN |= {"train.steps": 10, "train.global_batch": 8, "data.tokenizer": "byte"}
CASES = {
    "gpt": OWN,
    "micro-batch": OWN | {"train.micro_batch": 8},
    "several ranks": OWN | {"world": 4, "parallel.strategy": "ddp"},
    "pipeline": OWN | {"world": 4, "parallel.pipeline": 2, "model.context": 2048},
    "fp32": OWN | {"train.precision": "fp32"},
    "muon": OWN | {"optim.kind": "muon"},
    "already low": OWN | {"optim.kind": "adamw8bit", "train.master": "bf16"},
    "all weights": {"model.name": "float32"},
    "adapters": {"model.name": "float32", "model.lora.rank": 8},
    "adapters of bf16": {"model.name": "bfloat16", "model.lora.rank": 8},
    "frozen": {"model.name": "float32", "model.freeze": ["model.layers.0.mlp.*"]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Configurations of a Llama by the precision of its files."""
    folder = tmp_path_factory.mktemp("models")
    shape = {"vocab_size": 4000, "hidden_size": 128, "intermediate_size": 256}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    for dtype in ("float32", "bfloat16"):
        config = hf_fixtures.config("llama")
        config.update(shape | {"dtype": dtype})
        config.save_pretrained(folder / dtype)
    return folder


def inputs(case, models) -> PlanInputs:
    settings = dict(CASES[case])
    world = settings.pop("world", 1)
    if name := settings.get("model.name"):
        settings |= {"model.kind": "hf", "model.name": str(models / name), "model.context": 128}
        settings |= {"train.global_batch": 8, "data.tokenizer": "byte", "train.steps": 10}
    recipe = Recipe().replace(settings)
    return read_inputs(recipe, world=world, device="RTX-4090", activations=True)


@pytest.mark.parametrize("case", CASES)
def test_every_advice_lowers_the_memory_and_advised_settings_fit(case, models):
    planned = PlannedMemory(inputs(case, models))
    own, before = planned.inputs, planned.of({})
    changes = list(savings(own.recipe, own.world, True, own.counted))
    for change in changes:
        # The gathered tables of a small model are larger than its weights.
        if "parallel.offload" in change and own.counted:
            continue
        after = planned.of(change)
        assert after is not None and after.total < before.total, change
    keys = [set(change) for change in changes]
    trains_most = case not in ("muon", "already low", "adapters", "adapters of bf16")
    assert ({"optim.kind"} in keys) == trains_most
    assert ({"model.lora.base"} in keys) == case.startswith("adapters")
    assert ({"model.frozen_precision"} in keys) == (case in ("adapters", "frozen"))
    assert ({"train.master"} in keys) == ((trains_most and case != "fp32") or case == "muon")
    for part in (0.8, 0.3):
        usable = int(part * before.total)
        settings, text = advise(planned, usable)
        if not settings:
            assert "nothing fits: the least is" in text and "device with more than" in text
            every = planned.of({key: value for change in changes for key, value in change.items()})
            assert every is None or every.total > usable
            continue
        assert planned.of(settings).total <= usable and "a rank takes" in text
        for key in settings.keys() - {"parallel.strategy"}:  # each is necessary
            fewer = planned.of({k: v for k, v in settings.items() if k != key})
            assert fewer is None or fewer.total > usable, (key, settings)


def test_a_plan_that_does_not_fit_has_no_time_and_names_what_does(models):
    lora = ["model.kind=hf", f"model.name={models / 'float32'}", "model.lora.rank=8"]
    lora += ["model.context=128", "train.micro_batch=8", "train.global_batch=8", "train.steps=10"]
    whole = plan("bloom-560m-squad", lora, device="RTX-4090")
    assert whole.seconds and whole.recommended == {} and "own layout" in whole.advice
    needed = next(row for row in whole.memory if row.chosen).memory.total
    card = {"device": "RTX-4090", "memory_bytes": int(0.9 * needed)}
    small = plan("bloom-560m-squad", lora, **card)
    assert small.seconds is None and "does not fit" in small.unknown["time"] and small.recommended
    changed = [*lora, *(f"{key}={value}" for key, value in small.recommended.items())]
    again = plan("bloom-560m-squad", changed, **card)
    assert next(row for row in again.memory if row.chosen).fits and again.seconds


PAGE = Path(__file__).parents[2] / "docs" / "guides" / "finetune.md"
SHAPES = {
    "1.7B": {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12_288},
    "14B": {"hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 17_408},
    "32B": {"hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25_600},
}
HEADS = {"1.7B": 16, "8B": 32, "14B": 40, "32B": 64}
METHODS = {
    "LoRA": {"model.lora.rank": 16},
    "4-bit": {"model.lora.rank": 16, "model.lora.base": "4bit"},
    "all weights": {},
    "bf16": {"train.master": "bf16"},
    "8-bit": {"optim.kind": "adamw8bit"},
    "offload": {"parallel.strategy": "full_shard", "parallel.offload": True},
}


def cells() -> list[tuple[int, str, str, float]]:
    """Card, model, method and GB of each entry of the guide's table."""
    found = []
    heads, *rows = re.findall(r"^\| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)[:6]
    for row in rows:
        card, *columns = row.split("|")
        for model, column in zip(heads.split("|")[1:], columns, strict=True):
            for method, size in re.findall(r"([^;|]+?), ([\d.]+) GB", column):
                found.append((int(card.split()[0]), model.strip(), method.strip(), float(size)))
    return found


@pytest.mark.full  # a pass with fake tensors takes up to 20 s
@pytest.mark.parametrize(
    ("model", "method"), dict.fromkeys((model, method) for _, model, method, _ in cells())
)
def test_the_guides_table_of_cards_is_planned(model, method, tmp_path):
    """Qwen3's shapes, whose files are in bf16."""
    config = hf_fixtures.config("qwen3", **SHAPES[model], num_attention_heads=HEADS[model])
    tied = model == "1.7B"
    sizes = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "dtype": "bfloat16"}
    config.update({**sizes, "max_position_embeddings": 40_960, "tie_word_embeddings": tied})
    config.save_pretrained(tmp_path)
    settings = {"model.kind": "hf", "model.name": str(tmp_path), "model.context": 2048}
    settings |= {"train.micro_batch": 2, "train.precision": "bf16", "data.tokenizer": "byte"}
    settings |= {"parallel.activation_checkpointing": "full", "train.steps": 10}
    for word in re.split(", | and ", method):
        settings |= METHODS[word]
    own = read_inputs(Recipe().replace(settings), world=1, device="RTX-4090", activations=True)
    total = PlannedMemory(own).of({}).total
    for card, size in [(c, s) for c, m, how, s in cells() if (m, how) == (model, method)]:
        assert total / 1e9 == pytest.approx(size, abs=0.06)
        assert total <= USABLE * card * 2**30


@pytest.mark.parametrize(
    "own",
    [
        ["parallel.strategy=full_shard", "parallel.offload=true"],
        ["parallel.strategy=hybrid_shard", "parallel.shard_size=2"],
        ["parallel.activation_checkpointing=full"],
    ],
)
def test_recommended_settings_undo_what_a_recipe_does_not_need(own):
    wanted = plan("gpt2-124m", own, world=4, device="H100").recommended
    changed = [*own, *(f"{key}={typed(value)}" for key, value in wanted.items())]
    again = plan("gpt2-124m", changed, world=4, device="H100")
    [row] = [row for row in again.memory if row.chosen]
    assert (row.layout.strategy, row.layout.checkpointing, row.layout.offload) == ("ddp", "none", 0)
    assert row.fits and again.recommended == {}
