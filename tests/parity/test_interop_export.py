"""A run as a directory of `transformers`, and back: equal logits, equal tokens, the same greedy
text.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import hf_fixtures
import tokenizer_fixtures
from helpers import refused, write_ledger
from windlass import sample, train
from windlass.checkpoint.choose import read_lineage, record
from windlass.data.chat import Template
from windlass.data.tokenizer_kinds import (
    bpe_tokenizer,
    byte_tokenizer,
    char_tokenizer,
    gpt2_tokenizer,
    hf_tokenizer,
)
from windlass.errors import UserError
from windlass.evaluation.generate import Sampling, generate
from windlass.evaluation.passes import Passes
from windlass.evaluation.source import Source, alone, find_source, open_model
from windlass.fileio import Files
from windlass.interop.export import export, save_tokenizer
from windlass.recipe import Recipe, presets
from windlass.run import Run
from windlass.training.start import resolve_start

WORDS = "the cat sat on the mat and the dog ran after the cat " * 40
PROBE = "def f(x):\n\treturn x ** 2  # It's 3.14, isn't it?\r\n\n  Žluťoučký 中文 🙂 e\u0301 <|endoftext|>"


def tokens() -> Tensor:
    return torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(5))


def trained(folder: Path, name: str = "run", **changes: Any) -> Path:
    (folder / "text.txt").write_text(WORDS)
    place = {"source": str(folder / "text.txt"), "dir": str(folder / f"data-{name}")}
    tree = {
        "preset": "words",
        "model": {"layers": 2, "heads": 4, "width": 32, "context": 64},
        "train": {"steps": 1, "global_batch": 4},
        "data": {**place, "tokenizer": "bpe", "tokenizer_vocab": 280},
        "optim": {"lr": 3e-3},
        "checkpoint": {"every": 0},
        "run": {"dir": str(folder / name)},
    }
    train(Recipe.from_dict(tree).replace({k.replace("__", "."): v for k, v in changes.items()}))
    return folder / name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, which its tests only read."""
    return trained(tmp_path_factory.mktemp("plain"))


def chat_base(folder: Path) -> Path:
    """A Llama of `transformers` with Llama 3's kind of tokenizer."""
    model = hf_fixtures.save("llama", folder / "base", vocab_size=800)
    return tokenizer_fixtures.save("llama3", model)


def fine_tuned(folder: Path, base: Path, name: str = "run", **changes: Any) -> Path:
    model = {"model__kind": "hf", "model__name": str(base), "model__context": 32}
    optim = {"train__global_batch": 2, "optim__lr": 1e-2, "optim__schedule__warmup": 0}
    return trained(folder, name, **(model | optim | {"data__tokenizer": f"hf:{base}"} | changes))


def loaded(directory: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    return model, AutoTokenizer.from_pretrained(directory)


def logits(model: Any, batch: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(batch)
    return output if isinstance(output, Tensor) else output.logits


def greedy(model: Any, source: Source, ids: list[int], count: int) -> list[int]:
    """The text of our own generation."""
    how = Sampling(max_tokens=count, temperature=0)
    [text] = generate(Passes(model, tokenizer=source.tokenizer), [ids], how)
    return text


def ours_of(place: Path, *overrides: str) -> Any:
    """The model of a run or an export, opened by Windlass."""
    return open_model(find_source(str(place), overrides), alone("cpu"))


def difference(one: Any, other: Any, batch: Tensor | None = None) -> float:
    """The largest one between the logits of two models, or between a model's and some logits."""
    batch = tokens() if batch is None else batch
    there = other if isinstance(other, Tensor) else logits(other, batch)
    return float((logits(one, batch) - there).abs().max())


# -- tokenizers and files


@pytest.mark.parametrize("kind", ["byte", "char", "bpe", "gpt2"])
def test_an_exported_tokenizer_gives_the_same_ids_and_text(kind, tmp_path, request):
    from transformers import AutoTokenizer

    tokenizer = {
        "byte": byte_tokenizer,
        "char": lambda: char_tokenizer(PROBE, True),
        "bpe": lambda: bpe_tokenizer([PROBE] * 3, 300),
        "gpt2": lambda: gpt2_tokenizer(str(request.getfixturevalue("data_files") / "gpt2")),
    }[kind]()
    save_tokenizer(tokenizer, Template(), 64, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    exported = AutoTokenizer.from_pretrained(tmp_path)
    text = PROBE.removesuffix("<|endoftext|>")
    ids = tokenizer.encode(text).tolist()
    assert exported(text)["input_ids"] == ids
    assert exported.decode(ids) == text == tokenizer.decode(ids)
    assert exported.eos_token_id == tokenizer.eot and len(exported) == tokenizer.vocab
    again = hf_tokenizer(str(tmp_path))
    assert again.encode(text).tolist() == ids and again.eot == tokenizer.eot


# -- runs


def test_a_run_is_exported_with_tokenizer_and_card_and_gives_the_same_greedy_text(tmp_path):
    run = trained(tmp_path, train__steps=20)
    directory = export(run, tmp_path / "out")
    source, ours = find_source(str(run)), ours_of(run)
    ids = source.tokenizer.encode("the cat").tolist()
    generated = greedy(ours, source, ids, 30)
    exported, tokenizer = loaded(directory)
    encoded = tokenizer("the cat", return_tensors="pt")
    [text] = exported.generate(**encoded, max_new_tokens=30, do_sample=False)
    assert text.tolist() == [*ids, *generated]
    assert tokenizer.decode(text) == "the cat" + source.tokenizer.decode(generated)
    card = (directory / "README.md").read_text()
    assert "20 steps" in card and "| loss | perplexity |" in card and 'preset = "words"' in card
    assert difference(ours_of(directory), ours, torch.tensor([ids])) < 1e-5
    for what, where, adapter, word in (
        (run, directory, False, "not empty"),
        (run, directory / "README.md", False, "new directory"),
        (directory, tmp_path / "again", False, "already"),
        (run, tmp_path / "again", True, "model.lora.rank"),
    ):
        with pytest.raises(UserError, match=word):
            export(what, where, adapter)
    assert {p.name for p in tmp_path.iterdir()} == {"text.txt", "data-run", "run", "out"}


def test_a_bos_that_the_tokenizer_writes_is_in_the_configuration(tmp_path: Path) -> None:
    folder = tokenizer_fixtures.save("llama3", tmp_path / "tokenizer")
    own = {"data__tokenizer": f"hf:{folder}", "eval__every": 0}
    out = export(trained(tmp_path, **own), tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["bos_token_id"] == 0
    base = chat_base(tmp_path)
    run = fine_tuned(tmp_path, base, "scratch", model__from_scratch=True, eval__every=0)
    assert loaded(export(run, tmp_path / "out-scratch"))[0].config.bos_token_id == 0


@pytest.mark.parametrize("tokenizer", ["byte", "char", "chatml"])
def test_a_text_without_a_prompt_is_that_of_the_run(tokenizer: str, tmp_path: Path) -> None:
    """No tokenizer here writes a BOS, and characters have no special token at all."""
    own = tokenizer
    if tokenizer == "chatml":  # its own model has a BOS, which the training does not use
        folder = tokenizer_fixtures.save(tokenizer, tmp_path / "tokenizer")
        (folder / "config.json").write_text(json.dumps({"bos_token_id": 5}))
        own = f"hf:{folder}"
    run = trained(tmp_path, data__tokenizer=own, train__steps=8)
    out = export(run, tmp_path / "out")
    how: dict[str, Any] = {"device": "cpu", "max_tokens": 20, "seed": 1}
    texts = ["".join(piece for _, piece in sample(str(place), **how)) for place in (run, out)]
    assert texts[0] == texts[1] != ""
    names = ("config.json", "generation_config.json")
    config, generation = (json.loads((out / name).read_text()) for name in names)
    start = find_source(str(run)).tokenizer.prompt("")[0]
    bos = start if tokenizer == "char" else None  # characters have no end of a text
    assert config["bos_token_id"] == bos and generation.get("bos_token_id", start) == start
    assert loaded(out)[0].config.bos_token_id == bos


def test_rows_that_stand_for_nothing_are_not_generated_by_transformers_either(tmp_path):
    directory = export(trained(tmp_path, model__vocab=300), tmp_path / "out")
    exported, tokenizer = loaded(directory)
    assert exported.config.vocab_size == 300 and len(tokenizer) == 280
    config = json.loads((directory / "generation_config.json").read_text())
    ends = {config["pad_token_id"], config["eos_token_id"]}
    assert ends == {tokenizer.pad_token_id} == {tokenizer.eos_token_id}
    with torch.no_grad():
        exported.get_output_embeddings().weight[280:] *= 1000.0
    encoded = tokenizer(["the cat", "dog"], return_tensors="pt", padding=True, padding_side="left")
    assert (exported.generate(**encoded, max_new_tokens=20, do_sample=False) < 280).all()


def test_an_export_has_the_tokenizer_that_the_run_was_trained_with(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base = chat_base(tmp_path)
    for name, kind in (("alike", "llama3"), ("other", "gemma")):
        place = tokenizer_fixtures.save(kind, tmp_path / name)
        own = {"data__tokenizer": f"hf:{place}", "model__from_scratch": name == "other"}
        run = fine_tuned(tmp_path, base, f"run-{name}", **own)
        out = export(run, tmp_path / f"out-{name}")
        exported, wanted = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(place)
        text = "Who are you? é"
        assert exported(text)["input_ids"] == wanted(text)["input_ids"]
        assert (exported.bos_token, exported.eos_token) == (wanted.bos_token, wanted.eos_token)
        contents = [(folder / "tokenizer.json").read_bytes() for folder in (out, base)]
        assert (contents[0] == contents[1]) == (name == "alike")


NO_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "c4-30m": {},
    "c4-29m": {},
    "rope": {"position": "rope", "norm": "layernorm", "kv_heads": 2, "qk_norm": True}
    | {"activation": "relu2", "dropout": 0.1},
    "none": {"position": "none", "logit_cap": 5.0, "tie_head": True}
    | {"attn_bias": True, "ff_width": 50},
    "mup": {"mup_base_width": 8, "qk_norm": True, "tie_head": True},
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.full] * (kind in ("c4-29m", "none")))
        for kind in NO_ARCHITECTURE
    ],
)
def test_a_network_without_an_architecture_is_exported_with_its_code(kind, tmp_path, monkeypatch):
    """Equal logits, equal text with a cache and in a batch with padding, and it reads what it
    saves.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    preset = Recipe.load(kind if kind in presets() else "c4-30m").model
    size = {"layers", "width", "context", "vocab"}
    network = preset.model_dump(exclude_defaults=True, exclude=size) | NO_ARCHITECTURE[kind]
    changes = {f"model__{key}": value for key, value in network.items()}
    run = trained(tmp_path, train__steps=5, eval__every=0, **changes)
    directory = export(run, tmp_path / "out")
    card = (directory / "README.md").read_text()
    assert card.count('from_pretrained("out", trust_remote_code=True)') == 2
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    source, ours = find_source(str(run)), ours_of(run)
    assert difference(ours, model) < 1e-5
    row = tokens()
    inputs, labels = row[:, :-1].contiguous(), row[:, 1:].contiguous()
    with torch.no_grad():
        expected = float(ours(inputs, labels)) / labels.numel()
        assert float(model(row, labels=row).loss) == pytest.approx(expected, rel=1e-5)

    text = greedy(ours, source, source.tokenizer.encode("the cat").tolist(), 20)
    how = {"max_new_tokens": 20, "do_sample": False}
    texts = ["the cat", "a dog ran after the"]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    assert not batch["attention_mask"].all()
    for inputs in (tokenizer("the cat", return_tensors="pt"), batch):
        for use_cache in (True, False):
            output = model.generate(**inputs, **how, use_cache=use_cache)[0].tolist()
            assert output[-20:] == text[-20:] and len(text) == 20
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True).eval()
    assert difference(again, model) == 0
    assert difference(ours_of(directory, "model.trust_remote_code=true"), model) < 1e-6


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 64}
FORMS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5, "rope_scaling": SCALED},
    "phi": {"rope_theta": 2e4, "partial_rotary_factor": 0.5},
    "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gpt2": {"n_ctx": 128},
}


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("llama", False),
        ("llama", True),
        ("gemma3_text", True),
        ("gpt2", True),
        pytest.param("phi", True, marks=pytest.mark.full),
    ],
)
def test_a_configuration_has_the_names_of_transformers_4_too(kind, own, tmp_path):
    """With the base in the old form (`own`) or the new one."""
    changes = {} if kind == "gpt2" else copy.deepcopy(FORMS[kind])  # a configuration changes it
    base = hf_fixtures.save_tokenizer([WORDS], hf_fixtures.save(kind, tmp_path / "base", **changes))
    if own:
        config = json.loads((base / "config.json").read_text())
        config.pop("rope_parameters", None)
        (base / "config.json").write_text(json.dumps(config | FORMS[kind]))
    out = export(fine_tuned(tmp_path, base), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert {name: config.get(name) for name in FORMS[kind]} == FORMS[kind]
    (model, _), (plain, _) = loaded(out), loaded(base)
    for name in ("rope_parameters", "max_position_embeddings"):
        assert getattr(model.config, name, None) == getattr(plain.config, name, None)
    assert difference(ours_of(tmp_path / "run"), model) < 1e-4


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # from peft
def test_the_precision_of_an_export_is_that_of_its_base_unless_one_is_named(tmp_path):
    from transformers import AutoModelForCausalLM

    whole = hf_fixtures.save("glm4_moe", tmp_path / "whole")
    base = hf_fixtures.save_tokenizer([WORDS], tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16).save_pretrained(base)
    stored = {k: v for file in base.glob("*.safetensors") for k, v in load_file(file).items()}
    exact = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert 0 < len(exact) < len(stored)  # the architecture keeps the router's bias in float32
    run = fine_tuned(tmp_path, base, model__lora__rank=2, model__lora__targets=["q_proj"])
    out = export(run, tmp_path / "out")
    weights = load_file(out / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in weights.items()} == {
        name: tensor.dtype for name, tensor in stored.items()
    }
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    named = load_file(export(run, tmp_path / "named", dtype="fp32") / "model.safetensors")
    adapter = export(run, tmp_path / "adapter", adapter=True) / "adapter_model.safetensors"
    for tensors in (named, load_file(adapter)):
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


# -- init_from


def test_a_run_begins_from_another_run_and_names_the_settings_for_a_model(tmp_path: Path) -> None:
    first = trained(tmp_path, train__steps=10)
    final = Run(first).lines("eval")[-1]["loss"]
    begun = Run(trained(tmp_path, "second", model__init_from=str(first))).lines("eval")[0]
    assert begun["step"] == 0 and begun["loss"] == pytest.approx(final, rel=1e-5)
    out, recipe = export(first, tmp_path / "out"), Run(first).recipe
    for place, name in ((out, out), ("hf:gpt2", "gpt2")):
        with refused("model.init_from", f"model.kind=hf model.name={name}"):
            new = {"model.init_from": str(place), "run.dir": str(tmp_path / "new")}
            resolve_start(recipe.replace(new))


# -- chat, card, files, the Hub

TALK = [
    {"role": "system", "content": "the mat"},
    {"role": "user", "content": " the cat sat? "},
    {"role": "assistant", "content": "the dog <|endoftext|> ran"},
    {"role": "user", "content": "on the mat"},
    {"role": "assistant", "content": "after the cat"},
]


EDITED = tokenizer_fixtures.MARKED.replace("<|im_start|>assistant", "<|im_start|>cat")
WORD_OF_END = "<|im_end|>"


def always(model: Any, token: int) -> Any:
    """Make a model of `transformers` choose one token, whatever it reads."""
    model.get_output_embeddings().register_forward_hook(
        lambda _, __, output: output.index_fill(-1, torch.tensor([token]), 1e4)
    )
    return model


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # from peft
@pytest.mark.parametrize("kind", ["gpt", "mix", "hf", "adapter", "scratch"])
def test_an_export_stops_at_every_end_and_has_the_template_of_the_training(kind, tmp_path):
    """The base ends texts with another token than its template ends turns."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    base = tokenizer_fixtures.save("marked", hf_fixtures.save("llama", tmp_path / "base"))
    ends = {"eos_token_id": [0, 3], "pad_token_id": 0, "max_length": 50}
    (base / "generation_config.json").write_text(json.dumps(ends))
    edited = tokenizer_fixtures.save("marked", tmp_path / "edited")
    config = json.loads((edited / "tokenizer_config.json").read_text())
    changed = config | {"chat_template": EDITED}
    (edited / "tokenizer_config.json").write_text(json.dumps(changed))
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 8)
    talks = {"data__format": "chat", "data__source": str(tmp_path / "talk.jsonl")}
    talks["data__tokenizer"] = f"hf:{edited}"
    if kind == "gpt":
        run = trained(tmp_path, **talks)
    elif kind == "mix":
        chat = {"name": "talk", "source": talks["data__source"], "format": "chat"}
        text = {"name": "text", "source": str(tmp_path / "text.txt")}
        sources = {"data__mix": [chat, text], "data__source": ""}
        run = fine_tuned(tmp_path, base, **talks | {"data__format": "text"} | sources)
    elif kind == "scratch":
        run = fine_tuned(tmp_path, base, **talks, model__from_scratch=True)
    else:
        run = fine_tuned(tmp_path, base, **talks, model__lora__rank=2 * (kind == "adapter"))
    out = export(run, tmp_path / "out", adapter=kind == "adapter")
    source, tokenizer = find_source(str(run)), AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template(TALK[:2], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nthe mat<|im_end|>\n<|im_start|>user\n the cat sat? <|im_end|>\n"
        "<|im_start|>cat\n"
    )
    model: Any = AutoModelForCausalLM.from_pretrained(base if kind == "adapter" else out)
    if kind == "adapter":
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, out)
        model.generation_config = GenerationConfig.from_pretrained(out)
    else:
        stored = model.config.eos_token_id
        assert set(stored) == set(model.generation_config.eos_token_id)
    always(model, end := source.tokenizer.special[WORD_OF_END])
    ids = tokenizer.apply_chat_template(TALK[:2], add_generation_prompt=True, return_tensors="pt")
    [text] = model.generate(**ids, max_new_tokens=5, do_sample=False).tolist()
    assert text[len(ids["input_ids"][0]) :] == [end]
    known = {0} if kind in ("gpt", "scratch") else {0, 3}
    assert set(model.generation_config.eos_token_id) == known | {end}


def test_a_card_has_no_secret_and_shows_a_loss_that_is_not_finite(tmp_path, monkeypatch):
    """`--push` uploads the card with the whole directory."""
    run = Run(trained(tmp_path))
    monkeypatch.setenv("GITHUB_PAT", secret := "the-token-itself")
    query = "b.txt?access_token=to-ken&rows=1"
    sources = ["https://me:pass-word@example.org/a.txt", f"https://example.org/{query}"]
    changes = {"data.source": sources, "data.sha256": "0" * 64, "run.notes": f"by {secret}"}
    record(run.path, read_lineage(run.path), run.recipe.replace(changes), Files())
    run = Run(run.path)
    lines = {"kind": "train", "loss": "NaN"}, {"kind": "eval", "suite": "loss", "loss": "Infinity"}
    write_ledger(run, *(line | {"step": 1} for line in lines))
    out = export(run, tmp_path / "out")
    for file in out.iterdir():
        data = file.read_bytes()
        assert not [word for word in (secret, "pass-word", "to-ken") if word.encode() in data], file
    card = (out / "README.md").read_text()
    assert "https://***@example.org/a.txt" in card and "access_token=***&rows=1" in card
    assert "training loss is NaN" in card and "| loss | loss | ∞ |" in card


def test_an_export_is_pushed_with_a_token_and_rejected_without_one_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Path
) -> None:
    """With a stand-in for the Hub's client: nothing here reaches the Hub."""
    import huggingface_hub

    run, calls = plain, list[Any]()

    class Api:
        def create_repo(self, repo: str, **how: Any) -> None:
            calls.append((repo, how))

        def upload_folder(self, *, folder_path: Path, repo_id: str, **_: Any) -> None:
            calls.append((sorted(p.name for p in Path(folder_path).iterdir()), repo_id))
            if repo_id == "other/model":
                raise OSError("403 Forbidden")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with refused("push=me/model", "HF_TOKEN"):
        export(run, tmp_path / "out", push="me/model")
    assert not (tmp_path / "out").exists() and not calls
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    out = export(run, tmp_path / "out", push="me/model")
    assert calls == [
        ("me/model", {"private": True, "exist_ok": True}),
        (sorted(p.name for p in out.iterdir()), "me/model"),
    ]
    assert 'from_pretrained("me/model")' in (out / "README.md").read_text()
    with refused("403 Forbidden", "HF_TOKEN", "complete"):
        export(run, tmp_path / "out2", push="other/model")
    assert (tmp_path / "out2" / "config.json").is_file()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refused("push=", "out of reach"):
        export(run, tmp_path / "out3", push="me/model")
    with refused("push=", "NAME/MODEL"):
        export(run, tmp_path / "out3", push="me/a/b")
