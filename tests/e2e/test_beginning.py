"""Where a start begins from: extended, branched, started again, set aside. Wrong weights would be wrong in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_resume import corpus, curve, settings

from windlass.checkpoint.load import open_checkpoint
from windlass.errors import RunFailed, Stopped, UserError
from windlass.recipe import Recipe
from windlass.run import Run, read_lines
from windlass.training import train
from windlass.training.claim import claim
from windlass.training.session import Session

__all__ = ["corpus"]

WSD = {"optim.schedule.kind": "wsd", "optim.schedule.warmup": 2, "optim.schedule.decay": 4, "checkpoint.keep_last": 10}


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
    assert not claim(longer).finished
    run = train(longer)
    assert starts(run)[-1] == ("resumed", 6)
    assert curve(run.path) == curve(whole.path) and same_weights(run, whole, 16)
    assert claim(longer).finished and Run(run.path).recipe.train.steps == 16


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
    kept = {row["step"]: row["kept"] for row in run.checkpoint_index()["checkpoints"]}
    assert "final" in kept[12] and "final" in kept[24] and set(kept) == {12, 24}


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
    with pytest.raises(UserError, match=r"is of another recipe:\n  its recipe's digest is"):
        train(recipe_of(corpus, tmp_path / "other", **{"run.seed": 7, **elsewhere}))
    assert train(recipe_of(corpus, tmp_path / "again", **elsewhere)).state == "finished"
