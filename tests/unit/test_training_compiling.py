"""What `train.compile = "auto"` needs on a machine, and where it compiles nothing."""

import importlib.util
import sysconfig

import pytest
import torch

from windlass import Recipe, train
from windlass.training.compiling import missing_tools


def test_missing_tools(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    assert "7.0" in missing_tools((6, 1))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton" in missing_tools((8, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "C compiler" in missing_tools((8, 0))
    compiler = tmp_path / "gcc"
    compiler.touch(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python.h" in missing_tools((8, 0))
    (tmp_path / "Python.h").touch()
    assert missing_tools((8, 0)) == ""


def test_auto_compiles_nothing_on_a_cpu_and_the_start_says_so(
    tmp_path, corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", None)  # it would raise TypeError
    small = {"model.layers": 1, "model.context": 32, "train.steps": 1, "eval.every": 0}
    small |= {"data.source": str(corpus), "data.dir": str(tmp_path / "data")}
    run = train(Recipe.load("quickstart").replace(small, {"run.dir": str(tmp_path / "run")}))
    assert run.events[0]["compiles"] is False
