"""Adapters: those of `peft`, patterns, added tokens, base weights in 4 bits."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "dist"))

from harness import train_on_ranks

import hf_fixtures
import tokenizer_fixtures
from helpers import curve, refused
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


def base_of(folder: Path, **changes: Any) -> Path:
    text = "the cat sat on the mat and the dog ran after the cat " * 40
    (folder / "text.txt").write_text(text)
    base = hf_fixtures.save("llama", folder / "base", hidden_size=64, head_dim=16, **changes)
    return hf_fixtures.save_tokenizer([text], base)


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


IDS = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(5))


def opened(place: object) -> Any:
    """The model of a run, an export or an adapter."""
    return open_model(find_source(str(place)), alone("cpu")).eval()


def check_resume(recipe: Recipe) -> Run:
    """The recipe's run, stopped on its way, is bit for bit the run in one go."""
    straight = train(recipe.replace(f"run.dir={recipe.run_dir}-straight"))
    train(recipe, stop_at=2)
    run = train(recipe)
    assert curve(run) == curve(straight)
    return run


PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@PEFT
def test_adapters_are_those_of_peft(tmp_path: Path) -> None:
    """Sizes, first logits, resume, merged and separate export, and an adapter that is read back."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="sdpa")

    recipe = recipe_of(tmp_path, "run", lora={"rank": 4, "dropout": 0.1}).replace("optim.lr=1e-2")
    check_resume(recipe)
    begun: Any = build_model(recipe, 0, device="cpu").eval()
    initialise(begun, 0)
    with torch.no_grad():  # B is zero
        assert (begun(IDS) - base()(IDS).logits).abs().max() < 1e-5

    config = LoraConfig(r=4, target_modules="all-linear", lora_alpha=16)
    reference = get_peft_model(base(), config)
    trained = sum(p.numel() for p in reference.parameters() if p.requires_grad)
    assert read_sizes(recipe).trained == trained

    merged = export(recipe.run_dir, tmp_path / "merged")
    adapter = export(recipe.run_dir, tmp_path / "adapter", adapter=True)
    models = [
        AutoModelForCausalLM.from_pretrained(merged),
        PeftModel.from_pretrained(base(), adapter),
    ]
    with torch.no_grad():
        ours = opened(recipe.run_dir)(IDS)
        again = opened(adapter)(IDS)
        assert (again - ours).abs().max() < 1e-6
        assert (base()(IDS).logits - ours).abs().max() > 1e-3
        for model in models:
            assert (model.eval()(IDS).logits - ours).abs().max() < 2e-5
    # the adapter has the base's tokenizer, and names the base
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (adapter / file).read_bytes() == (tmp_path / "base" / file).read_bytes()
    assert isinstance(next(sample(adapter, "the cat", max_tokens=3, device="cpu"))[1], str)
    card = (adapter / "README.md").read_text()
    assert 'AutoPeftModelForCausalLM.from_pretrained("adapter")' in card
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"r": 8}))
    with refused("does not fit", str(adapter)):
        opened(adapter)


@PEFT
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word")
@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens", "q_proj"]])
def test_an_adapter_on_a_tied_head_or_embedding_changes_one_use(
    targets: list[str], tmp_path: Path
) -> None:
    """Merged, the matrices differ; alone, it loads in peft and here, also as peft saves it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base_of(tmp_path, tie_word_embeddings=True)
    recipe = recipe_of(tmp_path, lora={"rank": 4, "targets": targets}).replace("optim.lr=1e-1")
    train(recipe)
    merged = AutoModelForCausalLM.from_pretrained(export(recipe.run_dir, tmp_path / "merged"))
    adapter = export(recipe.run_dir, tmp_path / "adapter", adapter=True)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain = base(IDS).logits
    peft = PeftModel.from_pretrained(base, adapter).eval()
    peft.save_pretrained(tmp_path / "by-peft")  # with the matrix of the adapted layer
    with torch.no_grad():
        ours = opened(recipe.run_dir)(IDS)
        assert (plain - ours).abs().max() > 1e-2
        for model in (merged.eval(), peft):
            assert (model(IDS).logits - ours).abs().max() < 1e-4
        for directory in (adapter, tmp_path / "by-peft"):
            again = opened(directory)
            assert (again(IDS) - ours).abs().max() < 1e-5
    assert not merged.config.tie_word_embeddings and merged.lm_head.weight.shape[0] == 512
    config = json.loads((adapter / "adapter_config.json").read_text())
    for key, value in {"layer_replication": [[0, 1]], "use_dora": True, "lora_bias": True}.items():
        (adapter / "adapter_config.json").write_text(json.dumps(config | {key: value}))
        with refused(key, "merge_and_unload"):
            find_source(str(adapter))


def adapter_of_peft(base: Path, **options: Any) -> Any:
    """A model with a new adapter, by `peft` alone."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **options)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)


PATTERNS: list[tuple[list[str], list[str], dict[str, Any]]] = [
    (["q_proj", "layers.1.mlp.up_proj"], ["lm_head"], {}),
    (["layers.[01].*(q|v)_proj"], ["norm"], {"target_modules": r".*layers\.[01]\..*(q|v)_proj"}),
    (
        ["layers.(0|2).self_attn.(k|o)_proj"],
        ["embed_tokens", "layers.2", "lm_hea."],
        {"target_modules": ["k_proj", "o_proj"], "layers_to_transform": [0, 2]},
    ),
]


@PEFT
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word")
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
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = base_of(tmp_path, tie_word_embeddings=tied)
    targets, whole, options = PATTERNS[number]
    options = {"target_modules": targets, **options}
    # peft compares the ends of names, so that `norm` would name every norm
    saved = [{"norm": "model.norm", "lm_hea.": "lm_head"}.get(name, name) for name in whole]
    reference = adapter_of_peft(base, **options, modules_to_save=saved)
    lora = {"rank": 4, "targets": targets, "modules_to_save": whole}
    recipe = recipe_of(tmp_path, lora=lora).replace("optim.lr=1e-2")
    network: Any = build_model(recipe, 0)
    ours = {name for name, p in network.model.named_parameters() if p.requires_grad}
    theirs = {name for name, p in reference.named_parameters() if p.requires_grad}
    names = {
        n.removeprefix("base_model.model.").replace(".modules_to_save.default", "") for n in theirs
    }
    if tied:  # one tensor here, two in peft
        names = {"model.embed_tokens.weight" if n == "lm_head.weight" else n for n in names}
    assert ours == names

    train(recipe)
    merged = AutoModelForCausalLM.from_pretrained(export(recipe.run_dir, tmp_path / "merged"))
    adapter = export(recipe.run_dir, tmp_path / "adapter", adapter=True)
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = {name: p.clone() for name, p in plain.named_parameters()}
    frozen = {name for name, p in merged.named_parameters() if torch.equal(p, before[name])}
    assert {name for name in before if name not in frozen} == {
        name.rpartition(".lora_")[0] + ".weight" if ".lora_" in name else name for name in ours
    }
    peft = PeftModel.from_pretrained(plain, adapter).eval()
    peft.save_pretrained(tmp_path / "by-peft")
    with torch.no_grad():
        expected = opened(recipe.run_dir)(IDS)
        for model in (merged.eval(), peft):
            assert (model(IDS).logits - expected).abs().max() < 2e-5
        for directory in (adapter, tmp_path / "by-peft"):
            again = opened(directory)
            assert (again(IDS) - expected).abs().max() < 1e-5


def test_a_pattern_that_names_nothing_or_is_none_is_refused(tmp_path: Path) -> None:
    for key in ("targets", "modules_to_save"):
        with refused(f"model.lora.{key}", "regular expression", error=RecipeError):
            recipe_of(tmp_path, lora={"rank": 4, key: ["(q_proj"]})
        with refused(f"model.lora.{key}", "q_proj"):
            build_model(recipe_of(tmp_path, lora={"rank": 4, key: ["query", "layers.9.*"]}), 0)
    with refused("model.lora.modules_to_save", "model.lora.rank", error=RecipeError):
        recipe_of(tmp_path, lora={"modules_to_save": ["lm_head"]})


@PEFT
@pytest.mark.filterwarnings("ignore:Model has `tie_word")
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
            opened(tmp_path / "unlike")


@PEFT
@pytest.mark.dist
def test_an_adapter_is_trained_further_or_merged_first(tmp_path: Path) -> None:
    """An adapter of `peft`, of a run, of an export, and sharded over two ranks."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = base_of(tmp_path)
    torch.manual_seed(1)
    peft: Any = adapter_of_peft(
        base, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"]
    )
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    peft.save_pretrained(tmp_path / "first")  # without a tokenizer
    lora = {"rank": 4, "targets": ["q_proj", "up_proj"], "modules_to_save": ["lm_head"]}
    further = {"lora": lora, "init_from": str(tmp_path / "first")}
    recipe = recipe_of(tmp_path, "further", **further).replace("optim.lr=1e-2")
    begun: Any = build_model(recipe, 0, device="cpu").eval()
    load_initial(begun, recipe)

    merged = export(tmp_path / "first", tmp_path / "merged")
    with torch.no_grad():
        expected = peft.eval()(IDS).logits
        assert (begun(IDS) - expected).abs().max() < 1e-5
        whole = AutoModelForCausalLM.from_pretrained(merged).eval()
        assert (whole(IDS).logits - expected).abs().max() < 2e-5
    assert (merged / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    with refused("already"):
        export(tmp_path / "first", tmp_path / "no", adapter=True)

    run = check_resume(recipe)
    shards = recipe.replace("parallel.strategy=full_shard", f"run.dir={tmp_path}/two")
    losses = [[loss for _, loss in curve(one, "loss")] for one in (run, train_on_ranks(shards))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    second = export(run, tmp_path / "second", adapter=True)
    with torch.no_grad():
        trained = opened(run.path)(IDS)
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), second)
        assert (trained - expected).abs().max() > 1e-3
        assert (again.eval()(IDS).logits - trained).abs().max() < 2e-5
        for origin in (run.path, second):
            third = recipe.replace(f"model.init_from={origin}")
            model: Any = build_model(third, 0, device="cpu").eval()
            load_initial(model, third)
            assert (model(IDS) - trained).abs().max() < 1e-5


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


@PEFT
@pytest.mark.filterwarnings("ignore:Model has `tie_word")
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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = talks_of(tmp_path, "run", kind, tied, lora=lora)
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    rows = base.get_input_embeddings().weight.detach().clone()
    begun = build_model(recipe, VOCAB + 2, device="cpu")
    initialise(begun, 0)
    table: Any = begun.model.get_input_embeddings()  # type: ignore[operator, union-attr]
    assert torch.equal(table.weight[:VOCAB], rows)
    assert (table.weight[VOCAB:] - rows.mean(0)).abs().max() < 1e-6

    run = train(recipe)
    assert "2 of its rows are new" in run.log_path.read_text()
    merged = export(recipe.run_dir, tmp_path / "merged")
    places = [merged]
    if lora:
        places.append(export(recipe.run_dir, tmp_path / "adapter", adapter=True))
    ids = torch.randint(0, VOCAB + 2, (2, 30), generator=torch.Generator().manual_seed(5))
    for place in places:
        tokenizer = AutoTokenizer.from_pretrained(place)
        assert tokenizer.convert_tokens_to_ids(NEW) == [VOCAB, VOCAB + 1]
        kinds = AutoModelForCausalLM if place is merged else AutoPeftModelForCausalLM
        model = kinds.from_pretrained(place).eval()
        trained = model.get_input_embeddings().weight[VOCAB:]
        assert ((trained - rows.mean(0)).abs().amax(1) > 1e-3).all()
        ends = json.loads((place / "generation_config.json").read_text())["eos_token_id"]
        assert VOCAB + 1 in ends
        with torch.no_grad():
            ours = opened(recipe.run_dir)(ids)
            again = opened(place)(ids)
            assert (model(ids).logits - ours).abs().max() < 2e-5
            assert (again - ours).abs().max() < 2e-5


@pytest.mark.dist
def test_added_tokens_begin_alike_on_shards_and_from_the_seed(tmp_path: Path) -> None:
    recipe = talks_of(tmp_path, "one")
    alone = curve(train(recipe), "loss")
    shards = recipe.replace("parallel.strategy=full_shard", f"run.dir={tmp_path}/two")
    two = curve(train_on_ranks(shards), "loss")
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in alone], rel=1e-5)
    fresh = recipe.replace("model.from_scratch=true", f"run.dir={tmp_path}/fresh")
    assert build_model(fresh, VOCAB + 2, device="cpu").vocab == VOCAB + 2  # type: ignore[union-attr]
    assert curve(train(fresh), "loss")[0][1] == pytest.approx(math.log(VOCAB + 2), abs=0.3)


def test_a_frozen_embedding_does_not_learn_added_tokens(tmp_path: Path) -> None:
    recipe = talks_of(tmp_path, "run", lora={"rank": 4})
    with refused("<|im_end|>", "model.lora.modules_to_save=embed_tokens,lm_head"):
        train(recipe)
    with refused("the last 3 tokens", "model.lora.modules_to_save=embed_tokens,lm_head"):
        build_model(recipe.replace("data.add_tokens=[]"), VOCAB + 3)


def test_modules_in_4_bits_are_not_trained_whole(tmp_path: Path) -> None:
    for name in ("layers.1", "mlp", "up_proj"):
        lora = {"rank": 4, "base": "4bit", "modules_to_save": [name]}
        with refused("model.lora.modules_to_save", name, "model.lora.base=fp32"):
            build_model(recipe_of(tmp_path, lora=lora), 0)


def test_weights_in_4_bits_need_adapters_and_their_package(tmp_path: Path) -> None:
    with refused("model.lora.base", "model.lora.rank", error=RecipeError):
        recipe_of(tmp_path, lora={"base": "4bit"})
    if not installed("bitsandbytes"):
        with refused("model.lora.base", "pip install bitsandbytes"):
            train(recipe_of(tmp_path, lora={"base": "4bit", "rank": 4}))


@pytest.mark.skipif(not installed("bitsandbytes"), reason="not run: bitsandbytes is not installed")
def test_adapters_on_weights_in_4_bits_learn_resume_and_are_exported(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, lora={"base": "4bit", "rank": 4})
    straight = check_resume(recipe)
    whole = curve(train(recipe_of(tmp_path, "whole", lora={"rank": 4})))
    losses = [loss for _, loss, *_ in curve(straight)]
    assert losses[-1] < losses[0] == pytest.approx(whole[0][1], abs=0.2)
    assert losses[0] != whole[0][1]
    sizes, plain = read_sizes(recipe), read_sizes(recipe_of(tmp_path, lora={"rank": 4}))
    assert (sizes.total, sizes.trained) == (plain.total, plain.trained)
    assert sizes.in_4bit > 0.4 * sizes.total
    layout = layout_of(recipe, 1)
    saved = memory(plain, 512, layout).parameters - memory(sizes, 512, layout).parameters
    assert saved == sizes.in_4bit * 55 // 16

    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(export(recipe.run_dir, tmp_path / "out")).eval()
    with torch.no_grad():
        ours = opened(recipe.run_dir)(IDS)
        assert (exported(IDS).logits - ours).abs().max() < 1e-4
