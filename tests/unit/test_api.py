"""The public API: a function for every verb, typed results, and an import that costs nothing."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import windlass
from helpers import curve, each_step, refused, tiny_recipe, write_ledger
from windlass import Recipe, evaluate, train
from windlass.cli import as_typed
from windlass.errors import RunFailed, Stopped, UserError, argument
from windlass.run import Run
from windlass.training.callbacks import EvaluationEvent, SaveEvent, StepEvent


def test_every_verb_is_a_documented_function() -> None:
    for name in "train plan prepare evaluate sample sweep report export track verify".split():
        function = getattr(windlass, name)
        assert inspect.isfunction(function) and function.__doc__, name
        returned = inspect.signature(function).return_annotation
        assert returned not in (inspect.Signature.empty, "None"), name
    nouns = set("Run Recipe Study Data Plan Report UserError RunFailed Stopped".split())
    assert nouns < set(dir(windlass)) == {*windlass._MODULES, "__version__"}
    with pytest.raises(AttributeError, match="trane"):
        _ = windlass.trane


def test_importing_it_imports_no_torch_and_no_submodule_shadows_a_function() -> None:
    code = (
        "import sys, windlass; assert 'torch' not in sys.modules; windlass.report, windlass.sweep;"
        "windlass.plan('gpt2-124m', world=8, device='A100-40GB'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    for module in ("training.trainer", "reports.write", "evaluation.likelihood"):
        importlib.import_module(f"windlass.{module}")
    assert all(callable(getattr(windlass, n)) for n in windlass.__all__ if n != "__version__")


@pytest.mark.parametrize(("given", "used"), [("", ":4096:8"), (":16:8", ":16:8")])
def test_importing_it_sets_what_cublas_reads_at_its_first_product(given: str, used: str) -> None:
    """Deterministic training needs it, whatever the process computes before it trains."""
    environ = os.environ | {"CUBLAS_WORKSPACE_CONFIG": given}
    if not given:
        del environ["CUBLAS_WORKSPACE_CONFIG"]
    code = "import os, sys, windlass; print(os.environ['CUBLAS_WORKSPACE_CONFIG'], 'torch' in sys.modules)"
    shown = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True)
    assert shown.split() == [used, "False"]


def first_token(run: Run, prepared: windlass.data.prepare.Prepared) -> int:
    """The likeliest token after `the `, as the text generator chooses it."""
    text = windlass.generate(run, "the ", device="cpu", max_tokens=1, temperature=0.0)
    return int(prepared.tokenizer.encode(text)[0])


def test_a_run_from_preparation_to_export(tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpt2 = {"position": "learned", "norm": "layernorm", "activation": "gelu_tanh"}
    gpt2 |= {"attn_bias": True, "ff_bias": True, "qk_norm": False}
    model = {f"model__{name}": value for name, value in gpt2.items()}
    recipe = tiny_recipe(corpus, tmp_path / "run", eval__every=6, **model)
    prepared = windlass.prepare(recipe)
    assert prepared.is_new and not windlass.prepare(recipe).is_new
    assert repr(prepared).startswith("Prepared(") and len(repr(prepared)) < 200
    run = windlass.train(recipe)
    assert [step for step, *_ in curve(run)] == list(range(1, 13))
    measured = windlass.evaluate(run, ["loss"]).results["loss"]["loss"]
    assert measured == pytest.approx(run.lines("eval")[-1]["loss"], rel=1e-5)
    pieces = list(windlass.sample(run, "the ", n=2, device="cpu", max_tokens=4))
    assert {number for number, _ in pieces} == {0, 1}
    texts = ["".join(piece for i, piece in pieces if i == number) for number in (0, 1)]
    same = {"device": "cpu", "max_tokens": 4}
    assert windlass.generate(run, "the ", 2, **same) == texts
    assert windlass.generate(run, "the ", **same) == texts[0]
    assert windlass.report(run, plots=False).page.read_text().startswith("<!doctype html>")
    assert windlass.plan(recipe).world == 1
    tokens = torch.from_numpy(prepared.tokenizer.encode("the "))[None]
    logits = windlass.load_model(f"{run.path}@best", device="cpu")(tokens)
    assert logits.shape == (1, tokens.shape[1], prepared.tokenizer.vocab)
    newest = windlass.load_model(run, device="cpu")(tokens)
    assert newest.argmax(-1)[0, -1] == first_token(run, prepared)
    exported = windlass.export(run, tmp_path / "hf")
    assert {"config.json", "model.safetensors"} <= {path.name for path in exported.iterdir()}


@pytest.mark.full  # 14 s
def test_the_example_with_samples_of_its_own_learns_to_sort(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    sorting = importlib.import_module("sorting")
    seen, held_out = sorting.Sorting(held_out=False), sorting.Sorting(held_out=True)
    assert len(seen) + len(held_out) == 3**6
    assert not {*map(tuple, seen.inputs)} & {*map(tuple, held_out.inputs)}
    tokens, labels = held_out.read(np.arange(len(held_out)))
    assert (labels[:, :5] == -100).all()
    assert (labels[:, 5:] == np.sort(held_out.inputs, axis=1)).all()
    assert (tokens[:, 6:] == labels[:, 5:-1]).all()
    correct = sorting.main("train.steps=500", "optim.lr=2e-3", "eval.every=0")
    assert correct["held out"] > 0.98


def test_a_recipe_takes_settings_as_a_dictionary(tmp_path: Path) -> None:
    typed = Recipe.load("quickstart", ["train.steps=5", "optim.lr=0.5", "data.source=a.txt"])
    changes = {"train.steps": np.int64(5), "optim": {"lr": 0.5}, "data.source": Path("a.txt")}
    assert Recipe.load("quickstart", changes) == typed
    quickstart = Recipe.load("quickstart")
    assert quickstart.replace(changes) == quickstart.replace(**changes) == typed
    assert Recipe.from_dict({"extends": "quickstart", **changes}) == typed
    assert Recipe.from_dict(typed.flat()) == typed
    assert repr(typed) == str(typed) == f"Recipe({typed.name})"
    with refused("train.stepz", "train.steps?"):
        typed.replace({"train.stepz": 5})
    with refused("tran"):
        Recipe.from_dict({"tran": {"steps": 3}})


def test_a_verb_takes_a_name_or_a_path_for_a_recipe(tmp_path: Path) -> None:
    with refused("wiki.toml", "quickstart"):
        windlass.train("wiki.toml")
    with refused("dict is not a recipe", "Recipe.from_dict"):
        windlass.train({"train.steps": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "api", "typed"),
    [
        (f"{argument('fresh')} renames it", "fresh=True renames it", "--fresh renames it"),
        (f"{argument('extend_to', 400)}!", "extend_to=400!", "--extend-to 400!"),
        (f"{argument('stop_at', 'STEP')},", "stop_at=STEP,", "--stop-at STEP,"),
        (argument("suites", ["loss", "squad"]), "suites=['loss', 'squad']", "--suite loss,squad"),
        (
            argument("past", "RUN") + argument("path", "DIR"),
            "past=RUNpath=DIR",
            "--from RUN--dir DIR",
        ),
        (f"({argument('memory_bytes', 'GB*1e9')})", "(memory_bytes=GB*1e9)", "(--memory GB)"),
        (
            "path=x, data.path=x, only=3 and fresh=True",
            *["path=x, data.path=x, only=3 and fresh=True"] * 2,
        ),  # a user's own
    ],
)
def test_the_command_line_says_an_argument_as_its_option(message, api, typed):
    for kind in (UserError, RunFailed, Stopped):
        assert (str(kind(message)), as_typed(kind(message).text)) == (api, typed)


def test_a_run_as_a_data_frame_and_in_one_line(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    assert repr(run) == f"Run({run.path}: new)"
    write_ledger(
        run,
        {"kind": "event", "event": "started", "steps": 9},
        {"kind": "eval", "suite": "loss", "loss": 5.5},
        {"kind": "train", "step": 3, "loss": 4.5, "lr": 0.1},
        {"kind": "train", "step": 6, "loss": "NaN", "lr": 0.2},
        {"kind": "eval", "step": 6, "suite": "loss", "loss": 4.0},
        {"kind": "eval", "step": 6, "suite": "squad", "f1": 80},
        {"kind": "log", "step": 3, "log.loss": 7.0, "log.world": 5.0},
        {"kind": "event", "event": "stopped", "step": 6},
    )
    frame = run.to_pandas()
    assert list(frame.columns) == "loss lr log.loss log.world eval_loss squad.f1".split()
    assert list(frame.index) == [0, 3, 6]
    assert frame["loss"].isna().tolist() == [True, False, True]
    assert frame["eval_loss"].dropna().tolist() == [5.5, 4.0]
    assert frame["log.loss"].dropna().tolist() == [7.0]
    assert run.to_pandas("eval").loc[6, "suite"].tolist() == ["loss", "squad"]
    assert len(run.to_pandas("sample")) == 0
    assert repr(run) == f"Run({run.path}: stopped, step 6)"


def test_a_callbacks_object_has_what_the_docs_say() -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "extend.md"
    part = page.read_text(encoding="utf-8").split("## Callbacks")[1]
    [described] = re.findall(r"\| `on_step` .*?two methods", part, re.DOTALL)
    names = {name for name in re.findall(r"`(\w+)`", described) if not name.startswith("on_")}
    there = {
        name
        for kind in (StepEvent, EvaluationEvent, SaveEvent)
        for name in [*kind.__dataclass_fields__, *vars(kind)]
    }
    assert {"lr", "batch", "optimizer", "epoch", "loss", "results", "path"} <= names <= there


def test_a_training_and_an_evaluation_give_the_process_its_threads_back(corpus, tmp_path):
    torch.set_num_threads(2)
    during = set()
    recipe = tiny_recipe(corpus, tmp_path / "run", train__threads=1, train__steps=2)
    seen = each_step(lambda now: during.add(torch.get_num_threads()))
    run = train(recipe, callbacks=[seen])
    assert during == {1} and torch.get_num_threads() == 2
    evaluate(run, overrides=["train.threads=1"])
    assert torch.get_num_threads() == 2

    def fail(now):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        train(recipe, callbacks=[each_step(fail)], fresh=True)
    assert torch.get_num_threads() == 2
