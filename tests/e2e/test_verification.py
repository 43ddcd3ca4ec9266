"""`windlass verify` proves what holds, and fails where it does not."""

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from helpers import command
from windlass.run import Run
from windlass.verification import verify
from windlass.verification.bench import Bench
from windlass.verification.proofs import (
    export_equal,
    kills_lose_nothing,
    layouts_agree,
    resume_exact,
    strategies_agree,
)

FULL_DIST = [pytest.mark.full, pytest.mark.dist]
# Two threads wait for each other if the cores have other work.
ONE_THREAD = ["train.threads=1"]


class Wrong(Bench):
    """The run named comes out a little wrong: one gradient norm by a millionth."""

    wrong = ""

    def train(self, *arguments: Any, **more: Any) -> Run:
        run = super().train(*arguments, **more)
        if run.path.name == self.wrong and run.metrics_path.exists():
            lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
            spoiled = next(x for x in lines if x["kind"] == "train" and x["step"] == 10)
            spoiled["grad_norm"] *= 1 + 1e-6
            run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run


def test_one_process_proves_resume_and_kills(tmp_path):
    bench = Bench(tmp_path, overrides=ONE_THREAD, kills=2, worlds=(1,))
    for proof in (resume_exact, kills_lose_nothing):
        passed, measured, _ = proof(bench)
        assert passed, measured


@pytest.mark.parametrize(
    ("proof", "wrong", "worlds"),
    [
        (resume_exact, "from-7", (1,)),
        pytest.param(strategies_agree, "s-full_shard", (1, 2), marks=FULL_DIST),
        pytest.param(layouts_agree, "l-2-cp2", (1, 2), marks=FULL_DIST),
    ],
)
def test_a_run_that_is_not_exact_fails_the_proof(tmp_path, proof, wrong, worlds):
    bench = Wrong(tmp_path, overrides=ONE_THREAD, worlds=worlds)
    bench.wrong = wrong
    passed, measured, _ = proof(bench)
    assert passed is False
    assert wrong != "from-7" or "differ after: 7" in measured


def test_an_export_that_is_not_equal_fails_the_proof(tmp_path, monkeypatch):
    module = importlib.import_module("windlass.interop.export")
    original = module.export

    def off_by_little(run: str, folder: Path) -> object:
        done = original(run, folder)
        weights = load_file(folder / "model.safetensors")
        weights["transformer.h.1.mlp.c_fc.weight"] *= 1.01
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return done

    bench = Bench(tmp_path, worlds=(1,))
    assert export_equal(bench)[0]
    monkeypatch.setattr(module, "export", off_by_little)
    bench.folder = tmp_path / "again"
    bench.folder.mkdir()
    assert export_equal(bench)[0] is False


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_verb_and_the_function_prove_everything_here(tmp_path):
    # Not a fork of this process, whose fork server it could not wait for.
    verb = command("verify", "--json", "--kills", "3")
    done = subprocess.run(verb, cwd=tmp_path, capture_output=True, timeout=900, check=True)
    assert [proof["passed"] for proof in json.loads(done.stdout)["proofs"]] == [True] * 6
    passed = [proof.passed for proof in verify(world=1, kills=1)]
    assert passed == [True, None, None, True, True, True]
