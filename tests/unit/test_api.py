"""The public API: a function for every verb, typed results, and an import that costs nothing."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import windlass
from helpers import curve, tiny_recipe


def test_every_verb_is_a_documented_function() -> None:
    for name in ["train", "plan", "prepare", "evaluate", "sample", "sweep", "report", "export", "track", "verify"]:
        function = getattr(windlass, name)
        assert inspect.isfunction(function) and function.__doc__, name
        assert inspect.signature(function).return_annotation not in (inspect.Signature.empty, "None"), name
    assert {"Run", "Recipe", "Study"} < set(dir(windlass))
    with pytest.raises(AttributeError, match="trane"):
        _ = windlass.trane


def test_importing_it_imports_no_torch_and_no_submodule_shadows_a_function() -> None:
    code = (
        "import sys, windlass; assert 'torch' not in sys.modules; windlass.report, windlass.sweep;"
        "windlass.plan('gpt2-124m', world=8, device='A100-40GB');"
        "assert 'torch' not in sys.modules; import windlass.training.trainer, windlass.reports.page, windlass.evaluation.likelihood;"
        "assert all(callable(getattr(windlass, n)) for n in windlass.__all__ if n != '__version__')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_a_run_from_preparation_to_export(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    architecture = {"model__position": "learned", "model__norm": "layernorm", "model__activation": "gelu_tanh"}
    biases = {"model__attn_bias": True, "model__ff_bias": True, "model__qk_norm": False}
    recipe = tiny_recipe(corpus, tmp_path / "run", eval__every=6, **architecture, **biases)
    prepared = windlass.prepare(recipe)
    assert prepared.made and not windlass.prepare(recipe).made
    run = windlass.train(recipe)
    assert [step for step, *_ in curve(run)] == list(range(1, 13))
    measured = windlass.evaluate(run, ["loss"])
    assert measured.results["loss"]["loss"] == pytest.approx(run.lines("eval")[-1]["loss"], rel=1e-5)
    pieces = list(windlass.sample(run, "the ", n=2, device="cpu", max_tokens=4))
    assert {number for number, _ in pieces} == {0, 1}
    assert windlass.report(run).page.read_text().startswith("<!doctype html>")
    assert windlass.plan(recipe).world == 1
    exported = windlass.export(run, tmp_path / "hf")
    assert {"config.json", "model.safetensors"} <= {path.name for path in exported.iterdir()}
