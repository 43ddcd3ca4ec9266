"""`windlass verify` proves what holds, and fails where it does not."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from windlass.verification import (
    export_equal,
    kills_lose_nothing,
    prepare_bench,
    resume_exact,
    sequence_whole,
    strategies_agree,
    world_changes_nothing,
)

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


def test_an_export_that_is_not_equal_fails_the_proof(tmp_path, monkeypatch):
    export = importlib.import_module("windlass.interop.export")
    original = export.export

    def off_by_little(run: str, folder: Path) -> object:
        done = original(run, folder)
        weights = load_file(folder / "model.safetensors")
        weights["transformer.h.1.mlp.c_fc.weight"] *= 1.01
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return done

    bench = prepare_bench("", tmp_path, kills=1, worlds=(1,))
    assert export_equal(bench).passed
    monkeypatch.setattr(export, "export", off_by_little)
    bench.folder = tmp_path / "again"
    bench.folder.mkdir()
    assert export_equal(bench).passed is False


@pytest.mark.full
@pytest.mark.dist
def test_a_sample_that_is_read_twice_fails_the_proof(tmp_path, monkeypatch):
    bench = prepare_bench("", tmp_path, kills=1, worlds=(1,))
    original = type(bench).train

    def reads_one_twice(self, run, world=1, task=None, **settings):
        done = original(self, run, world, task, **settings)
        record = Path(f"{task['record']}-0.json")
        reads = json.loads(record.read_text())
        if task["record"].endswith("reads-1"):
            reads[1] = reads[0]
        record.write_text(json.dumps(reads))
        return done

    monkeypatch.setattr(type(bench), "train", reads_one_twice)
    result = sequence_whole(bench)
    assert result.passed is False
    assert "order as defined: False" in result.measured


@pytest.mark.full
@pytest.mark.dist
def test_a_strategy_that_is_wrong_fails_the_proof(tmp_path, monkeypatch):
    """The one process is made wrong here, by 1e-5 of its gradient norm, less than the start-up checks see: the ranks are processes of their own."""
    collectives = importlib.import_module("windlass.parallel.collectives")
    norm = collectives.global_grad_norm
    monkeypatch.setattr(collectives, "global_grad_norm", lambda *a: norm(*a) * 1.00001)
    result = strategies_agree(prepare_bench("", tmp_path, kills=1, worlds=(1, 2)))
    assert result.passed is False


@pytest.mark.full
@pytest.mark.parametrize(("pdrop", "passed"), [(0.0, True), (0.1, None)])
def test_a_recipe_of_a_hugging_face_model_is_proved(tmp_path, pdrop, passed):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=257, n_positions=32, n_embd=16, n_layer=2, n_head=2,
        attn_pdrop=pdrop, embd_pdrop=pdrop, resid_pdrop=pdrop, bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    GPT2LMHeadModel(shape).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "text.txt").write_text(Path(__file__).read_text()[:1500])
    (tmp_path / "own.toml").write_text(f"""
[model]
kind = "hf"
name = "{tmp_path / "gpt2"}"
context = 16
[data]
source = "{tmp_path / "text.txt"}"
dir = "{tmp_path / "data"}"
tokenizer = "byte"
[train]
steps = 100
global_batch = 32
""")
    bench = prepare_bench(str(tmp_path / "own.toml"), tmp_path / "bench", kills=1, worlds=(1,))
    bench.folder.mkdir()
    assert world_changes_nothing(bench).passed is passed
    if passed:
        assert resume_exact(bench).passed
        assert export_equal(bench).passed


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
