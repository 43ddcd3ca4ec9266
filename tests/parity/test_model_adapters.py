"""Adapters: those of `peft`, patterns, added tokens, base weights in 4 bits."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_fixtures
import tokenizer_fixtures
from helpers import curve, losses, refused, train_on_ranks
from windlass import sample, train
from windlass.errors import installed
from windlass.estimate.memory import memory
from windlass.estimate.rank import layout_of
from windlass.evaluation.source import find_source, open_model
from windlass.interop.export import export
from windlass.interop.init_from import load_initial
from windlass.model.build import build_model, read_sizes
from windlass.model.gpt import initialise
from windlass.parallel.ranks import alone
from windlass.recipe import Recipe, RecipeError
from windlass.run import Run

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word"),
]
TEXT = "the cat sat on the mat and the dog ran after the cat " * 40
IDS = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(5))


def base_of(folder: Path, kind: str = "llama", dtype: Any = torch.float32, **changes: Any) -> Path:
    """A tiny model, its tokenizer, and a text."""
    (folder / "text.txt").write_text(TEXT)
    sizes = {"hidden_size": 64, "head_dim": 16} if kind == "llama" else {}
    base = hf_fixtures.save(kind, folder / "base", dtype, **sizes | changes)
    return hf_fixtures.save_tokenizer([TEXT], base)


def recipe_of(folder: Path, run: str = "run", **model: Any) -> Recipe:
    if not (folder / "base").exists():
        base_of(folder)
    tree: dict[str, Any] = {
        "preset": "small",
        "model": {"kind": "hf", "name": str(folder / "base"), "context": 32, **model},
        "data": {"source": str(folder / "text.txt"), "dir": str(folder / "data")},
        "run": {"dir": str(folder / run)},
        "train": {"steps": 4, "global_batch": 4},
        "eval": {"every": 0},
        "checkpoint": {"every": 2},
        "telemetry": {"every": 1},
    }
    return Recipe.from_dict(tree)


def plain(directory: Path) -> Any:
    """The model of a directory in float32, by `transformers` alone."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def adapter_of_peft(base: Path, **options: Any) -> Any:
    """A model with a new adapter, by `peft` alone."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **options)
    return get_peft_model(plain(base), config)


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    """Of a network, or of a run, an export or an adapter that Windlass opens."""
    if isinstance(model, Path):
        model = open_model(find_source(str(model)), alone("cpu"))
    output = model.eval()(ids)
    return output if isinstance(output, Tensor) else output.logits


def begun(recipe: Recipe) -> Any:
    """The network of a recipe with its first weights."""
    model = build_model(recipe, 0, device="cpu")
    if recipe.model.init_from:
        load_initial(model, recipe)
    else:
        initialise(model, 0)
    return model


def distance(one: Any, other: Any) -> float:
    one, other = (x if isinstance(x, Tensor) else logits(x) for x in (one, other))
    return float((one - other).abs().max())


def check_resume(recipe: Recipe) -> Run:
    """The recipe's run, stopped on its way, is bit for bit the run in one go."""
    straight = train(recipe.replace(f"run.dir={recipe.run_dir}-straight"))
    train(recipe, stop_at=2)
    run = train(recipe)
    assert curve(run) == curve(straight)
    return run


def check_exports(
    recipe: Recipe, moved: float, theirs: float = 2e-5, ours: float = 1e-5
) -> tuple[Any, Path]:
    """A trained run's logits are those of its merged export in transformers, and of its adapter in
    peft and here, also as peft saves it. Returns the merged model and the adapter's directory."""
    from peft import PeftModel

    folder = recipe.run_dir.parent
    trained = logits(recipe.run_dir)
    merged = plain(export(recipe.run_dir, folder / "merged"))
    adapter = export(recipe.run_dir, folder / "adapter", adapter=True)
    base = plain(folder / "base")
    assert distance(base, trained) > moved
    peft = PeftModel.from_pretrained(base, adapter)
    peft.save_pretrained(folder / "by-peft")  # with the matrix of an adapted embedding or head
    assert max(distance(model, trained) for model in (merged, peft)) < theirs
    assert max(distance(saved, trained) for saved in (adapter, folder / "by-peft")) < ours
    return merged, adapter


def test_adapters_are_those_of_peft(tmp_path: Path) -> None:
    """Sizes, first logits, resume, merged and separate export, and an adapter that is read back."""
    recipe = recipe_of(tmp_path, "run", lora={"rank": 4, "dropout": 0.1}).replace("optim.lr=1e-2")
    check_resume(recipe)
    assert distance(begun(recipe), plain(tmp_path / "base")) < 1e-5  # B is zero
    reference = adapter_of_peft(tmp_path / "base", target_modules="all-linear")
    trained = sum(p.numel() for p in reference.parameters() if p.requires_grad)
    assert read_sizes(recipe).trained == trained
    _, adapter = check_exports(recipe, moved=1e-3, ours=1e-6)
    # the adapter has the base's tokenizer, and names the base
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (adapter / file).read_bytes() == (tmp_path / "base" / file).read_bytes()
    assert isinstance(next(sample(adapter, "the cat", max_tokens=3, device="cpu"))[1], str)
    card = (adapter / "README.md").read_text()
    assert 'AutoPeftModelForCausalLM.from_pretrained("adapter")' in card
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"r": 8}))
    with refused("does not fit", str(adapter)):
        logits(adapter)
    for key, value in {"layer_replication": [[0, 1]], "use_dora": True, "lora_bias": True}.items():
        (adapter / "adapter_config.json").write_text(json.dumps(settings | {key: value}))
        with refused(key, "merge_and_unload"):
            find_source(str(adapter))


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens", "q_proj"]])
def test_an_adapter_on_a_tied_head_or_embedding_changes_one_use(
    targets: list[str], tmp_path: Path
) -> None:
    """Merged, the matrices differ; alone, it loads in peft and here, also as peft saves it."""
    base_of(tmp_path, tie_word_embeddings=True)
    recipe = recipe_of(tmp_path, lora={"rank": 4, "targets": targets}).replace("optim.lr=1e-1")
    train(recipe)
    merged, _ = check_exports(recipe, moved=1e-2, theirs=1e-4)
    assert not merged.config.tie_word_embeddings and merged.lm_head.weight.shape[0] == 512


PATTERNS: list[tuple[list[str], list[str], dict[str, Any]]] = [
    (["q_proj", "layers.1.mlp.up_proj"], ["lm_head"], {}),
    (["layers.[01].*(q|v)_proj"], ["norm"], {"target_modules": r".*layers\.[01]\..*(q|v)_proj"}),
    (
        ["layers.(0|2).self_attn.(k|o)_proj"],
        ["embed_tokens", "layers.2", "lm_hea."],
        {"target_modules": ["k_proj", "o_proj"], "layers_to_transform": [0, 2]},
    ),
]


@pytest.mark.parametrize(
    ("number", "tied"),
    [
        pytest.param(number, tied, marks=[pytest.mark.full] * (tied != (number == 1)))
        for number in range(len(PATTERNS))
        for tied in (False, True)
    ],
)
def test_patterns_name_the_modules_to_adapt_or_to_train_whole(
    number: int, tied: bool, tmp_path: Path
) -> None:
    """As peft has them; trained, merged, alone, and read again, also as peft saves it."""
    base = base_of(tmp_path, tie_word_embeddings=tied)
    targets, whole, options = PATTERNS[number]
    # peft compares the ends of names, so that `norm` would name every norm
    saved = [{"norm": "model.norm", "lm_hea.": "lm_head"}.get(name, name) for name in whole]
    options = {"target_modules": targets, "modules_to_save": saved, **options}
    reference = adapter_of_peft(base, **options).named_parameters()
    lora = {"rank": 4, "targets": targets, "modules_to_save": whole}
    recipe = recipe_of(tmp_path, lora=lora).replace("optim.lr=1e-2")
    network: Any = build_model(recipe, 0)
    ours = {name for name, p in network.model.named_parameters() if p.requires_grad}
    names = {
        n.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
        for n, p in reference
        if p.requires_grad
    }
    if tied:  # one tensor here, two in peft
        names = {"model.embed_tokens.weight" if n == "lm_head.weight" else n for n in names}
    assert ours == names

    train(recipe)
    merged, _ = check_exports(recipe, moved=0)
    before = dict(plain(base).named_parameters())
    changed = {
        n for n, p in merged.named_parameters() if n in before and not torch.equal(p, before[n])
    }
    assert changed == {
        name.rpartition(".lora_")[0] + ".weight" if ".lora_" in name else name for name in ours
    }


def test_a_pattern_that_names_nothing_or_is_none_is_refused(tmp_path: Path) -> None:
    for key in ("targets", "modules_to_save"):
        with refused(f"model.lora.{key}", "regular expression", error=RecipeError):
            recipe_of(tmp_path, lora={"rank": 4, key: ["(q_proj"]})
        with refused(f"model.lora.{key}", "q_proj"):
            build_model(recipe_of(tmp_path, lora={"rank": 4, key: ["query", "layers.9.*"]}), 0)
    with refused("model.lora.modules_to_save", "model.lora.rank", error=RecipeError):
        recipe_of(tmp_path, lora={"modules_to_save": ["lm_head"]})


def test_an_adapter_that_unties_what_its_base_ties_is_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path, tie_word_embeddings=True)
    both = ["embed_tokens", "lm_head"]
    for names, word in (([both[0]], "lm_head"), (both, "ties")):
        model = adapter_of_peft(base, target_modules=["q_proj"], modules_to_save=names)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "embed_tokens.modules_to_save" in name:
                    parameter.add_(1)
        model.save_pretrained(tmp_path / "unlike")
        with refused(word, "unlike"):
            logits(tmp_path / "unlike")


@pytest.mark.dist
def test_an_adapter_is_trained_further_or_merged_first(tmp_path: Path) -> None:
    """An adapter of `peft`, of a run, of an export, and sharded over two ranks."""
    base, first = base_of(tmp_path), tmp_path / "first"
    torch.manual_seed(1)
    lora = {"targets": ["q_proj", "up_proj"], "modules_to_save": ["lm_head"]}
    peft = adapter_of_peft(base, target_modules=lora["targets"], modules_to_save=["lm_head"])
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    peft.save_pretrained(first)  # without a tokenizer
    further = {"lora": {"rank": 4, **lora}, "init_from": str(first)}
    recipe = recipe_of(tmp_path, "further", **further).replace("optim.lr=1e-2")
    expected = logits(peft)
    assert distance(begun(recipe), expected) < 1e-5
    merged = export(first, tmp_path / "whole")
    assert distance(plain(merged), expected) < 2e-5
    assert (merged / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    with refused("already"):
        export(first, tmp_path / "no", adapter=True)

    run = check_resume(recipe)
    shards = recipe.replace("parallel.strategy=full_shard", f"run.dir={tmp_path}/two")
    losses = [[loss for _, loss in curve(one, "loss")] for one in (run, train_on_ranks(shards))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    _, second = check_exports(recipe, moved=1e-3)
    assert distance(run.path, expected) > 1e-3
    for origin in (run.path, second):
        assert distance(begun(recipe.replace(f"model.init_from={origin}")), run.path) < 1e-5


VOCAB = 300
NEW = ["<|im_start|>", "<|im_end|>"]
WHOLE = ["embed_tokens", "lm_head"]


def talks_of(
    folder: Path, run: str, kind: str = "llama", tied: bool = False, **model: Any
) -> Recipe:
    """Conversations in a template whose special tokens the base's tokenizer lacks."""
    if not (folder / "base").exists():
        hf_fixtures.save(kind, folder / "base", vocab_size=VOCAB, tie_word_embeddings=tied)
        hf_fixtures.save_tokenizer([tokenizer_fixtures.TEXT * 4], folder / "base", vocab=VOCAB)
        path = folder / "base" / "tokenizer_config.json"
        config = json.loads(path.read_text()) | {"chat_template": tokenizer_fixtures.CHATML}
        path.write_text(json.dumps(config))
        talk = [
            {"role": "user", "content": "Who are you?"},
            {"role": "assistant", "content": "a cat"},
        ]
        (folder / "talk.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 20)
    recipe = recipe_of(folder, run, **model).replace("optim.lr=1e-2", "data.format=chat")
    source = {"data.source": str(folder / "talk.jsonl"), "data.add_tokens": NEW}
    return recipe.replace(source).replace({"model.context": 64})


@pytest.mark.parametrize(
    ("kind", "tied", "lora"),
    [
        ("gpt2", True, {}),
        ("llama", False, {"rank": 4, "modules_to_save": WHOLE}),
        ("llama", True, {"rank": 4, "modules_to_save": WHOLE[:1]}),
    ],
)
def test_added_tokens_are_trained_and_exported(
    kind: str, tied: bool, lora: Any, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    recipe = talks_of(tmp_path, "run", kind, tied, lora=lora)
    rows = plain(tmp_path / "base").get_input_embeddings().weight.detach().clone()
    model: Any = build_model(recipe, VOCAB + 2, device="cpu")
    initialise(model, 0)
    table = model.model.get_input_embeddings().weight
    assert torch.equal(table[:VOCAB], rows)
    assert (table[VOCAB:] - rows.mean(0)).abs().max() < 1e-6

    run = train(recipe)
    assert "2 of its rows are new" in run.log_path.read_text()
    merged = export(recipe.run_dir, tmp_path / "merged")
    exports = {merged: plain(merged)}
    if lora:
        adapter = export(recipe.run_dir, tmp_path / "adapter", adapter=True)
        exports[adapter] = AutoPeftModelForCausalLM.from_pretrained(adapter)
    ids = torch.randint(0, VOCAB + 2, (2, 30), generator=torch.Generator().manual_seed(5))
    for place, model in exports.items():
        tokenizer = AutoTokenizer.from_pretrained(place)
        assert tokenizer.convert_tokens_to_ids(NEW) == [VOCAB, VOCAB + 1]
        trained = model.get_input_embeddings().weight[VOCAB:]
        assert ((trained - rows.mean(0)).abs().amax(1) > 1e-3).all()
        ends = json.loads((place / "generation_config.json").read_text())["eos_token_id"]
        assert VOCAB + 1 in ends
        for again in (model, place):
            assert distance(logits(again, ids), logits(recipe.run_dir, ids)) < 2e-5


@pytest.mark.dist
def test_added_tokens_begin_alike_on_shards_and_from_the_seed(tmp_path: Path) -> None:
    recipe = talks_of(tmp_path, "one")
    one = losses(train(recipe))
    shards = recipe.replace("parallel.strategy=full_shard", f"run.dir={tmp_path}/two")
    assert losses(train_on_ranks(shards)) == pytest.approx(one, rel=1e-5)
    fresh = recipe.replace("model.from_scratch=true", f"run.dir={tmp_path}/fresh")
    assert build_model(fresh, VOCAB + 2, device="cpu").vocab == VOCAB + 2  # type: ignore[union-attr]
    assert losses(train(fresh))[0] == pytest.approx(math.log(VOCAB + 2), abs=0.3)


def test_a_frozen_embedding_does_not_learn_added_tokens(tmp_path: Path) -> None:
    recipe = talks_of(tmp_path, "run", lora={"rank": 4})
    with refused("<|im_end|>", "model.lora.modules_to_save=embed_tokens,lm_head"):
        train(recipe)
    with refused("the last 3 tokens", "model.lora.modules_to_save=embed_tokens,lm_head"):
        build_model(recipe.replace("data.add_tokens=[]"), VOCAB + 3)


def test_weights_in_4_bits_need_adapters_and_their_package_and_are_not_trained_whole(
    tmp_path: Path,
) -> None:
    with refused("model.lora.base", "model.lora.rank", error=RecipeError):
        recipe_of(tmp_path, lora={"base": "4bit"})
    for name in ("layers.1", "mlp", "up_proj"):
        lora = {"rank": 4, "base": "4bit", "modules_to_save": [name]}
        with refused("model.lora.modules_to_save", name, "model.lora.base=fp32"):
            build_model(recipe_of(tmp_path, lora=lora), 0)
    if not installed("bitsandbytes"):
        with refused("model.lora.base", "pip install bitsandbytes"):
            train(recipe_of(tmp_path, lora={"base": "4bit", "rank": 4}))


@pytest.mark.skipif(not installed("bitsandbytes"), reason="not run: bitsandbytes is not installed")
def test_adapters_on_weights_in_4_bits_learn_resume_and_are_exported(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, lora={"base": "4bit", "rank": 4})
    wide = recipe_of(tmp_path, "wide", lora={"rank": 4})
    low, whole = losses(check_resume(recipe)), losses(train(wide))
    assert low[-1] < low[0] == pytest.approx(whole[0], abs=0.2)
    assert low[0] != whole[0]
    sizes, full = read_sizes(recipe), read_sizes(wide)
    assert (sizes.total, sizes.trained) == (full.total, full.trained)
    assert sizes.in_4bit > 0.4 * sizes.total
    layout = layout_of(recipe, 1)
    saved = memory(full, 512, layout).parameters - memory(sizes, 512, layout).parameters
    assert saved == sizes.in_4bit * 55 // 16
    assert distance(plain(export(tmp_path / "run", tmp_path / "out")), tmp_path / "run") < 1e-4
