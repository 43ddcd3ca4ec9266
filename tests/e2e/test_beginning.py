"""Where a start begins from: extended, branched, started again, set aside. Wrong weights would be wrong in silence."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from test_resume import corpus, curve, evaluations, settings
from test_signals import signalled

from helpers import best_step, kept
from windlass.checkpoint.load import open_checkpoint
from windlass.errors import RunFailed, Stopped, UserError
from windlass.fileio import Files
from windlass.launch.local import launch
from windlass.recipe import Recipe
from windlass.run import Run, read_lines
from windlass.training import train
from windlass.training.session import Session
from windlass.training.start import resolve_start, set_aside

__all__ = ["corpus"]

WSD = {"optim.schedule.kind": "wsd", "optim.schedule.warmup": 2, "optim.schedule.decay": 4, "checkpoint.keep_last": 10}


AGAIN = """
import json, os, signal, sys
from windlass import Recipe, train

def on_step(step, _):
    if step == 8 and os.environ["WINDLASS_ATTEMPT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)

train(Recipe.load("quickstart", sys.argv[2:]), on_step=on_step, **json.loads(sys.argv[1]))
"""
"""A rank that is killed after step 8 of its first attempt."""
HOLD = """
import pathlib, sys, time
from windlass import Recipe, train

def on_step(step, _):
    while step == 2 and not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.05)

train(Recipe.load("quickstart", sys.argv[2:]), on_step=on_step)
"""
"""A training that waits after step 2 for a file."""


def recipe_of(corpus: Path, run: Path, **more: object) -> Recipe:
    return Recipe.load("quickstart", settings(corpus, run, **more))


def die(step: int, _: object) -> None:
    raise RunFailed("a failure of the test")


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    found = open_checkpoint(run / "checkpoints" / f"step-{step:08d}")
    return {name: found.tensor(name) for name in found.names()}


def same_weights(one: Run, other: Run, step: int) -> bool:
    mine, theirs = weights(one.path, step), weights(other.path, step)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def starts(run: Run) -> list[tuple[str, int]]:
    return [
        (e["event"], e["step"])
        for e in read_lines(run.metrics_path)
        if e.get("event") in ("started", "resumed", "branched")
    ]


def test_an_extension_that_dies_early_is_no_finished_run(corpus, tmp_path, monkeypatch):
    """Before the checkpoint is chosen, and after; asked again with the same command, and with a plain one."""
    recipe = recipe_of(corpus, tmp_path / "run", **WSD)
    longer = recipe.with_overrides("train.steps=16")
    train(recipe)
    whole = train(longer.with_overrides(f"run.dir='{tmp_path / 'whole'}'"))
    for name in ("_build", "_resume", "_observe"):
        with monkeypatch.context() as patch, pytest.raises(RunFailed, match="of the test"):
            patch.setattr(Session, name, lambda self, *_: die(0, None))
            train(recipe, extend_to=16)
        with monkeypatch.context() as patch, pytest.raises(RunFailed, match="of the test"):
            patch.setattr(Session, "_resume", lambda self: die(0, None))
            train(recipe, extend_to=16)
    assert not resolve_start(longer).finished
    run = train(longer)
    assert starts(run)[-1] == ("resumed", 6)
    assert curve(run.path) == curve(whole.path) and same_weights(run, whole, 16)
    assert resolve_start(longer).finished and Run(run.path).recipe.train.steps == 16


def test_an_extension_killed_before_its_first_save_goes_back_to_the_plateau_again(corpus, tmp_path):
    """And extended once more, before any new save: not from the end of the decay that was left."""
    recipe = recipe_of(corpus, tmp_path / "run", **WSD)
    train(recipe)
    whole = train(recipe.with_overrides("train.steps=20", f"run.dir='{tmp_path / 'whole'}'"))
    for steps in (16, 16, 20):
        with pytest.raises(RunFailed, match="of the test"):
            train(recipe, extend_to=steps, on_step=die)
    run = train(recipe.with_overrides("train.steps=20"))
    assert starts(run) == [("started", 0), *[("resumed", 6)] * 4]
    assert curve(run.path) == curve(whole.path) and same_weights(run, whole, 20)


def test_a_decayed_run_is_refused_each_time_it_is_asked(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path / "run", **{**WSD, "checkpoint.keep_last": 1, "checkpoint.keep_best": False})
    train(recipe)
    before = (tmp_path / "run" / "recipe.toml").read_bytes()
    for _ in range(2):
        with pytest.raises(UserError, match="a decayed run cannot be extended"):
            train(recipe, extend_to=16)
        assert (tmp_path / "run" / "recipe.toml").read_bytes() == before
    assert train(recipe).state == "finished"


def test_what_was_kept_for_good_is_there_for_an_extension(corpus, tmp_path):
    """`keep_every` as a share of the run means other steps once the run is longer."""
    keep = {"checkpoint.keep_last": 1, "checkpoint.keep_best": False, "checkpoint.keep_every": 0.5}
    recipe = recipe_of(corpus, tmp_path / "run", **{**WSD, **keep})
    train(recipe)
    whole = train(recipe.with_overrides("train.steps=16", f"run.dir='{tmp_path / 'whole'}'"))
    with pytest.raises(RunFailed, match="of the test"):
        train(recipe, extend_to=16, on_step=die)
    assert curve(train(recipe, extend_to=16).path) == curve(whole.path)


def test_the_end_of_a_run_stays_when_it_is_extended(corpus, tmp_path):
    """12 is a multiple of `checkpoint.every`, and the last of a run is its end all the same."""
    keep = {"checkpoint.keep_last": 1, "checkpoint.keep_best": False, "optim.schedule.kind": "constant"}
    recipe = recipe_of(corpus, tmp_path / "run", **keep)
    train(recipe)
    run = train(recipe, extend_to=24)
    why = kept(run)
    assert "final" in why[12] and "final" in why[24] and set(why) == {12, 24}


def test_a_run_resumed_from_an_earlier_step_never_jumps_onto_the_line_it_left(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path / "run", **{"checkpoint.keep_last": 10})
    with pytest.raises(Stopped):
        train(recipe, stop_at=9)
    with pytest.raises(RunFailed, match="of the test"):
        train(recipe.with_overrides("checkpoint.resume='3'"), on_step=die)
    with pytest.raises(Stopped):
        train(recipe, stop_at=7)
    run = train(recipe)
    assert starts(run) == [("started", 0), ("resumed", 3), ("resumed", 3), ("resumed", 7)]


def test_a_rewind_before_the_first_save_of_a_line_goes_back_to_its_beginning(corpus, tmp_path):
    """The newest commit in the directory is one of the line that was left."""
    from windlass.training.policies import Rewind

    recipe = recipe_of(corpus, tmp_path / "run", **{"checkpoint.keep_last": 10})
    with pytest.raises(Stopped):
        train(recipe, stop_at=9)
    seen: list[int] = []

    def bad(step: int, _: object) -> None:
        seen.append(step)
        if len(seen) == 1:
            raise Rewind("the test says so", 8 * step)

    run = train(recipe.with_overrides("checkpoint.resume='3'"), on_step=bad)
    assert [e["step"] for e in run.events if e["event"] == "rewound"] == [3]
    assert seen == [4, *range(4, 13)]


def test_a_branch_that_died_before_it_said_so_begins_at_its_origin(corpus, tmp_path, monkeypatch):
    origin = train(recipe_of(corpus, tmp_path / "origin", **{"optim.schedule.kind": "constant"}))
    recipe = recipe_of(corpus, tmp_path / "branch", **{"train.steps": 9, "checkpoint.every": 0})
    whole = train(recipe.with_overrides(f"run.dir='{tmp_path / 'whole'}'"), branch_from=f"{origin.path}@6")
    with monkeypatch.context() as patch, pytest.raises(RunFailed, match="of the test"):
        patch.setattr(Session, "_build", lambda self, *_: die(0, None))
        train(recipe, branch_from=f"{origin.path}@6")
    assert not Run(tmp_path / "branch").events
    with pytest.raises(UserError, match=r"begins at .*step-00000006, not at"):
        train(recipe, branch_from=f"{origin.path}@3")
    run = train(recipe)
    assert starts(run) == [("resumed", 6)]
    assert curve(run.path) == curve(whole.path) and same_weights(run, whole, 9)


def test_a_branch_that_just_began_is_running(tmp_path):
    lines = [{"kind": "event", "step": 0, "event": name} for name in ("started", "failed", "branched")]
    (tmp_path / "heartbeat").touch()
    assert Run(tmp_path).state_by(lines) == "running"


@pytest.mark.parametrize(("first", "second"), [("adamw", "muon"), ("muon", "adamw")])
def test_a_branch_to_another_optimizer_begins_its_moments_anew(corpus, tmp_path, capsys, first, second):
    origin = train(recipe_of(corpus, tmp_path / "origin", **{"optim.kind": f"'{first}'", "train.steps": 6}))
    recipe = recipe_of(corpus, tmp_path / "branch", **{"optim.kind": f"'{second}'", "train.steps": 8})
    with pytest.raises(RunFailed, match="of the test"):
        train(recipe, branch_from=f"{origin.path}@3", on_step=die)
    run = train(recipe)
    said = " ".join("".join(capsys.readouterr()).split())
    assert said.count(f"has the moments of {first}, of which {second} has no use: they begin anew") == 2
    assert run.state == "finished"
    saved = open_checkpoint(run.path / "checkpoints" / "step-00000008")
    assert saved.tensor(next(n for n in saved.names("optim/") if n.endswith("/step"))).item() == 5


def test_a_checkpoint_of_another_recipe_is_refused(corpus, tmp_path):
    origin = train(recipe_of(corpus, tmp_path / "origin", **{"train.steps": 6}))
    path = origin.checkpoints_dir / "step-00000003"
    resume = {"checkpoint.resume": f"'{path}'"}
    with pytest.raises(UserError, match=r"is of another recipe:\n  optim.lr: 0.003 -> 0.5\n"):
        train(recipe_of(corpus, tmp_path / "other", **{"optim.lr": 0.5, **resume}))
    assert not (tmp_path / "other").exists()
    longer = train(recipe_of(corpus, tmp_path / "longer", **resume))  # 12 steps: the length may differ
    assert [line["step"] for line in longer.lines("train")] == list(range(4, 13))
    alone = path.rename(tmp_path / "alone")  # its run's recipe is nowhere near
    elsewhere = {"checkpoint.resume": f"'{alone}'"}
    with pytest.raises(UserError, match=r"is of another recipe:\n  config hash"):
        train(recipe_of(corpus, tmp_path / "other", **{"run.seed": 7, **elsewhere}))
    assert train(recipe_of(corpus, tmp_path / "again", **elsewhere)).state == "finished"


SAME = [
    ("resume", "3"),
    ("resume", "path"),
    ("resume", "best"),
    ("resume", "never"),
    ("fresh", ""),
    ("branch", "fresh"),
]
QUICK = SAME[5:]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "how"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in SAME]
)
def test_a_restart_goes_on_from_the_latest_checkpoint(corpus, tmp_path, what, how):
    """Whatever the command says of the beginning: that was done at the first attempt."""
    more: dict[str, object] = {
        "checkpoint.background": "false",
        "checkpoint.keep_last": 10,
        "optim.schedule.kind": "constant",
    }
    overrides = settings(corpus, tmp_path / "run", **more)
    recipe = Recipe.load("quickstart", overrides)
    options: dict[str, object] = {}
    if (what, how) != ("resume", "never"):  # there is an old run
        with pytest.raises(Stopped):
            train(recipe, stop_at=9)
    if what == "branch":
        Run(tmp_path / "run").path.rename(tmp_path / "origin")
        with pytest.raises(Stopped):
            train(recipe, stop_at=9)
        options = {"branch_from": f"{tmp_path / 'origin'}@3", "fresh": True}
    elif what == "fresh":
        options = {"fresh": True}
    elif how == "path":
        Run(tmp_path / "run").path.rename(tmp_path / "origin")
        overrides.append(f"checkpoint.resume='{tmp_path / 'origin' / 'checkpoints' / 'step-00000003'}'")
    else:
        overrides.append(f"checkpoint.resume='{how}'")
    best = best_step(tmp_path / "run") if (tmp_path / "run").is_dir() else None
    assert launch([sys.executable, "-c", AGAIN, json.dumps(options), *overrides], 1, max_restarts=1) == 0
    run = Run(tmp_path / "run")
    began, again = starts(run)[-2:]
    assert began[1] == {"never": 0, "": 0, "best": best}.get(how, 3)
    assert again == ("resumed", 6)
    assert run.state == "finished" and [line["step"] for line in run.lines("train")][-1] == 12
    assert sorted(p.name for p in tmp_path.glob("run*")) == (["run", "run.old-1"] if "fresh" in options else ["run"])


def test_a_requeued_slurm_job_goes_on_and_another_job_does_as_it_is_told(corpus, tmp_path, monkeypatch):
    recipe = recipe_of(corpus, tmp_path / "run", **{"checkpoint.keep_last": 10})
    with pytest.raises(Stopped):
        train(recipe, stop_at=9)
    back = recipe.with_overrides("checkpoint.resume='3'")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    for count, expected in (("0", 3), ("1", 5), ("2", 7)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        with pytest.raises(Stopped):
            train(back, stop_at={3: 5, 5: 7, 7: 8}[expected])
        assert starts(Run(recipe.run_dir))[-1] == ("resumed", expected)
    assert resolve_start(back, fresh=True).resuming and not resolve_start(back, fresh=True).fresh
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    assert not resolve_start(back).restarted and resolve_start(recipe, fresh=True).fresh
    with pytest.raises(Stopped):
        train(back, stop_at=4)
    assert starts(Run(recipe.run_dir))[-1] == ("resumed", 3)


def test_a_run_that_lives_is_not_set_aside(corpus, tmp_path, monkeypatch):
    """Its process would go on in a directory of another name, and its checkpoints be lost to who looks for them."""
    overrides = settings(corpus, tmp_path / "run", **{"train.steps": 4})
    go = tmp_path / "go"
    living = subprocess.Popen([sys.executable, "-c", HOLD, str(go), *overrides])
    try:
        run, end = Run(tmp_path / "run"), time.monotonic() + 90
        while not run.lines("train") and time.monotonic() < end and living.poll() is None:
            time.sleep(0.05)
        monkeypatch.setattr("windlass.training.session.set_aside", partial(set_aside, seconds=0.2))
        with pytest.raises(UserError, match=f"another process trains in .* already .process {living.pid} on "):
            train(Recipe.load("quickstart", overrides), fresh=True)
        assert sorted(p.name for p in tmp_path.glob("run*")) == ["run"]
    finally:
        go.touch()
        assert living.wait(timeout=90) == 0
    assert run.state == "finished" and [line["step"] for line in run.lines("train")] == [1, 2, 3, 4]
    assert train(Recipe.load("quickstart", overrides), fresh=True).state == "finished"
    assert Run(tmp_path / "run.old-1").state == "finished"


def test_a_run_that_may_live_on_another_host_is_not_set_aside(tmp_path):
    """There its lock does not tell, and the heartbeat does; at the end of a run it does not count."""
    run = Run(tmp_path / "run")
    run.path.mkdir()
    run.lock_path.write_text(json.dumps({"pid": 1, "host": "another-host"}))
    run.metrics_path.write_text('{"kind": "event", "step": 0, "event": "started"}\n')
    run.heartbeat_path.touch()
    with pytest.raises(UserError, match="has a fresh heartbeat"):
        set_aside(run.path)
    assert run.path.is_dir()
    os.utime(run.heartbeat_path, (0, 0))
    assert set_aside(run.path) == tmp_path / "run.old-1"


@pytest.mark.parametrize("at", [4, 12])
@pytest.mark.parametrize("what", ["evaluation", "sample"])
def test_what_a_stop_cut_short_is_made_up(corpus, tmp_path, monkeypatch, at, what):
    """An evaluation or a sample of a step, the last one too: ledger and best checkpoint are those of an untouched run."""
    own = {"data.val_fraction": 0.3, "data.dir": f"'{tmp_path / 'data'}'"}
    recipe = recipe_of(corpus, tmp_path / "run", **{"eval.sample_every": 4, "eval.sample_tokens": 3, **own})
    whole = train(recipe.with_overrides(f"run.dir='{tmp_path / 'whole'}'"))
    name = "evaluate_loss" if what == "evaluation" else "generate"
    original = getattr(sys.modules["windlass.training.evaluations"], name)
    steps: list[int] = []

    def cut(*things: object, **more: object) -> object:
        if steps and steps[-1] == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*things, **more)

    with monkeypatch.context() as patch, pytest.raises(Stopped, match=f"after step {at}, all saved"):
        patch.setattr(f"windlass.training.evaluations.{name}", cut)
        train(recipe, on_step=lambda step, _: steps.append(step))
    assert Run(recipe.run_dir).state == "preempted"
    assert at not in [line["step"] for line in Run(recipe.run_dir).lines("eval" if what == "evaluation" else "sample")]
    as_if_untouched(train(recipe), whole)


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(("step", "call"), [(4, 4), (12, 10)])
def test_what_a_stop_of_two_ranks_cut_short_is_made_up(corpus, tmp_path, step, call):
    overrides = [*settings(corpus, tmp_path / "run", "ddp"), f"data.dir='{tmp_path / 'data'}'", "data.val_fraction=0.4"]
    said = signalled(tmp_path, overrides, f"evaluation@{call}", world=2)
    assert f"after step {step}, all saved" in said
    for name in ("run", "whole"):
        command = [sys.executable, "-m", "windlass", "train", "quickstart", *overrides, f"run.dir='{tmp_path / name}'"]
        assert launch(command, 2) == 0
    as_if_untouched(Run(tmp_path / "run"), Run(tmp_path / "whole"))


def as_if_untouched(run: Run, whole: Run) -> None:
    assert run.state == "finished"
    assert curve(run.path) == curve(whole.path) and evaluations(run.path) == evaluations(whole.path)
    texts = [[(x["step"], x["text"]) for x in one.lines("sample")] for one in (run, whole)]
    assert texts[0] == texts[1]
    for key in ("final_loss", "final_eval_loss", "best_eval_loss", "best_step"):
        assert run.summary.get(key) == whole.summary.get(key), key
    best = best_step(run)
    assert best == best_step(whole)
    assert same_weights(run, whole, best) and same_weights(run, whole, 12)
    assert open_checkpoint(run.checkpoints_dir / "step-00000012").meta["reason"] == "final"


@pytest.mark.parametrize("operation", ["create .lineage.json.new", "rename recipe.toml", "fsync_dir run"])
def test_a_start_that_failed_is_not_in_the_way_of_the_next(corpus, tmp_path, monkeypatch, operation):
    recipe = recipe_of(corpus, tmp_path / "run", **{"train.steps": 2})

    def full(self: Files, what: str, path: Path, *_: object) -> None:
        if f"{what} {path.name}" == operation:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch, pytest.raises(UserError, match="No space left on device"):
        patch.setattr(Files, "about_to", full)
        train(recipe)
    assert Run(tmp_path / "run").lock_path.exists()
    assert train(recipe).state == "finished"
