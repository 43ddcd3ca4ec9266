"""Killed and resumed is as if nothing had happened: bit for bit in one world, to rounding in another."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest

from windlass.errors import RunFailed, Stopped, UserError
from windlass.launch.local import launch
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.training import train

SCRIPT = Path(__file__).parent / "killed.py"
KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "samples", "epoch")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A text of made-up words: 44 samples of 16 characters for training, so that 12 steps of 8 cross two epochs' edges."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefgh") for _ in range(draw.randint(2, 6))) for _ in range(400)]
    (folder / "text.txt").write_text(" ".join(words)[:787])
    return folder


def settings(corpus: Path, run: Path, strategy: str = "auto", micro: int = 0, **more: object) -> list[str]:
    values = {
        "run.dir": f"'{run}'", "data.source": f"'{corpus / 'text.txt'}'", "data.dir": f"'{corpus / 'data'}'",
        "data.tokenizer": "char", "model.vocab": 0, "model.layers": 2, "model.heads": 2, "model.width": 16,
        "model.context": 16, "model.dropout": 0.2, "train.steps": 12, "train.global_batch": 8, "train.micro_batch": micro,
        "checkpoint.every": 3, "eval.every": 4, "eval.sample_every": 0, "telemetry.every": 1,
        "parallel.strategy": strategy, "parallel.timeout_seconds": 60, "parallel.startup_timeout_seconds": 60, **more,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in values.items()]


def start(world: int, overrides: list[str], kill_after: int = 0) -> int:
    return launch([sys.executable, str(SCRIPT), "quickstart", str(kill_after), *overrides], world)


def curve(run: Path) -> list[tuple]:
    return [tuple(line[k] for k in KEYS) for line in Run(run).lines("train")]


def evaluations(run: Path) -> list[tuple]:
    return [(line["step"], line["loss"], line["tokens"]) for line in Run(run).lines("eval")]


CASES = [
    ("single", 1, 4), ("ddp", 2, 2), ("full_shard", 2, 2), ("shard_grad_op", 2, 4),
    pytest.param("hybrid_shard", 4, 2, marks=pytest.mark.full), pytest.param("full_shard", 4, 1, marks=pytest.mark.full),
]  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize(("strategy", "world", "micro"), CASES)
def test_killed_and_resumed_is_bit_for_bit_the_same(corpus, tmp_path, strategy, world, micro):
    """With dropout, accumulation, a decaying rate, and epochs' edges before and after the kill."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(world, settings(corpus, whole, strategy, micro)) == 0
    assert start(world, settings(corpus, broken, strategy, micro), kill_after=8) == 1
    assert Run(broken).state in ("failed", "running")
    assert start(world, settings(corpus, broken, strategy, micro)) == 0
    resumed = [e for e in Run(broken).events if e["event"] == "resumed"]
    assert [e["attempt"] for e in resumed] == [1]
    assert 3 <= resumed[0]["step"] <= 6
    assert curve(broken) == curve(whole)
    assert len(curve(whole)) == 12
    assert evaluations(broken) == evaluations(whole)
    assert Run(broken).state == Run(whole).state == "finished"


@pytest.mark.dist
def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_with_four(corpus, tmp_path):
    """The same samples and, to rounding, the same losses."""
    reference = tmp_path / "one"
    assert start(1, settings(corpus, reference, micro=1)) == 0
    run = tmp_path / "moving"
    for world, stop in ((2, 4), (1, 7), (4, 0)):
        strategy = "single" if world == 1 else "full_shard" if world == 2 else "ddp"
        overrides = settings(corpus, run, strategy, micro=1)
        code = launch(
            ["sh", "-c", f'exec {sys.executable} -m windlass train quickstart --stop-at {stop} "$@"', "sh", *overrides],
            world,
        )
        assert code in (0, 75)
    moved, whole = curve(run), curve(reference)
    assert [(s, tokens, samples) for s, *_, tokens, samples, _ in moved] == [(s, t, n) for s, *_, t, n, _ in whole]
    for mine, theirs in zip(moved, whole, strict=True):
        assert mine[1] == pytest.approx(theirs[1], rel=2e-6)
        assert mine[2] == pytest.approx(theirs[2], rel=2e-5)
        assert mine[3] == theirs[3]


def test_stop_and_go_on_in_one_process(corpus, tmp_path):
    recipe = Recipe.load("quickstart", settings(corpus, tmp_path / "run"))
    with pytest.raises(Stopped, match="same command"):
        train(recipe, stop_at=5)
    assert Run(recipe.run_dir).state == "preempted"
    run = train(recipe)
    assert run.state == "finished"
    assert [line["step"] for line in run.lines("train")] == list(range(1, 13))
    before = run.metrics_path.read_bytes()
    assert train(recipe).state == "finished"
    assert run.metrics_path.read_bytes() == before, "a finished run is left alone"


def test_another_recipe_is_refused_with_the_difference(corpus, tmp_path):
    recipe = Recipe.load("quickstart", settings(corpus, tmp_path / "run", **{"train.steps": 2}))
    train(recipe)
    with pytest.raises(UserError, match=r"optim.lr: 0.003 -> 0.5"):
        train(recipe.with_overrides("optim.lr=0.5"))
    with pytest.raises(UserError, match=r"--extend-to"):
        train(recipe.with_overrides("train.steps=4"))
    assert train(recipe.with_overrides("telemetry.every=2")).state == "finished"
    train(recipe.with_overrides("optim.lr=0.5"), fresh=True)
    assert (tmp_path / "run.old-1" / "metrics.jsonl").is_file()


def test_changed_data_is_refused(corpus, tmp_path):
    overrides = settings(corpus, tmp_path / "run")
    with pytest.raises(Stopped):
        train(Recipe.load("quickstart", overrides), stop_at=3)
    (tmp_path / "other.txt").write_text((corpus / "text.txt").read_text()[::-1])
    recipe = Recipe.load("quickstart", overrides)
    other = recipe.with_overrides(f"data.dir='{tmp_path / 'data2'}'")
    changed = tmp_path / "data2"
    train_on = Recipe.load(
        "quickstart", [*overrides, f"data.source='{tmp_path / 'other.txt'}'", f"data.dir='{changed}'"]
    )
    from windlass.data.prepare import prepare

    prepare(train_on)
    with pytest.raises((UserError, RunFailed)):
        train(other)


def test_resume_from_the_best_a_step_a_path_or_never(corpus, tmp_path):
    """`checkpoint.resume`: what is not wanted is not loaded, and the run is the same from there on."""
    overrides = settings(corpus, tmp_path / "run", **{"eval.every": 3, "checkpoint.keep_last": 10})
    recipe = Recipe.load("quickstart", overrides)
    with pytest.raises(Stopped):
        train(recipe, stop_at=8)
    losses = {line["step"]: line["loss"] for line in Run(tmp_path / "run").lines("eval") if line["step"]}
    best = min(losses, key=lambda step: losses[step])
    whole = train(recipe.with_overrides(f"run.dir='{tmp_path / 'whole'}'"))
    for wanted, step in (("best", best), ("3", 3), (f"{tmp_path / 'run' / 'checkpoints' / 'step-00000006'}", 6)):
        copy = tmp_path / f"copy-{step}-{wanted[:4].strip('/')}"
        shutil.copytree(tmp_path / "run", copy)
        run = train(recipe.with_overrides(f"run.dir='{copy}'", f"checkpoint.resume='{wanted}'"))
        assert [e["step"] for e in run.events if e["event"] == "resumed"] == [step], wanted
        assert curve(run.path) == curve(whole.path), wanted
    with pytest.raises(UserError, match="never"):
        train(recipe.with_overrides("checkpoint.resume='never'"))
    with pytest.raises(UserError, match=r"no checkpoint of step 5; there are: 3, 6, 8"):
        train(recipe.with_overrides("checkpoint.resume='5'"))


def test_a_branch_that_was_stopped_before_its_first_checkpoint_branches_again(corpus, tmp_path):
    """It would else begin from the seed's weights, without a word."""
    train(Recipe.load("quickstart", settings(corpus, tmp_path / "origin", **{"optim.schedule.kind": "constant"})))
    branch = settings(corpus, tmp_path / "branch", **{"train.steps": 9, "checkpoint.every": 0})
    recipe, origin = Recipe.load("quickstart", branch), f"{tmp_path / 'origin'}@6"

    def dies(step: int, _: object) -> None:
        raise RunFailed("a failure of the test")

    whole = train(recipe.with_overrides(f"run.dir='{tmp_path / 'whole'}'"), branch_from=origin)
    for again in (origin, ""):  # the same command, or a plain one
        run = tmp_path / f"branch{bool(again)}"
        mine = recipe.with_overrides(f"run.dir='{run}'")
        with pytest.raises(RunFailed, match="failure of the test"):
            train(mine, branch_from=origin, on_step=dies)
        assert curve(train(mine, branch_from=again).path) == curve(whole.path)
