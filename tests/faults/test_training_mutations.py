"""The proof of resume can fail: without any one component of the state the run differs."""

import random
from pathlib import Path
from typing import Any

import pytest

from helpers import each_step, record_trainers, tiny_recipe
from windlass import train
from windlass.checkpoint.format import open_checkpoint
from windlass.model.gpt import initialise
from windlass.model.sharding import unwrap
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.seeds import seed_of
from windlass.training import rank, trainer
from windlass.training.state import TrainState

NOT_FROM_HERE = {
    "skips_in_a_row",  # 0 again after the next good step, and every step here is one
    "mixture",  # tests/e2e/test_training_mixture.py resumes and branches one
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    """Twelve steps in fp16 with dropout; a save at step 6."""
    folder = tmp_path_factory.mktemp("whole")
    draw = random.Random(1)
    (folder / "text.txt").write_text("".join(draw.choice("abcdefgh ") for _ in range(787)))

    def count(now: Any) -> None:
        if now.step == 2:
            trainers[0].state.updates_skipped = 1
            trainers[0].scaler.scale = trainers[0].scaler.scale / 2  # as an overflow does

    with pytest.MonkeyPatch.context() as patch:
        trainers = record_trainers(patch)
        return train(recipe(folder, folder / "run"), callbacks=[each_step(count)])


loader = trainer.Loader


def recipe(folder: Path, run: Path) -> Recipe:
    model = {"model__vocab": 0, "model__width": 16, "model__context": 16, "model__dropout": 0.2}
    return tiny_recipe(
        folder / "text.txt",
        run,
        data__dir=str(folder / "data"),
        data__tokenizer="char",
        train__micro_batch=4,
        train__precision="fp16",
        train__average=0.999,
        checkpoint__every=6,
        **model,
    )


def resumed(whole: Run, place: Path) -> list[object]:
    """The run's steps and counters after step 6, from its checkpoint."""
    return after_six(train(recipe(whole.path.parent, place), branch_from=f"{whole.path}@6"))


def after_six(run: Run) -> list[object]:
    """The steps after the sixth, and the counters and the averaged weights at the end."""
    wanted = ("step", "loss", "grad_norm", "lr", "tokens", "samples", "loss_scale")
    lines = [tuple(x[k] for k in wanted) for x in run.lines("train") if x["step"] > 6]
    last = open_checkpoint(run.checkpoints_dir / "step-00000012")
    averages = [last.tensor(name).tolist() for name in last.names("average/")]
    assert averages
    return [*lines, last.counters, averages]


def forget(monkeypatch, component: str) -> None:
    """Drop one component of the state on its way back."""
    restore, from_json = rank.restore, TrainState.from_json
    if component == "moments":
        monkeypatch.setattr(
            rank,
            "restore",
            lambda checkpoint, model, _, average: restore(checkpoint, model, None, average),
        )
    elif component == "average":
        monkeypatch.setattr(rank, "restore", lambda *given: restore(*given[:3]))
    elif component == "weights":
        first = lambda checkpoint, model, *_: initialise(unwrap(model), 1337)  # noqa: E731
        monkeypatch.setattr(rank, "restore", first)
    elif component == "dropout seed":
        monkeypatch.setattr(trainer, "seed_of", lambda name: seed_of(f"{name} of another run"))
    elif component == "order seed":
        monkeypatch.setattr(trainer, "Loader", lambda *a, seed, **k: loader(*a, seed=seed + 1, **k))
    else:

        def dropped(saved):
            state = from_json(saved)
            setattr(state, component, getattr(TrainState(), component))
            return state

        monkeypatch.setattr(TrainState, "from_json", staticmethod(dropped))


def test_nothing_forgotten_is_the_same_run(whole, tmp_path):
    assert resumed(whole, tmp_path / "run") == after_six(whole)


COUNTERS = sorted(TrainState.__dataclass_fields__.keys() - NOT_FROM_HERE)


@pytest.mark.parametrize(
    "component", ["weights", "moments", "average", "dropout seed", "order seed", *COUNTERS]
)
def test_anything_forgotten_is_another_run(whole, tmp_path, monkeypatch, component):
    forget(monkeypatch, component)
    assert resumed(whole, tmp_path / "run") != after_six(whole)
