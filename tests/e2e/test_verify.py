"""`windlass verify` proves what holds, and fails where it does not."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys

import pytest

from windlass.check.verify import kills_lose_nothing, prepare_bench, resume_exact, world_changes_nothing

STEP = importlib.import_module("windlass.training.step")


def test_one_process_proves_resume_worlds_and_kills(tmp_path):
    bench = prepare_bench("", tmp_path, kills=2, worlds=(1,))
    for proof in (resume_exact, world_changes_nothing, kills_lose_nothing):
        result = proof(bench)
        assert result.passed, result.measured


def test_a_resume_that_is_not_exact_fails_the_proof(tmp_path, monkeypatch):
    numbers = itertools.count()
    monkeypatch.setattr(STEP, "step_seed", lambda seed, step, micro: next(numbers))
    result = resume_exact(prepare_bench("", tmp_path, kills=1, worlds=(1,)))
    assert result.passed is False
    assert "differ after" in result.measured


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_verb_proves_everything_here(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "windlass", "verify", "--json", "--kills", "3"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [proof["passed"] for proof in json.loads(done.stdout)["proofs"]] == [True] * 6
