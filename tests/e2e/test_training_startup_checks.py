"""What the start-up checks are for, seen from outside: a run that is wrong from the start makes no
step.
"""

import math
import shutil
import socket
import threading

import pytest
import torch
import torch.nn.functional as F
from small_runs import corpus, recipe_of
from torch import nn

import helpers
from helpers import each_step, refused, tiny_recipe, write_corpus
from windlass import train
from windlass.checkpoint.save import Writer
from windlass.errors import RunFailed, UserError
from windlass.run import Run
from windlass.training import network
from windlass.training.trainer import check_first_loss

__all__ = ["corpus"]


class Tied(nn.Module):
    """A user's own model, with one matrix as embedding and head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
        self.head.weight = self.embedding.weight

    def blocks(self) -> list[nn.Module]:
        return []

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(tokens))
        return F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )


def untied(model: nn.Module) -> nn.Module:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        ("master weights", "torch.float32"),
        ("ties", "embedding.weight and head.weight"),
    ],
)
def test_run_that_is_wrong_from_the_start_makes_no_step(
    corpus, tmp_path, monkeypatch, broken, word
):
    parallelize, spoil = network.parallelize, untied if broken == "ties" else nn.Module.bfloat16
    monkeypatch.setattr(network, "parallelize", lambda *a: spoil(parallelize(*a)))
    with refused(word, "train.startup_checks", error=RunFailed):
        train(recipe_of(corpus, tmp_path / "run"), Tied())
    run = Run(tmp_path / "run")
    assert not run.exists and not run.checkpoints_dir.exists()


def test_the_first_loss_is_held_against_guessing():
    """No module of 512 tokens starts at 25.9 with its own tokenizer; a trained one starts below ln
    512 = 6.24.
    """
    text = check_first_loss(25.9, 512, fresh=False)
    assert all(word in text for word in ("25.9", "6.238", "data.tokenizer"))
    # 0: every label was masked; NaN has a message of its own
    for loss in (6.3, 9.0, 1.2, 0.01, 0.0, math.nan):
        assert check_first_loss(loss, 512, fresh=False) == ""
    assert "init_std" in check_first_loss(25.9, 512, fresh=True)
    assert check_first_loss(0.1, 512, fresh=True)
    assert check_first_loss(6.4, 512, fresh=True) == check_first_loss(2.3, 9, fresh=True) == ""


@pytest.mark.dist
@pytest.mark.parametrize("launcher", ["by hand", "--world"])
def test_a_finished_training_writes_its_report_once(tmp_path, launcher):
    """Rank 0 does under a foreign launcher, and with `--world` the process that started the ranks."""
    text = write_corpus(tmp_path / "text.txt", words=2000)
    recipe = tiny_recipe(text, tmp_path / "run", train__steps=2)
    (tmp_path / "recipe.toml").write_text(recipe.toml())
    words = ["train", tmp_path / "recipe.toml"]
    if launcher == "--world":
        outputs = [helpers.windlass(*words, "--world", "2").stdout]
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [helpers.start(*words, env=place | {"RANK": rank}) for rank in "01"]
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], outputs
    assert [text.count("report: ") for text in outputs] == [1, 0][: len(outputs)]
    assert list((tmp_path / "run" / "report").glob("*.html"))


def test_a_prompt_that_the_tokenizer_cannot_read_is_bad_input_at_the_start(corpus, tmp_path):
    own = {"eval.sample_every": 6, "eval.prompt": "naïve"}
    with refused("eval.prompt", "ï", "eval.sample_every=0"):
        train(recipe_of(corpus, tmp_path / "run", **own))
    assert not Run(tmp_path / "run").exists


@pytest.mark.parametrize("error", [UserError("wrong"), ValueError("wrong"), RunFailed("wrong")])
def test_an_error_in_the_loop_waits_for_the_save_and_leaves_an_event(
    corpus, tmp_path, monkeypatch, error
):
    """A disk that takes longer than a step."""
    write, waits = Writer._write, threading.Event()

    def slowly(*job):
        waits.wait(1.0)
        write(*job)

    def fail(now):
        if now.step == 4:
            raise error

    monkeypatch.setattr(Writer, "_write", slowly)
    with pytest.raises(type(error)):
        train(recipe_of(corpus, tmp_path / "run"), callbacks=[each_step(fail)])
    run = Run(tmp_path / "run")
    assert [path.name for path in run.checkpoints_dir.iterdir()] == ["step-00000003"]
    assert run.state == "failed" and run.events[-1]["reason"] == "wrong"


def test_warmup_and_decay_are_compared_with_the_resolved_length(corpus, tmp_path):
    """44 samples are an epoch, 8 a step."""
    own = {"train.steps": "'0.5 epochs'", "optim.schedule.warmup": "'1 epoch'"}
    with refused("optim.schedule.warmup", "3 steps"):
        train(recipe_of(corpus, tmp_path / "run", **own))
    mixed = {"optim.schedule.kind": "wsd", "optim.schedule.warmup": 0.6, "optim.schedule.decay": 8}
    with refused("optim.schedule.warmup", "optim.schedule.decay"):
        train(recipe_of(corpus, tmp_path / "run", **mixed, **{"train.steps": "'2 epochs'"}))
    assert not Run(tmp_path / "run").exists


@pytest.mark.parametrize("move", [shutil.rmtree, lambda path: path.rename(path.with_name("moved"))])
def test_a_run_directory_that_is_deleted_or_moved_ends_the_run_once(corpus, tmp_path, move):
    path = tmp_path / "run"
    with refused("run", "deleted or moved", error=RunFailed):
        train(
            recipe_of(corpus, path, **{"telemetry.every": 100, "checkpoint.background": False}),
            callbacks=[each_step(lambda now: now.step == 4 and move(path))],
        )
    assert not (path / "checkpoints").exists()
