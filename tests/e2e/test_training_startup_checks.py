"""The start and the end of a training: bad input, an error in the loop, the report."""

import shutil
import socket
import threading

import pytest
from small_runs import recipe_of

import helpers
from helpers import each_step, refused, tiny_recipe, write_corpus
from windlass import train
from windlass.checkpoint.save import Writer
from windlass.errors import RunFailed
from windlass.run import Run


def test_warmup_and_decay_are_compared_with_the_resolved_length(corpus, tmp_path):
    """44 samples are an epoch, 8 a step."""
    own = {"train.steps": "'0.5 epochs'", "optim.schedule.warmup": "'1 epoch'"}
    with refused("optim.schedule.warmup", "3 steps"):
        train(recipe_of(corpus, tmp_path / "run", **own))
    mixed = {"optim.schedule.kind": "wsd", "optim.schedule.warmup": 0.6, "optim.schedule.decay": 8}
    with refused("optim.schedule.warmup", "optim.schedule.decay"):
        train(recipe_of(corpus, tmp_path / "run", **mixed, **{"train.steps": "'2 epochs'"}))
    assert not Run(tmp_path / "run").exists


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


@pytest.mark.parametrize("error", [ValueError("wrong"), RunFailed("wrong")])
def test_an_error_in_the_loop_waits_for_the_save_and_leaves_an_event(
    corpus, tmp_path, monkeypatch, error
):
    """A disk that takes longer than a step."""
    write, waits = Writer._write, threading.Event()

    def slowly(*job):
        waits.wait(0.3)
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


@pytest.mark.parametrize("move", [shutil.rmtree, lambda path: path.rename(path.with_name("moved"))])
def test_a_run_directory_that_is_deleted_or_moved_ends_the_run_once(corpus, tmp_path, move):
    path = tmp_path / "run"
    with refused("run", "deleted or moved", error=RunFailed):
        train(
            recipe_of(corpus, path, **{"telemetry.every": 100, "checkpoint.background": False}),
            callbacks=[each_step(lambda now: now.step == 4 and move(path))],
        )
    assert not (path / "checkpoints").exists()
