"""What a start does in its run directory: extend, branch, restart, set aside. Wrong weights would
be silent.
"""

import errno
import os
import shutil
import signal
import time
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from small_runs import WSD, curve, failed, recipe_of, settings, stopped, untouched

from forked import Forked, launch
from helpers import best_step, each_step, kept, refused, wait_for
from windlass import train
from windlass.checkpoint import save as save_module
from windlass.checkpoint.choose import Lineage, write_lineage
from windlass.checkpoint.format import open_checkpoint
from windlass.errors import RunFailed, UserError
from windlass.fileio import Files
from windlass.ledger import read_lines
from windlass.optim.schedule import lr_multiplier
from windlass.recipe import Horizon, Recipe
from windlass.reports.view import RunView
from windlass.run import Run
from windlass.training import directory, rank
from windlass.training.start import is_restart, job_id, resolve_start

KEEP_ALL = {"checkpoint.keep_last": 20}
BOUNDED = {"eval.batches": 1, "data.val_fraction": 0.3}
FLAT = {"optim.schedule.kind": "constant"}


def same(one: Run, other: Run, step: int) -> bool:
    """Whether two runs have equal curves, and equal tensors in the checkpoint of a step."""
    a, b = (open_checkpoint(run.path / "checkpoints" / f"step-{step:08d}") for run in (one, other))
    assert curve(one) == curve(other)
    return a.names() == b.names() and all(
        torch.equal(a.tensor(name), b.tensor(name)) for name in a.names()
    )


def starts(run: Run) -> list[tuple[str, int]]:
    names, lines = ("started", "resumed", "branched"), read_lines(run.metrics_path)
    return [(line["event"], line["step"]) for line in lines if line.get("event") in names]


def rates(recipe: Recipe, schedule_steps: int) -> list[float]:
    """The learning rates of 20 steps."""
    schedule, horizon = recipe.optim.schedule, Horizon(schedule_steps, 44, 8)
    return [recipe.optim.lr * lr_multiplier(schedule, horizon, step) for step in range(20)]


def test_an_extension_that_dies_early_is_no_finished_run(corpus, tmp_path, monkeypatch):
    recipe = recipe_of(corpus, tmp_path / "run", **WSD)
    longer, longest = (recipe.replace(f"train.steps={steps}") for steps in (16, 20))
    train(recipe)

    def fail(*_: object, **__: object) -> None:
        raise RunFailed("a failure of the test")

    places = (
        (directory, "candidate_checkpoints"),
        (rank.Network, "divide"),
        (rank, "Recorder"),
    )
    for module, name in places:
        with monkeypatch.context() as patch, pytest.raises(RunFailed):
            patch.setattr(module, name, fail)
            train(recipe, extend_to=16)
    assert not resolve_start(longer).finished
    failed(longer)
    # before any new save: not from the end of the decay that was left
    run = train(recipe, extend_to=20)
    assert starts(run)[1:] == [("resumed", 6)] * 2 and same(run, untouched(longest), 20)
    assert resolve_start(longest).finished and Run(run.path).recipe.train.steps == 20


def test_an_extended_wsd_run_goes_back_to_its_plateau(corpus, tmp_path, capsys):
    recipe = recipe_of(corpus, tmp_path / "run", **KEEP_ALL, **{"optim.schedule.decay": 4})
    train(recipe)
    capsys.readouterr()
    longer = train(recipe, extend_to=20)
    assert "resumed from" in capsys.readouterr().out
    extended = [(e["step"], e["extended_from"]) for e in longer.events if e.get("extended_from")]
    assert extended == [(6, 12)], "the decay began at step 8"
    assert [line["lr"] for line in longer.lines("train")] == rates(recipe, 20)
    assert curve(longer) == curve(untouched(recipe, "train.steps=20"))
    with pytest.raises(UserError):
        train(recipe)
    assert train(recipe, extend_to=20).state == "finished", "the same command again"


def test_a_length_in_epochs_is_extended_in_steps_or_epochs(corpus, tmp_path, monkeypatch):
    """48 samples an epoch, 8 a step: 2 epochs are 12 steps, 3 are 18."""
    own, longer = {"optim.schedule.steps": 16, "train.steps": "2 epochs"}, "18"
    recipe = recipe_of(corpus, tmp_path / "run", **WSD | own)
    train(recipe)
    assert resolve_start(recipe).finished
    with refused("extend_to=", "12 steps"):
        train(recipe, extend_to="1 epoch")
    with refused("extend_to=", "3 epochs"):
        train(recipe, extend_to="three epochs")
    with monkeypatch.context() as patch, pytest.raises(RunFailed):
        patch.setattr(rank, "Recorder", Mock(side_effect=RunFailed("a failure of the test")))
        train(recipe, extend_to=longer)
    extended = Run(recipe.run_dir).recipe
    assert extended.train.steps == 18
    assert not resolve_start(extended).finished, "its end is still to come"
    run = train(recipe, extend_to=longer)
    assert starts(run)[1:] == [("resumed", 12)]
    assert same(run, untouched(recipe, "train.steps=18"), 18)
    assert resolve_start(recipe, extend_to=longer).finished, "the same command again"
    assert resolve_start(recipe, extend_to=18).finished


def test_a_branch_from_the_best_checkpoint(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path / "run", **KEEP_ALL, **{"checkpoint.every": 4})
    origin = train(recipe)
    best = best_step(origin)
    assert best in (4, 8), "not the newest"
    branch = recipe.replace(f"run.dir='{tmp_path / 'branch'}'", "train.steps=14", "optim.lr=1e-4")
    with refused("RUN@STEP", "RUN@best", "branch_from="):
        train(branch, branch_from=f"{origin.path}@latest")
    run = train(branch, branch_from=f"{origin.path}@best", stop_at=best + 1)
    assert [x["step"] for x in run.lines("train")] == [best + 1]
    assert starts(run) == [("branched", best)]
    again = train(branch, branch_from=f"{origin.path}@best")
    # the same command resumes
    assert [x["step"] for x in again.lines("train")] == list(range(best + 1, 15))


def test_a_run_resumed_from_an_earlier_step_stays_on_its_new_lineage(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path / "run", **KEEP_ALL)
    stopped(recipe, 9)
    failed(recipe.replace("checkpoint.resume='3'"))
    stopped(recipe, 7)
    assert starts(train(recipe)) == [("started", 0), ("resumed", 3), ("resumed", 3), ("resumed", 7)]


def test_a_return_that_dies_early_is_no_finished_run(corpus, tmp_path, monkeypatch):
    recipe = recipe_of(corpus, tmp_path / "run", **KEEP_ALL)
    run = train(recipe)
    with monkeypatch.context() as patch, pytest.raises(RunFailed):
        patch.setattr(rank, "Recorder", Mock(side_effect=RunFailed("a failure of the test")))
        train(recipe.replace("checkpoint.resume='3'"))
    assert starts(train(recipe))[1:] == [("resumed", 3)]
    shutil.rmtree(run.checkpoints_dir / "step-00000012")
    assert resolve_start(recipe).finished, "a deleted end is still an end"


def test_a_decay_branches_from_the_plateau(corpus, tmp_path):
    flat = train(recipe_of(corpus, tmp_path / "flat", **FLAT))
    branch = recipe_of(corpus, tmp_path / "branch", **{"train.steps": 9, "optim.schedule.decay": 3})
    run = train(branch, branch_from=f"{flat.path}@6")
    lines = run.lines("train")
    assert next(e["event"] for e in run.events) == "branched"
    assert [line["step"] for line in lines] == [7, 8, 9]
    assert [round(line["lr"] / 3e-3, 4) for line in lines] == [1.0, 0.6667, 0.3333]
    assert lines[0]["loss"] == flat.lines("train")[6]["loss"]
    wall, speed = run.summary["wall_time"], run.summary["samples_per_s_whole_run"]
    assert speed == pytest.approx(3 * 8 / (wall["total"] - wall["startup"])), "its own samples"
    other = branch.replace(f"run.dir='{tmp_path / 'other'}'")
    for recipe, origin, word in (
        (other, f"{flat.path}@5", "checkpoint of step 5"),
        (other.replace("model.width=32"), f"{flat.path}@6", "model.width: 16 -> 32"),
        (other.replace("train.steps=5"), f"{flat.path}@6", "train.steps"),
    ):
        with refused(word):
            train(recipe, branch_from=origin)


def test_a_branch_that_ended_before_its_first_save_begins_at_its_origin_again(
    corpus, tmp_path, monkeypatch
):
    """It would else begin from the seed's weights, without a word. Given again as a branch, or as a
    plain command.
    """
    origin = train(recipe_of(corpus, tmp_path / "origin", **FLAT))
    recipe = recipe_of(corpus, tmp_path / "branch", **{"train.steps": 9, "checkpoint.every": 0})
    whole = untouched(recipe, branch_from=f"{origin.path}@6")
    for number, again in enumerate((f"{origin.path}@6", "")):
        branch = recipe.replace(f"run.dir='{tmp_path / str(number)}'")
        failed(branch, branch_from=f"{origin.path}@6")
        assert curve(train(branch, branch_from=again)) == curve(whole)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(rank, "Recorder", None)  # before the run's first event
        train(recipe, branch_from=f"{origin.path}@6")
    with refused("step-00000006", "run.dir"):
        train(recipe, branch_from=f"{origin.path}@3")
    with refused("a branch is a new run", "run.dir"):
        train(origin.recipe.replace("train.steps=9"), branch_from=f"{origin.path}@6")
    run = train(recipe)
    assert starts(run) == [("resumed", 6)] and same(run, whole, 9)


def test_branch_to_another_optimizer_starts_its_state_over(corpus, tmp_path, capsys):
    first, second = ({"optim.kind": kind} for kind in ("muon", "adamw"))
    origin = train(recipe_of(corpus, tmp_path / "origin", **first, **{"train.steps": 6}))
    recipe = recipe_of(corpus, tmp_path / "branch", **second, **{"train.steps": 8})
    failed(recipe, branch_from=f"{origin.path}@3")
    run = train(recipe)
    shown = "".join(capsys.readouterr())
    notes = [line for line in shown.splitlines() if "optimizer state" in line]
    assert len(notes) == 2 and all("muon" in note and "adamw" in note for note in notes)
    saved = open_checkpoint(run.path / "checkpoints" / "step-00000008")
    assert saved.tensor(next(n for n in saved.names("optim/") if n.endswith("/step"))).item() == 5


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "how"),
    [
        *(pytest.param("resume", how, marks=pytest.mark.full) for how in ("3", "best")),
        pytest.param("fresh", "", marks=pytest.mark.full),
        ("branch", "fresh"),
    ],
)
def test_a_restart_resumes_from_the_latest_checkpoint(corpus, tmp_path, what, how):
    """Whatever the command says of the start: that was done by the first attempt."""
    own = {"data.dir": f"'{tmp_path / 'data'}'"}  # prepared with a fraction of its own
    saved = {"checkpoint.background": "false", "eval.every": 6}
    overrides = settings(corpus, tmp_path / "run", **KEEP_ALL | FLAT | BOUNDED | own | saved)
    recipe = Recipe.load("quickstart", overrides)
    options: dict[str, object] = {"fresh": True} if what != "resume" else {}
    stopped(recipe, 9)
    if what == "branch":
        (tmp_path / "run").rename(tmp_path / "origin")
        stopped(recipe, 9)
        options["branch_from"] = f"{tmp_path / 'origin'}@3"
    elif what == "resume":
        overrides.append(f"checkpoint.resume='{how}'")
    best = best_step(tmp_path / "run")
    back = Recipe.load("quickstart", overrides)

    def die(now):
        if now.step == 8 and os.environ["WINDLASS_ATTEMPT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    rank = partial(train, back, callbacks=[each_step(die)], **options)
    assert launch([rank], 1, max_restarts=1) == 0
    run = Run(tmp_path / "run")
    first, again = starts(run)[-2:]
    assert first[1] == {"": 0, "best": best}.get(how, 3) and again == ("resumed", 6)
    assert run.state == "finished" and run.lines("train")[-1]["step"] == 12
    expected = ["run", "run.old-1"] if "fresh" in options else ["run"]
    assert sorted(p.name for p in tmp_path.glob("run*")) == expected


def test_a_requeued_slurm_job_resumes_and_another_job_does_as_it_is_told(
    corpus, tmp_path, monkeypatch
):
    recipe = recipe_of(corpus, tmp_path / "run", **KEEP_ALL)
    stopped(recipe, 9)
    back = recipe.replace("checkpoint.resume='3'")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    for count, expected, stop in (("0", 3, 5), ("1", 5, 7), ("2", 7, 8)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        assert starts(stopped(back, stop))[-1] == ("resumed", expected)
    assert resolve_start(back, fresh=True).resuming and not resolve_start(back, fresh=True).fresh
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    assert not resolve_start(back).restarted and resolve_start(recipe, fresh=True).fresh
    assert starts(stopped(back, 4))[-1] == ("resumed", 3)


def test_a_restart_by_torchrun_is_one_of_the_same_job(tmp_path):
    first = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    first["TORCHELASTIC_RUN_ID"] = "a"
    run, again = Run(tmp_path), first | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert not is_restart(run, again), "nothing was begun yet"
    write_lineage(tmp_path, Lineage(job=job_id(first)), Files())
    assert not is_restart(run, first) and is_restart(run, again)
    assert not is_restart(run, again | {"TORCHELASTIC_RUN_ID": "b"})


def test_a_live_run_is_not_renamed(corpus, tmp_path, monkeypatch):
    """Its process would continue in a directory of another name, where nobody looks for its
    checkpoints.
    """
    recipe, go = recipe_of(corpus, tmp_path / "run", **{"train.steps": 4}), tmp_path / "go"
    hold = each_step(lambda now: now.step == 2 and wait_for(go.exists, 90))
    living = Forked([partial(train, recipe, callbacks=[hold])])
    try:
        run = Run(tmp_path / "run")
        wait_for(lambda: run.lines("train") or living.poll() is not None, 90)
        run.heartbeat_path.unlink()  # its lock alone tells
        assert run.alive and run.state == "running"
        monkeypatch.setattr(directory, "LOCK_WAIT_SECONDS", 0.2)
        with refused(f"(process {living.pid} on "):
            directory.acquire_run_lock(run.path)
        with refused(str(living.pid)):
            train(recipe, fresh=True)
        assert sorted(p.name for p in tmp_path.glob("run*")) == ["run"]
    finally:
        go.touch()
        assert living.wait(timeout=90) == 0
    assert run.state == "finished" and [line["step"] for line in run.lines("train")] == [1, 2, 3, 4]
    assert train(recipe, fresh=True).state == "finished"
    assert Run(tmp_path / "run.old-1").state == "finished"


@pytest.mark.parametrize(
    ("file", "fresh", "setting", "words"),
    [
        ("thesis.tex", False, "run.name=a", ("fresh=True",)),
        ("log.txt", False, "checkpoint.resume=5", ("checkpoint.resume", "5")),
        ("recipe.toml", True, "checkpoint.resume=5", ("checkpoint.resume", "5")),
        ("recipe.toml", True, "model.init_from=missing", ("model.init_from", "not a run")),
        ("recipe.toml", True, "model.init_from=hf:gpt2", ("model.kind=hf model.name=gpt2",)),
    ],
)
def test_what_a_new_run_cannot_begin_with_is_found_before_a_rename(
    tmp_path, file, fresh, setting, words
):
    run = tmp_path / "run"
    recipe = Recipe.load("quickstart", [f"run.dir='{run}'", setting])
    run.mkdir()
    (run / file).write_text(recipe.toml())
    with refused(*words):
        train(recipe, fresh=fresh)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    if "init_from" in setting:
        assert resolve_start(recipe).resuming, "its checkpoints have the weights"


def test_a_resume_records_what_it_changes_and_compares_like_with_like(corpus, tmp_path):
    """Evaluations of 8 and of all samples are on one curve: the best is one of those that compare
    with the last.
    """
    values = {"eval.every": 2, "data.dir": f"'{tmp_path / 'data'}'"}
    recipe = recipe_of(corpus, tmp_path / "run", **KEEP_ALL | BOUNDED | values)
    stopped(recipe, 7)
    changed = ("eval.batches=0", "telemetry.every=3", "checkpoint.resume=6")
    run = train(recipe.replace(*changed, "data.workers=1"))
    events = [(e["step"], e["settings"]) for e in run.events if e["event"] == "settings_changed"]
    changes = {"data.workers": [0, 1], "eval.batches": [1, 0], "telemetry.every": [1, 3]}
    assert events == [(6, changes)]
    assert (run.recipe.eval.batches, run.recipe.telemetry.every) == (0, 3)
    assert run.recipe.checkpoint.resume == "latest"
    losses = {line["step"]: (line["samples"], line["loss"]) for line in run.lines("eval")}
    # step 6 was evaluated before the stop
    assert [losses[step][0] for step in (0, 2, 4, 6)] == [8] * 4
    after = {step: loss for step, (samples, loss) in losses.items() if samples > 8}
    assert set(after) == {8, 10, 12} and best_step(run) == min(after, key=lambda step: after[step])
    assert run.summary["best_step"] == best_step(run)
    assert run.summary["best_eval_loss"] == min(after.values())
    seen = RunView(run)
    assert seen.values["best_eval_loss"] == min(after.values())
    assert [r.what for r in seen.restarts] == ["resumed"]
    assert "eval.batches = 0 from here on, not 1" in seen.restarts[0].text
    # the same settings
    assert train(run.recipe).state == "finished" and len(Run(run.path).events) == len(run.events)


def test_evaluations_are_bounded_and_the_last_one_also_measures_all_data(corpus, tmp_path, capsys):
    more = BOUNDED | {"eval.every": 6, "data.dir": f"'{tmp_path / 'data'}'"}
    bounded = train(recipe_of(corpus, tmp_path / "bounded", **more))
    whole = train(recipe_of(corpus, tmp_path / "whole", **more | {"eval.batches": 0}))
    first, middle, last = bounded.lines("eval")
    of_all = whole.lines("eval")[-1]
    assert [line["samples"] for line in (first, middle, last)] == [8] * 3 and of_all["samples"] > 8
    assert not any("full_loss" in line for line in (first, middle, *whole.lines("eval")))
    for key in ("loss", "perplexity", "tokens", "samples", "bits_per_byte"):
        assert last[f"full_{key}"] == pytest.approx(of_all[key], rel=1e-12), key
    assert last["loss"] != last["full_loss"]
    assert bounded.summary["best_eval_loss"] == min(line["loss"] for line in (first, middle, last))
    seen = RunView(bounded).values
    assert (seen["eval_loss"], seen["full_eval_loss"]) == (last["loss"], last["full_loss"])
    text = capsys.readouterr().out
    assert f"of all data {last['full_loss']:.4f}" in text


KEEP_ONE = {"checkpoint.keep_last": 1, "checkpoint.keep_best": False}


def test_the_end_of_a_run_stays_when_it_is_extended(corpus, tmp_path):
    """12 is a multiple of `checkpoint.every`, and the last of a run is its end all the same."""
    recipe = recipe_of(corpus, tmp_path / "run", **KEEP_ONE | FLAT)
    train(recipe)
    why = kept(train(recipe, extend_to=24))
    assert "final" in why[12] and "final" in why[24] and set(why) == {12, 24}


def test_a_failed_save_before_the_last_one_does_not_fail_the_run(corpus, tmp_path, monkeypatch):
    run_save = save_module.Save.run

    def late_failure(save, *rest):
        if save.step == 11:
            time.sleep(0.5)  # the last save waits
            raise OSError(errno.EIO, "broken")
        return run_save(save, *rest)

    monkeypatch.setattr(save_module.Save, "run", late_failure)
    recipe = recipe_of(corpus, tmp_path / "run", **{"checkpoint.every": 11, "eval.every": 0})
    run = train(recipe)
    assert run.state == "finished" and (run.checkpoints_dir / "step-00000012").is_dir()
