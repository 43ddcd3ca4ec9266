"""What a start does in its run directory: extend, branch, restart, set aside. Wrong weights would be silent."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from small_runs import WSD, corpus, curve, die, recipe_of, says, settings

from helpers import best_step, kept
from windlass import train
from windlass.checkpoint.load import open_checkpoint
from windlass.checkpoint.retention import Lineage, write_lineage
from windlass.errors import RunFailed, Stopped, UserError
from windlass.fileio import Files
from windlass.launch.local import launch
from windlass.optim.schedule import factor
from windlass.recipe import Horizon, Recipe
from windlass.run import Run, read_lines
from windlass.training import setup
from windlass.training.start import LEFT_OVER, acquire_run_lock, is_restart, job_id, resolve_start, set_aside

__all__ = ["corpus"]

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
    for name in ("candidate_checkpoints", "prepare_model", "Recorder"):
        with monkeypatch.context() as patch, pytest.raises(RunFailed):
            patch.setattr(setup, name, lambda *_: die(0, None))
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
        with pytest.raises(RunFailed):
            train(recipe, extend_to=steps, on_step=die)
    run = train(recipe.with_overrides("train.steps=20"))
    assert starts(run) == [("started", 0), *[("resumed", 6)] * 4]
    assert curve(run.path) == curve(whole.path) and same_weights(run, whole, 20)


def test_a_decayed_run_is_refused_each_time_it_is_asked(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path / "run", **{**WSD, "checkpoint.keep_last": 1, "checkpoint.keep_best": False})
    train(recipe)
    before = (tmp_path / "run" / "recipe.toml").read_bytes()
    for _ in range(2):
        with pytest.raises(UserError) as error:
            train(recipe, extend_to=16)
        assert says(error, "checkpoint.keep_every")
        assert (tmp_path / "run" / "recipe.toml").read_bytes() == before
    assert train(recipe).state == "finished"


def test_what_was_kept_for_good_is_there_for_an_extension(corpus, tmp_path):
    """`keep_every` as a share of the run means other steps once the run is longer."""
    keep = {"checkpoint.keep_last": 1, "checkpoint.keep_best": False, "checkpoint.keep_every": 0.5}
    recipe = recipe_of(corpus, tmp_path / "run", **{**WSD, **keep})
    train(recipe)
    whole = train(recipe.with_overrides("train.steps=16", f"run.dir='{tmp_path / 'whole'}'"))
    with pytest.raises(RunFailed):
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
    with pytest.raises(RunFailed):
        train(recipe.with_overrides("checkpoint.resume='3'"), on_step=die)
    with pytest.raises(Stopped):
        train(recipe, stop_at=7)
    run = train(recipe)
    assert starts(run) == [("started", 0), ("resumed", 3), ("resumed", 3), ("resumed", 7)]


def test_a_branch_that_died_before_it_said_so_begins_at_its_origin(corpus, tmp_path, monkeypatch):
    origin = train(recipe_of(corpus, tmp_path / "origin", **{"optim.schedule.kind": "constant"}))
    recipe = recipe_of(corpus, tmp_path / "branch", **{"train.steps": 9, "checkpoint.every": 0})
    whole = train(recipe.with_overrides(f"run.dir='{tmp_path / 'whole'}'"), branch_from=f"{origin.path}@6")
    with monkeypatch.context() as patch, pytest.raises(RunFailed):
        patch.setattr(setup, "prepare_model", lambda *_: die(0, None))
        train(recipe, branch_from=f"{origin.path}@6")
    assert not Run(tmp_path / "branch").events
    with pytest.raises(UserError) as error:
        train(recipe, branch_from=f"{origin.path}@3")
    assert says(error, "step-00000006", "run.dir")
    run = train(recipe)
    assert starts(run) == [("resumed", 6)]
    assert curve(run.path) == curve(whole.path) and same_weights(run, whole, 9)


def test_a_branch_that_just_began_is_running(tmp_path):
    lines = [{"kind": "event", "step": 0, "event": name} for name in ("started", "failed", "branched")]
    (tmp_path / "heartbeat").touch()
    assert Run(tmp_path).state_by(lines) == "running"


@pytest.mark.parametrize(("first", "second"), [("adamw", "muon"), ("muon", "adamw")])
def test_a_branch_to_another_optimizer_starts_its_state_over(corpus, tmp_path, capsys, first, second):
    origin = train(recipe_of(corpus, tmp_path / "origin", **{"optim.kind": f"'{first}'", "train.steps": 6}))
    recipe = recipe_of(corpus, tmp_path / "branch", **{"optim.kind": f"'{second}'", "train.steps": 8})
    with pytest.raises(RunFailed):
        train(recipe, branch_from=f"{origin.path}@3", on_step=die)
    run = train(recipe)
    notes = [line for line in "".join(capsys.readouterr()).splitlines() if "optimizer state" in line]
    assert len(notes) == 2 and all(first in note and second in note for note in notes)
    assert run.state == "finished"
    saved = open_checkpoint(run.path / "checkpoints" / "step-00000008")
    assert saved.tensor(next(n for n in saved.names("optim/") if n.endswith("/step"))).item() == 5


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
        monkeypatch.setattr(setup, "set_aside", lambda path: set_aside(path, seconds=0.2))
        with pytest.raises(UserError) as error:
            train(Recipe.load("quickstart", overrides), fresh=True)
        assert says(error, str(living.pid))
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
    with pytest.raises(UserError) as error:
        set_aside(run.path)
    assert says(error, "heartbeat")
    assert run.path.is_dir()
    os.utime(run.heartbeat_path, (0, 0))
    assert set_aside(run.path) == tmp_path / "run.old-1"


@pytest.mark.parametrize("operation", ["create .lineage.json.new", "rename recipe.toml", "fsync_dir run"])
def test_a_start_that_failed_is_not_in_the_way_of_the_next(corpus, tmp_path, monkeypatch, operation):
    recipe = recipe_of(corpus, tmp_path / "run", **{"train.steps": 2})

    def full(self: Files, what: str, path: Path, *_: object) -> None:
        if f"{what} {path.name}" == operation:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch, pytest.raises(UserError) as error:
        patch.setattr(Files, "about_to", full)
        train(recipe)
    assert says(error, "No space left on device", "run.dir") and Run(tmp_path / "run").lock_path.exists()
    assert train(recipe).state == "finished"


def test_an_extended_wsd_run_goes_back_to_its_plateau(corpus, tmp_path):
    short = settings(corpus, tmp_path / "run", **{"optim.schedule.decay": 4, "checkpoint.keep_last": 20})
    recipe = Recipe.load("quickstart", short)
    train(recipe)
    longer = train(recipe, extend_to=20)
    assert longer.state == "finished"
    resumed = [e for e in longer.events if e.get("extended_from")]
    assert [(e["step"], e["extended_from"]) for e in resumed] == [(6, 12)], "the decay began at step 8"
    horizon, schedule = Horizon(20, 44, 8), recipe.optim.schedule
    rates = [line["lr"] for line in longer.lines("train")]
    assert rates == [recipe.optim.lr * factor(schedule, horizon, step) for step in range(20)]
    whole = train(recipe.with_overrides("train.steps=20", f"run.dir='{tmp_path / 'whole'}'"))
    assert curve(longer.path) == curve(whole.path), "as if the run had been made that long"
    with pytest.raises(UserError):
        train(recipe)
    assert train(recipe, extend_to=20).state == "finished", "the same command again finds the run finished"


def test_a_decay_branches_from_the_plateau(corpus, tmp_path):
    flat = settings(corpus, tmp_path / "flat", **{"optim.schedule.kind": "constant"})
    train(Recipe.load("quickstart", flat))
    branch = settings(corpus, tmp_path / "branch", **{"train.steps": 9, "optim.schedule.decay": 3})
    run = train(Recipe.load("quickstart", branch), branch_from=f"{tmp_path / 'flat'}@6")
    assert next(e["event"] for e in run.events) == "branched"
    assert [line["step"] for line in run.lines("train")] == [7, 8, 9]
    assert [round(line["lr"] / 3e-3, 4) for line in run.lines("train")] == [1.0, 0.6667, 0.3333]
    assert run.lines("train")[0]["loss"] == Run(tmp_path / "flat").lines("train")[6]["loss"]
    other, flat = Recipe.load("quickstart", [*branch, f"run.dir='{tmp_path / 'other'}'"]), tmp_path / "flat"
    for recipe, origin, word in (
        (other, f"{flat}@5", "no checkpoint of step 5"),
        (other, "nowhere@3", "nowhere"),
        (other, "x", "RUN@STEP"),
        (other.with_overrides("model.width=32"), f"{flat}@6", "model.width: 16 -> 32"),
        (other.with_overrides("train.steps=5"), f"{flat}@6", "train.steps"),
    ):
        with pytest.raises(UserError) as error:
            train(recipe, branch_from=origin)
        assert says(error, word)


def test_a_branch_that_was_stopped_before_its_first_checkpoint_branches_again(corpus, tmp_path):
    """It would else begin from the seed's weights, without a word."""
    train(recipe_of(corpus, tmp_path / "origin", **{"optim.schedule.kind": "constant"}))
    recipe, origin = (
        recipe_of(corpus, tmp_path / "b", **{"train.steps": 9, "checkpoint.every": 0}),
        f"{tmp_path / 'origin'}@6",
    )
    whole = train(recipe.with_overrides(f"run.dir='{tmp_path / 'whole'}'"), branch_from=origin)
    for again in (origin, ""):  # the same command, or a plain one
        mine = recipe.with_overrides(f"run.dir='{tmp_path / f'branch{bool(again)}'}'")
        with pytest.raises(RunFailed):
            train(mine, branch_from=origin, on_step=die)
        assert curve(train(mine, branch_from=again)) == curve(whole)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("resume", ["5", "/nowhere/step-00000005"])
def test_a_new_run_cannot_resume_from_what_is_not_there_and_nothing_is_set_aside(tmp_path, fresh, resume):
    run = tmp_path / "run"
    recipe = Recipe.load("quickstart", [f"run.dir='{run}'", f"checkpoint.resume='{resume}'"])
    if fresh:
        (run / "checkpoints" / "step-00000003").mkdir(parents=True)
        (run / "recipe.toml").write_text(recipe.toml())
    with pytest.raises(UserError) as error:
        resolve_start(recipe, fresh=fresh)
    assert says(error, "checkpoint.resume", resume)
    assert [p.name for p in tmp_path.iterdir()] == (["run"] if fresh else [])


def test_what_is_set_aside_cannot_be_resumed_from(tmp_path):
    inside = tmp_path / "run" / "checkpoints" / "step-00000003"
    inside.mkdir(parents=True)
    recipe = Recipe.load("quickstart", [f"run.dir='{tmp_path / 'run'}'", f"checkpoint.resume='{inside}'"])
    (tmp_path / "run" / "recipe.toml").write_text(recipe.toml())
    with pytest.raises(UserError) as error:
        resolve_start(recipe, fresh=True)
    assert says(error, "--fresh", "checkpoint.resume") and inside.is_dir()


LOCKS = """
import sys, pathlib
from windlass.training.start import acquire_run_lock
lock = acquire_run_lock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_training_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    run = Run(tmp_path)
    run.metrics_path.write_text(json.dumps({"kind": "event", "step": 0, "attempt": 0, "event": "started"}) + "\n")
    command = [sys.executable, "-c", LOCKS, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    assert (run.alive, run.state) == (True, "running")  # by its lock alone: there is no heartbeat
    with pytest.raises(UserError) as error:
        acquire_run_lock(tmp_path, seconds=0.2)
    assert says(error, str(holder.pid))
    run.heartbeat_path.touch()
    holder.kill()
    holder.communicate()
    assert (run.alive, run.state) == (False, "failed")
    lock = acquire_run_lock(tmp_path, seconds=0.0)
    assert lock is not None
    lock.close()


def test_where_the_lock_is_another_hosts_the_heartbeat_counts(tmp_path):
    run = Run(tmp_path)
    run.lock_path.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    assert not run.alive
    run.heartbeat_path.touch()
    assert run.alive
    run.lock_path.write_text("")
    assert run.alive


TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "a",
}  # fmt: skip


def test_a_restart_by_torchrun_is_one_of_the_same_job(tmp_path):
    run = Run(tmp_path)
    again = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert not is_restart(run, again), "nothing was begun yet"
    write_lineage(tmp_path, Lineage(job=job_id(TORCHRUN)), Files())
    assert not is_restart(run, TORCHRUN)
    assert is_restart(run, again)
    assert not is_restart(run, again | {"TORCHELASTIC_RUN_ID": "b"})


def test_what_a_failed_start_leaves_is_no_hindrance_but_anything_else_is(tmp_path):
    recipe = Recipe.load("quickstart", [f"run.dir='{tmp_path}'"])
    for name in LEFT_OVER:
        (tmp_path / name).touch()
    assert not resolve_start(recipe).resuming
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="--fresh"):
        resolve_start(recipe)


def test_who_waited_for_a_lock_holds_that_of_the_directory_of_the_name(tmp_path, monkeypatch):
    """`--fresh` renames the directory while another training waits for its lock."""
    run = tmp_path / "run"
    run.mkdir()
    first = acquire_run_lock(run)
    got: list[object] = []
    waits, pause = threading.Event(), time.sleep
    monkeypatch.setattr("windlass.training.start.time.sleep", lambda seconds: (waits.set(), pause(seconds)))
    waiting = threading.Thread(target=lambda: got.append(acquire_run_lock(run, seconds=30)))
    waiting.start()
    assert waits.wait(30)
    run.rename(tmp_path / "aside")
    assert first is not None
    first.close()
    waiting.join()
    with pytest.raises(UserError, match="wait for it"):
        acquire_run_lock(run, seconds=0)
    aside = acquire_run_lock(tmp_path / "aside", seconds=0)
    assert aside is not None
    for file in (aside, *got):
        file.close()
