"""Checkpoints that refer to the frozen weights of their base: size, resume, other ranks, a base that is
gone, moved or changed, and every verb that reads one.
"""

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

import hf_fixtures
from forked import launch
from helpers import curve, losses, refused, train_on_ranks, windlass
from windlass import evaluate, generate, load_model, train
from windlass.checkpoint.base import frozen_weights
from windlass.checkpoint.format import Checkpoint, open_checkpoint
from windlass.checkpoint.listing import list_checkpoints
from windlass.errors import installed
from windlass.estimate.inputs import read_inputs
from windlass.evaluation.source import load_model as load
from windlass.interop.export import export
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.recipe import Recipe
from windlass.run import Run

TEXT = "the cat sat on the mat and the dog ran after the cat " * 60
ADAPTERS = {"lora": {"rank": 4}}
FREEZE = {"freeze": ["model.embed_tokens.*", "model.layers.0.*"]}
KINDS: dict[str, dict[str, Any]] = {
    "lora": ADAPTERS,
    "dropout": {"lora": {"rank": 4, "dropout": 0.1}},
    "freeze": FREEZE,
    "bf16": {**ADAPTERS, "frozen_precision": "bf16"},
    "4bit": {"lora": {"rank": 4, "base": "4bit"}},
}
needs_4bit = pytest.mark.skipif(
    not installed("bitsandbytes"), reason="not run: bitsandbytes is not installed"
)
EACH = ["dropout", "freeze", "bf16", pytest.param("4bit", marks=needs_4bit)]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    sizes = {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2}
    hf_fixtures.save("llama", tmp_path / "base", **sizes)
    return hf_fixtures.save_tokenizer([TEXT], tmp_path / "base")


Call = Callable[..., tuple[str, str]]


def recipe(base: Path, name: str, *overrides: str, **model: Any) -> Recipe:
    folder = base.parent
    tree = {
        "preset": "base",
        "model": {"kind": "hf", "name": str(base), "context": 32, **model},
        "data": {"source": str(folder / "text.txt"), "dir": str(folder / "data")},
        "train": {"steps": 4, "global_batch": 4},
        "optim": {"lr": 1e-2},
        "eval": {"every": 0},
        "checkpoint": {"every": 2},
        "telemetry": {"every": 1},
        "run": {"dir": str(folder / name)},
    }
    return Recipe.from_dict(tree).replace(*overrides)


def at(run: Run, step: int = 4) -> Checkpoint:
    return open_checkpoint(run.checkpoints_dir / f"step-{step:08d}")


def move(base: Path) -> str:
    """Move the base; the setting that says where it is."""
    base.rename(base.with_name("moved"))
    return f"checkpoint.base={base.with_name('moved')}"


def change(base: Path) -> Path:
    """Change a byte of the base's weights; calling it again puts it back."""
    file = sorted(base.glob("*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("kind", EACH)
def test_a_checkpoint_holds_what_is_trained_and_a_resume_is_exact(kind: str, base: Path) -> None:
    straight = train(recipe(base, "straight", **KINDS[kind]))
    halves = recipe(base, "halves", **KINDS[kind])
    train(halves, stop_at=2)
    run = train(halves)
    assert curve(run) == curve(straight)
    network = build_model(halves, 0)
    frozen, saved = set(frozen_weights(network)), at(run)
    trained = [p for p in network.parameters() if p.requires_grad]
    assert saved.manifest.base is not None and set(saved.manifest.base.weights) == frozen
    assert not frozen & set(saved.names()) and len(saved.names("model/")) == len(trained)
    # the rest are JSON, two scalars of AdamW per tensor, and padding
    numbers = 12 * sum(p.numel() for p in trained)
    file = next(saved.path.glob("*.safetensors")).stat().st_size
    assert numbers < file < numbers + 1000 * len(trained)
    assert read_inputs(halves).size.checkpoint_bytes == numbers


def test_without_its_base_every_verb_says_what_to_do_and_with_its_new_place_works(
    base: Path, call: Call
) -> None:
    wanted = recipe(base, "run", **ADAPTERS)
    run = train(wanted, stop_at=2)
    loss, logits = evaluate(run).results["loss"]["loss"], load_model(run)(torch.tensor([[1, 2]]))
    place, folder = move(base), base.parent
    verbs: list[Any] = [
        lambda *more: train(wanted.replace(*more)),
        lambda *more: evaluate(run, overrides=more),
        lambda *more: load_model(run, overrides=more),
        lambda *more: export(run, folder / "out", overrides=more),
        lambda *more: export(run, folder / "adapter", adapter=True, overrides=more),
    ]
    for verb in verbs:
        with refused(str(base), "checkpoint.base=DIR"):
            verb()
    assert not (folder / "out").exists()
    assert "checkpoint.base=DIR" in call("sample", folder / "run", code=2)[1]
    output = windlass("train", folder / "run", code=2).stderr
    assert "checkpoint.base=DIR" in output and "Traceback" not in output
    ids = torch.tensor([[1, 2]])
    assert evaluate(run, overrides=[place]).results["loss"]["loss"] == loss
    assert torch.equal(load_model(run, overrides=[place])(ids), logits)
    call("export", folder / "run", folder / "out", place)
    assert (folder / "out" / "config.json").is_file()
    run = train(wanted.replace(place))
    # the run remembers the place
    assert curve(run)[-1][0] == 4 and generate(run, "the", max_tokens=2)
    assert curve(run) == curve(train(recipe(base.with_name("moved"), "again", **ADAPTERS)))
    base.with_name("moved").rename(folder / "elsewhere")
    base.symlink_to(folder / "elsewhere")  # a link is enough
    assert train(recipe(base, "third", **ADAPTERS), stop_at=2).checkpoints_dir.is_dir()
    assert torch.equal(load_model(f"{folder / 'third'}@2")(ids), logits)


def test_another_base_in_its_place_is_refused(base: Path, call: Call) -> None:
    wanted = recipe(base, "run", **ADAPTERS)
    run = train(wanted, stop_at=2)
    branch = train(wanted.replace(f"run.dir={base.parent / 'b'}"), branch_from=f"{run.path}@2")
    assert at(branch).manifest.base == at(run, 2).manifest.base
    assert call("checkpoints", run.path, "--verify")[0].count("every byte good") == 2
    file = change(base)
    for verb in (lambda: train(wanted), lambda: generate(run, "the"), lambda: load_model(run)):
        with refused("SHA-256", str(base), "checkpoint.base=DIR"):
            verb()
    assert list_checkpoints(run.path).checkpoints[0]["problem"] == ""
    call("checkpoints", run.path)
    output, _ = call("checkpoints", run.path, "--verify", code=1)
    assert f"base {base} is bad" in output and file.name in output
    listed = json.loads(call("checkpoints", run.path, "--verify", "--json", code=1)[0])
    assert [row["files"] for row in listed["bases"]] == [len([*base.glob("*.safetensors")])]
    file.unlink()
    with refused(file.name, "checkpoint.base=DIR"):
        train(wanted)


def test_a_base_of_the_hub_is_found_by_its_commit(
    base: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the Hub's cache, without a network; `main` has moved on since the run began."""
    commit, other = "01" * 20, "23" * 20
    cache = base.parent / "models--some--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    base.rename(cache / "snapshots" / commit)
    (cache / "refs" / "main").write_text(commit)
    for name, value in {"HF_HUB_CACHE": str(base.parent), "HF_HUB_OFFLINE": True}.items():
        monkeypatch.setattr(constants, name, value)
    wanted = recipe(base, "run", "model.name=some/tiny", **ADAPTERS)
    run = train(wanted, stop_at=2)
    saved = at(run, 2).manifest.base
    assert saved is not None and (saved.name, saved.commit) == ("some/tiny", commit)
    shutil.copytree(cache / "snapshots" / commit, cache / "snapshots" / other)
    change(cache / "snapshots" / other)
    (cache / "refs" / "main").write_text(other)
    assert f"some/tiny@{commit[:12]}" in call("checkpoints", run.path, "--verify")[0]
    assert math.isfinite(evaluate(train(wanted)).results["loss"]["loss"])
    shutil.rmtree(cache / "snapshots" / commit)
    with refused("some/tiny", "checkpoint.base=DIR"):
        load_model(run)
    call("checkpoints", run.path, "--verify", code=1)
    change(copy := shutil.copytree(cache / "snapshots" / other, cache / "copy"))
    assert load_model(run, overrides=[f"checkpoint.base={copy}"])


def test_a_checkpoint_with_its_base_needs_nothing_else(base: Path) -> None:
    wanted = recipe(base, "run", "checkpoint.with_base=true", **ADAPTERS)
    train(wanted, stop_at=2)
    later = recipe(base, "later", **ADAPTERS)
    train(later, stop_at=2)
    archived = train(later.replace("checkpoint.with_base=true"))
    assert at(archived, 2).manifest.base is not None and at(archived, 4).manifest.base is None
    shutil.rmtree(base)
    run = train(wanted)
    assert curve(run) == curve(archived) and at(run).manifest.base is None
    assert math.isfinite(evaluate(run).results["loss"]["loss"])
    assert generate(archived, "the", max_tokens=2)
    again = run.recipe.replace("checkpoint.with_base=false")
    train(again, extend_to=6)  # what it has read from a checkpoint is in no file that it knows
    assert at(run, 6).manifest.base is None


def test_what_has_no_files_of_its_own_is_written(base: Path) -> None:
    """From scratch, from a run that holds it, or of a user's own: then no files have these weights."""
    from transformers import AutoModelForCausalLM

    source = train(recipe(base, "source", "checkpoint.with_base=true", **ADAPTERS))
    init = recipe(base, "init", f"model.init_from={source.path}", **ADAPTERS)
    scratch = recipe(base, "scratch", **FREEZE, from_scratch=True)
    own = AutoModelForCausalLM.from_pretrained(base)
    own.get_input_embeddings().requires_grad_(False)
    runs = [train(init), train(scratch), train(recipe(base, "own", **FREEZE), model=own)]
    shutil.rmtree(base)
    for run in runs[:2]:
        assert at(run).manifest.base is None and generate(run, "the", max_tokens=2)
    assert at(runs[2]).manifest.base is None
    # the adapters that it began with are the source's
    first = next(name for name in at(source).names("model/") if ".lora_B" in name)
    assert at(source).tensor(first).any() and curve(runs[0])[0][1] < curve(source)[0][1]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "world", "before", "then", "after"),
    [
        ("lora", 2, "strategy=full_shard", 1, "strategy=auto"),
        ("dropout", 1, "strategy=auto", 2, "strategy=full_shard"),
        ("freeze", 2, "tensor=2", 1, "tensor=1"),
        ("dropout", 2, "tensor=2", 1, "tensor=1"),
        ("lora", 1, "tensor=1", 2, "tensor=2"),
        ("freeze", 2, "strategy=shard_optim", 2, "tensor=2"),
        pytest.param("4bit", 2, "strategy=full_shard", 1, "strategy=auto", marks=needs_4bit),
    ],
)
def test_other_ranks_and_strategies_continue_it(
    kind: str, world: int, before: str, then: int, after: str, base: Path
) -> None:
    """Adapters bit for bit as they were saved, beside the base's own weights; and the losses of one
    process."""
    exact = "train.precision=fp32" if kind == "4bit" else "train.precision=fp64"
    how = exact, "train.micro_batch=2"  # masks of dropout follow from the micro-batch
    wanted = recipe(base, "run", *how, **KINDS[kind])
    straight = train(recipe(base, "straight", *how, **KINDS[kind]))
    first = train_on_ranks(wanted.replace(f"parallel.{before}"), world, stop_at=2)
    fresh = build_model(wanted, 0, device="cpu")
    initialise(fresh, wanted.run.seed)
    loaded = dict(load(f"{first.path}@2", device="cpu").named_parameters())
    for name, parameter in fresh.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(loaded[name], at(first, 2).tensor(f"model/{name}")), name
        else:
            assert torch.equal(loaded[name], parameter.to(loaded[name].dtype)), name
    run = train_on_ranks(wanted.replace(f"parallel.{after}"), then)
    tolerance = 1e-5 if exact.endswith("fp32") else 1e-12
    assert losses(run) == pytest.approx(losses(straight), rel=tolerance)
    (last,) = {step.name for step in run.checkpoints_dir.iterdir()} - {"step-00000002"}
    assert at(run).manifest.base == at(first, 2).manifest.base and last == "step-00000004"


@pytest.mark.dist
def test_two_ranks_with_a_base_in_bf16_have_the_losses_of_one(base: Path) -> None:
    straight = train(recipe(base, "straight", "train.precision=fp64", **KINDS["bf16"]))
    ddp = "train.precision=fp64", "parallel.strategy=ddp"
    run = train_on_ranks(recipe(base, "run", *ddp, **KINDS["bf16"]))
    assert losses(run) == pytest.approx(losses(straight), rel=1e-12)


@pytest.mark.dist
def test_killed_on_two_ranks_adapters_go_on_on_one(base: Path, tmp_path: Path) -> None:
    """SIGKILL after step 3, with a checkpoint of step 2; then the losses of one process."""
    wanted = recipe(base, "run", "train.precision=fp64", **ADAPTERS)
    straight = train(recipe(base, "straight", "train.precision=fp64", **ADAPTERS))
    path = tmp_path / "run.toml"
    path.write_text(wanted.toml(), encoding="utf-8")
    killed = Path(__file__).with_name("killed.py")
    sharded = "parallel.strategy=full_shard"
    assert launch([sys.executable, str(killed), str(path), "3", sharded], 2) != 0
    assert [c["step"] for c in list_checkpoints(wanted.run_dir).checkpoints] == [2]
    assert at(Run(wanted.run_dir), 2).manifest.base is not None
    run = train(wanted)
    assert losses(run) == pytest.approx(losses(straight), rel=1e-12)


@pytest.mark.parametrize(
    ("origin", "before", "after"),
    [
        ("adapter", ADAPTERS, ADAPTERS),
        ("run", ADAPTERS, ADAPTERS),
        ("run", {"freeze": FREEZE["freeze"][:1]}, FREEZE),
    ],
)
def test_what_is_trained_further_keeps_its_base(
    origin: str, before: dict[str, Any], after: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    """A resume needs the base, and no longer the directory of the adapter or the run. A checkpoint
    holds what was trained before and is frozen now.
    """
    source = train(recipe(base, "source", **before))
    weights = dict(load(source.path, device="cpu").named_parameters())
    place = source.path
    if origin == "adapter":
        place = export(source.path, tmp_path / "old", adapter=True)
    further = recipe(base, "further", f"model.init_from={place}", **after)
    planned = read_inputs(further).size.checkpoint_bytes
    run = train(further, stop_at=2)
    shutil.rmtree(place)
    run = train(further)
    saved = at(run)
    assert at(run, 2).manifest.base == saved.manifest.base is not None
    if "lora" in after:
        assert planned == 12 * sum(p.numel() for n, p in weights.items() if ".lora_" in n)
        assert all(".lora_" in name for name in saved.names("model/"))
    else:
        assert saved.manifest.base.weights == ("model/model.model.embed_tokens.weight",)
    for name, parameter in load(run.path, device="cpu").named_parameters():
        frozen = (
            ".lora_" not in name if "lora" in after else ("embed" in name or "layers.0." in name)
        )
        assert torch.equal(parameter, weights[name]) == frozen, name
