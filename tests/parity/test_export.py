"""Our GPT and those of `transformers`, both ways: equal logits, equal tokens, the same greedy text; what does not match is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_fixtures
import tokenizer_fixtures
from windlass.data.chat import Template
from windlass.data.tokenizer import Tokenizer
from windlass.data.vocabulary import byte_tokenizer, char_tokenizer, gpt2_tokenizer, hf_tokenizer, train_bpe
from windlass.errors import UserError
from windlass.evaluation.generate import Sampling, generate
from windlass.evaluation.source import alone, find_source, open_model
from windlass.interop.export import export, merge_adapters, save_tokenizer, save_weights
from windlass.interop.init_from import load_initial
from windlass.model import convert
from windlass.model.build import build_model
from windlass.model.gpt import GPT, initialise
from windlass.recipe import Recipe
from windlass.recipe.settings import ModelSettings

VOCAB = 300
SHAPE = {"layers": 3, "heads": 4, "width": 32, "context": 64, "vocab": VOCAB}
GPT2 = {"position": "learned", "norm": "layernorm", "activation": "gelu"}
LLAMA = {
    "position": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "kv_heads": 2,
    "ff_width": 72,
    "rope_theta": 5e4,
}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2, untied, tanh": {**GPT2, "tie_head": False, "activation": "gelu_tanh", "ff_width": 50},
    "gpt2, no biases": {**GPT2, "attn_bias": False, "ff_bias": False, "norm_bias": False, "activation": "relu2"},
    "llama": {**LLAMA, "attn_bias": False, "ff_bias": False},
    "llama, untied, biases, heads alike": {**LLAMA, "kv_heads": 0, "tie_head": False},
}


def recipe(**model: Any) -> Recipe:
    return Recipe.model_validate({"model": {**SHAPE, **model}, "data": {"tokenizer": "byte"}})


def filled(made: Recipe, seed: int = 1) -> GPT:
    """A GPT in which no bias is zero and no gain is one, so that none can be forgotten."""
    model = build_model(made, 257, device="cpu")
    initialise(model, seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    assert isinstance(model, GPT)
    return model.eval()


def exported(model: GPT, directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    directory.mkdir(exist_ok=True)
    tensors = dict(model.named_parameters())
    (directory / "config.json").write_text(json.dumps(convert.config(model.settings, model.vocab, 256)))
    save_weights(convert.to_hf(model.settings, tensors.__getitem__), directory)
    loaded, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    return loaded.eval()


def tokens() -> Tensor:
    return torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_an_exported_model_has_our_logits_and_comes_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    made = recipe(**CASES[case])
    ours = filled(made)
    theirs = exported(ours, tmp_path / "out")
    assert (theirs(input_ids=tokens()).logits - ours(tokens())).abs().max() < 1e-5
    assert theirs.dtype == torch.float32
    again = build_model(made.with_overrides(f"model.init_from='{tmp_path / 'out'}'"), 257, device="cpu")
    initialise(again, 9)
    load_initial(again, made.with_overrides(f"model.init_from='{tmp_path / 'out'}'"))
    for (name, a), b in zip(ours.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@torch.no_grad()
def test_their_weights_give_their_logits_in_our_gpt(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = hf_fixtures.save(kind, tmp_path, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    settings = convert.settings_of(theirs.config)
    settings |= {"context": 50, "vocab": settings["vocab"] + 12}  # a shorter context and rows added for speed are fine
    made = Recipe.model_validate({"model": {**settings, "init_from": str(directory)}})
    ours = build_model(made, 257, device="cpu").eval()
    load_initial(ours, made)
    assert (ours(tokens())[..., :-12] - theirs(input_ids=tokens()).logits).abs().max() < 1e-5
    fresh = build_model(made, 257, device="cpu")
    initialise(fresh, made.run.seed)
    assert torch.equal(ours.embedding.weight[-12:], fresh.embedding.weight[-12:])


def test_weights_of_another_shape_are_refused_with_what_to_write(tmp_path: Path) -> None:
    directory = hf_fixtures.save("llama", tmp_path)
    made = Recipe.model_validate({"model": {**SHAPE, "width": 48, "init_from": str(directory)}})
    with pytest.raises(UserError) as error:
        load_initial(build_model(made, 257, device="cpu"), made)
    for line in (
        "model.width = 32  (it is 48)",
        'model.norm = "rmsnorm"',
        "model.vocab = 512",
        "model.tie_head = false",
    ):
        assert line in str(error.value)
    bloom = hf_fixtures.save("bloom", tmp_path / "bloom")
    with pytest.raises(UserError, match="weights of bloom do not fit our GPT"):
        load_initial(build_model(made, 257, device="cpu"), made.with_overrides(f"model.init_from='{bloom}'"))
    with pytest.raises(UserError, match="no run and no checkpoint"):
        load_initial(build_model(made, 257, device="cpu"), made.with_overrides("model.init_from='nowhere'"))


def test_weights_of_another_network_are_refused_with_what_differs(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = hf_fixtures.save("llama", tmp_path / "base")
    again = hf_fixtures.save("llama", tmp_path / "again", attention_dropout=0.3, use_cache=False)
    other = hf_fixtures.save("llama", tmp_path / "other", num_key_value_heads=4, rms_norm_eps=0.01, hidden_act="gelu")
    tree = {"kind": "hf", "name": str(base), "context": 64}
    made = Recipe.model_validate({"model": {**tree, "init_from": str(again)}})
    model = build_model(made, 257, device="cpu").eval()
    load_initial(model, made)
    theirs = AutoModelForCausalLM.from_pretrained(again).eval()
    with torch.no_grad():
        assert (model(tokens()) - theirs(input_ids=tokens()).logits).abs().max() < 1e-5
    with pytest.raises(UserError) as error:
        load_initial(model, made.with_overrides(f"model.init_from='{other}'"))
    for line in ("num_key_value_heads = 4 (it is 2)", "rms_norm_eps = 0.01", "hidden_act = 'gelu' (it is 'silu')"):
        assert line in str(error.value)
    assert "dropout" not in str(error.value) and "vocab" not in str(error.value)
    with pytest.raises(UserError, match=r"model\.init_from.*model\.from_scratch asks for none"):
        made.with_overrides("model.from_scratch=true")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({**GPT2, "activation": "swiglu"}, 'from GPT-2, the nearest, it differs in model.activation = "swiglu"'),
        ({**LLAMA, "qk_norm": True}, "from Llama, the nearest, it differs in model.qk_norm"),
        ({**GPT2, "final_norm": False, "logit_cap": 15.0}, "model.logit_cap, model.final_norm = false"),
        ({**LLAMA, "activation": "relu2", "kv_heads": 0}, 'model.activation = "relu2" \\(Llama has "swiglu"\\)'),
    ],
)
def test_what_no_architecture_computes_is_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        convert.architecture(ModelSettings(**{**SHAPE, **changes}))


PROBE = "def f(x):\n\treturn x ** 2  # It's 3.14, isn't it?\r\n\n  Žluťoučký 中文 🙂 e\u0301 <|endoftext|>"


@pytest.mark.parametrize("kind", ["byte", "char", "bpe", "gpt2"])
def test_an_exported_tokenizer_gives_the_same_ids_and_text(kind: str, tmp_path: Path, data_files: Path) -> None:
    from transformers import AutoTokenizer

    made: dict[str, Any] = {
        "byte": byte_tokenizer,
        "char": lambda: char_tokenizer(PROBE, with_eot=True),
        "bpe": lambda: train_bpe([PROBE] * 3, 300),
        "gpt2": lambda: gpt2_tokenizer(str(data_files / "gpt2")),
    }
    tokenizer: Tokenizer = made[kind]()
    save_tokenizer(tokenizer, Template(), 64, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = PROBE.removesuffix("<|endoftext|>")
    assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist()
    assert theirs.decode(tokenizer.encode(text)) == text == tokenizer.decode(tokenizer.encode(text))
    assert theirs.eos_token_id == tokenizer.eot and len(theirs) == tokenizer.vocab
    again = hf_tokenizer(str(tmp_path))
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist() and again.eot == tokenizer.eot


def test_gpt2s_own_text_is_tokenized_alike(data_files: Path) -> None:
    ours = gpt2_tokenizer(str(data_files / "gpt2"))
    text = (data_files / "web" / "c4-style.txt").read_text(encoding="utf-8")[:200_000]
    assert ours.inner.encode(text).ids == ours.encode(text).tolist()


def test_large_weights_are_split_into_files_with_an_index(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {f"t{i}": torch.full((10, 10), float(i)) for i in range(7)}
    tensors["tied"] = tensors["t0"]
    save_weights(tensors.items(), tmp_path, file_bytes=900)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors) and index["metadata"]["total_size"] == 3200
    assert {p.name for p in tmp_path.glob("*.safetensors")} == set(index["weight_map"].values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


def run(folder: Path, steps: int = 3, **changes: Any) -> Path:
    """A short run on made-up words."""
    from windlass import train

    (folder / "text.txt").write_text("the cat sat on the mat and the dog ran after the cat " * 40)
    tree = {
        "preset": "words",
        "model": {**SHAPE, "vocab": 0, **GPT2},
        "data": {
            "source": str(folder / "text.txt"),
            "dir": str(folder / "data"),
            "tokenizer": "bpe",
            "tokenizer_vocab": 280,
        },
        "train": {"steps": steps, "global_batch": 4},
        "optim": {"lr": 3e-3},
        "checkpoint": {"every": 0},
        "run": {"dir": str(folder / "run")},
    }
    train(Recipe.model_validate(tree).with_overrides(**{k.replace("__", "."): v for k, v in changes.items()}))
    return folder / "run"


def test_a_run_is_exported_with_tokenizer_and_card_and_gives_the_same_greedy_text(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = export(str(run(tmp_path, steps=20)), tmp_path / "out")
    source = find_source(str(tmp_path / "run"))
    ours = open_model(source, alone("cpu"))
    ids = source.tokenizer.encode("the cat").tolist()
    made = generate(ours, [ids], Sampling(max_tokens=30, temperature=0), vocab=source.tokenizer.vocab)
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    encoded = tokenizer("the cat", return_tensors="pt")
    text = theirs.generate(**encoded, max_new_tokens=30, do_sample=False)
    assert made is not None and text[0].tolist() == [*ids, *made[0]]
    assert tokenizer.decode(text[0]) == "the cat" + source.tokenizer.decode(made[0])
    card = (directory / "README.md").read_text()
    assert "20 steps" in card and "| loss | perplexity |" in card and 'preset = "words"' in card
    hf = find_source(str(directory))
    with torch.no_grad():
        batch = torch.tensor([ids])
        assert (open_model(hf, alone("cpu"))(batch) - ours(batch)).abs().max() < 1e-5
    with pytest.raises(UserError, match="not empty"):
        export(str(tmp_path / "run"), directory)
    with pytest.raises(UserError, match=r"README\.md is a file: name a new directory"):
        export(str(tmp_path / "run"), directory / "README.md")
    with pytest.raises(UserError, match="already"):
        export(str(directory), tmp_path / "again")
    assert not list(tmp_path.glob(".*partial"))


def test_rows_that_stand_for_nothing_are_not_generated_by_transformers_either(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = export(str(run(tmp_path, steps=1, model__vocab=300)), tmp_path / "out")
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    assert theirs.config.vocab_size == 300 and len(tokenizer) == 280
    said = json.loads((directory / "generation_config.json").read_text())
    assert said["pad_token_id"] == tokenizer.pad_token_id == tokenizer.eos_token_id == said["eos_token_id"]
    with torch.no_grad():
        theirs.get_output_embeddings().weight[280:] *= 1000.0
    encoded = tokenizer(["the cat", "dog"], return_tensors="pt", padding=True, padding_side="left")
    how: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    assert (theirs.generate(**encoded, **how) < 280).all()
    assert (theirs.generate(**encoded, **how, suppress_tokens=[279]) >= 280).any()


def test_an_export_has_the_tokenizer_that_the_run_was_trained_with(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base = hf_fixtures.save("llama", tmp_path / "base", vocab_size=800)
    tokenizer_fixtures.save("llama3", base)
    for name, kind in (("alike", "llama3"), ("other", "gemma")):
        place = tokenizer_fixtures.save(kind, tmp_path / name)
        changes = {
            "model": {"kind": "hf", "name": str(base), "context": 32},
            "data": {"source": str(tmp_path / "text.txt"), "dir": str(tmp_path / f"data-{name}"), "tokenizer": f"hf:{place}"},
            "run": {"dir": str(tmp_path / f"run-{name}")},
        }  # fmt: skip
        (tmp_path / "text.txt").write_text(tokenizer_fixtures.TEXT * 20)
        from windlass import train

        train(Recipe.model_validate({"train": {"steps": 1, "global_batch": 2}, "checkpoint": {"every": 0}, **changes}))
        out = export(str(tmp_path / f"run-{name}"), tmp_path / f"out-{name}")
        theirs, wanted = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(place)
        assert theirs("Who are you? é")["input_ids"] == wanted("Who are you? é")["input_ids"]
        assert (theirs.bos_token, theirs.eos_token) == (wanted.bos_token, wanted.eos_token)
        assert ((out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()) == (name == "alike")


def test_a_run_that_matches_nothing_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    made = run(tmp_path, steps=1, model__final_norm=False)
    with pytest.raises(UserError, match=r"GPT-2, the nearest, it differs in model\.final_norm = false"):
        export(str(made), tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"text.txt", "data", "run"}


def test_a_run_begins_from_another_run_and_from_an_export(tmp_path: Path) -> None:
    from windlass.run import Run

    first = run(tmp_path, steps=10)
    final = Run(first).lines("eval")[-1]["loss"]
    for name in (str(first), str(export(str(first), tmp_path / "out"))):
        second = run(tmp_path, steps=1, model__init_from=name, run__dir=str(tmp_path / f"from-{Path(name).name}"))
        del second
        begun = Run(tmp_path / f"from-{Path(name).name}").lines("eval")[0]
        assert begun["step"] == 0 and begun["loss"] == pytest.approx(final, rel=1e-5)


def test_adapters_are_merged(tmp_path: Path) -> None:
    directory = hf_fixtures.save("llama", tmp_path / "llama")
    made = Recipe.model_validate({"model": {"kind": "hf", "name": str(directory), "context": 64, "lora": {"rank": 4}}})
    model: Any = build_model(made, 257, device="cpu").eval()
    initialise(model, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
        before = model(tokens())
        merge_adapters(model.model)
        assert (model(tokens()) - before).abs().max() < 1e-4
    assert not any("lora" in name or "base_layer" in name for name, _ in model.named_parameters())
