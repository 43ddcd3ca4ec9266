"""Averaged weights on two ranks, in every layout: their definition, an evaluation with them in the
model, and a checkpoint that other layouts read bit for bit.
"""

from pathlib import Path

import pytest
import torch
from equivalence import BATCH, built, gathered, rows, settings, train
from harness import run_ranks

from windlass.checkpoint.load import AVERAGE, open_checkpoint
from windlass.checkpoint.save import Writer
from windlass.checkpoint.state_dict import gather_shard, restore
from windlass.evaluation.likelihood import evaluate_loss
from windlass.parallel.parallelize import unwrap

pytestmark = pytest.mark.dist
STEPS, BETA = 4, 0.6
LAYOUTS = {
    "ddp": {"strategy": "ddp"},
    "shard_optim": {"strategy": "shard_optim"},
    "full_shard": {"strategy": "full_shard"},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}


def recipe_of(layout: dict, world: int, precision: str = "fp64"):
    size = 1 if "strategy" in layout else world
    keys = {f"parallel__{key}": value for key, value in layout.items() if key != "strategy"}
    average = {"train__average__kind": "ema", "train__average__beta": BETA}
    kind = layout.get("strategy", "auto")
    return settings(precision, kind, world // size, 2, model__head_bias=True, **keys, **average)


def whole(model, tensors) -> dict[str, torch.Tensor]:
    """Tensors of this rank's parameters as whole ones."""
    names = [name for name, _ in unwrap(model).named_parameters()]
    return {name: gathered(tensors[name]) for name in names}


def weights(model) -> dict[str, torch.Tensor]:
    return whole(model, dict(unwrap(model).named_parameters()))


def defined(history: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The average of the weights after each step, by its definition."""
    average = history[0]
    for n, now in enumerate(history[1:], start=1):
        beta = min(BETA, (1 + n) / (10 + n))
        average = {name: beta * average[name] + (1 - beta) * now[name] for name in now}
    return average


def outcomes(join, recipes, folder):
    """For each layout: how far the average is from its definition, and the losses with it."""
    found = {}
    for layout, recipe in recipes.items():
        with join(recipe) as ranks:
            model, trainer = built(ranks, recipe)
            average, history = trainer.average, []
            for step in range(STEPS):
                train(ranks, recipe, trainer, range(step, step + 1))
                history.append(weights(model))
            exact, held = defined(history), whole(model, average.tensors)
            off = max(float((held[n] - exact[n]).abs().max()) for n in exact)
            losses = [evaluate_loss(model, rows(), ranks, 4, 2 * BATCH)["loss"]]
            with average.in_model():
                losses.append(evaluate_loss(model, rows(), ranks, 4, 2 * BATCH)["loss"])
            after = weights(model)
            assert all(torch.equal(after[name], history[-1][name]) for name in after)
            losses.append(evaluate_loss(model, rows(), ranks, 4, 2 * BATCH)["loss"])
            stages = ranks.mesh.sizes.pp
            state = gather_shard(
                model, trainer.optimizer, ranks.rank, ranks.world, stages, average.tensors
            )
            writer = Writer(Path(folder, layout, "checkpoints"), ranks.rank, ranks.world)
            writer.write(STEPS, state, {"averaged": STEPS})
            [save] = writer.wait()
            assert not save.error, save.error
            ranks.all_gather_object("saved", 1)
            found[layout] = (off, losses, held)
    return found


def read(join, recipes, folder):
    """Every checkpoint in every layout, as whole averages."""
    found = {}
    for layout, recipe in recipes.items():
        with join(recipe) as ranks:
            model, trainer = built(ranks, recipe)
            for name in LAYOUTS:
                checkpoint = open_checkpoint(Path(folder, name, "checkpoints", "step-00000004"))
                restore(checkpoint, model, trainer.optimizer, trainer.average.tensors)
                found[name, layout] = whole(model, trainer.average.tensors)
    return found


def test_every_layout_averages_saves_and_reads_as_one_process(tmp_path):
    recipes = {name: recipe_of(layout, 2) for name, layout in LAYOUTS.items()}
    single = {"single": recipe_of({"strategy": "single"}, 1)}
    [alone] = run_ranks(outcomes, 1, single, str(tmp_path))
    off, losses, wanted = alone["single"]
    assert off < 1e-14 and losses[0] == losses[2] != losses[1]
    written = run_ranks(outcomes, 2, recipes, str(tmp_path), timeout=120)
    for layout in LAYOUTS:
        for rank in (0, 1):
            off, found, held = written[rank][layout]
            assert off < 1e-14, layout
            assert found == pytest.approx(losses, rel=1e-9), layout
            for name, tensor in held.items():
                torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-9)
        path = tmp_path / layout / "checkpoints" / "step-00000004"
        checkpoint = open_checkpoint(path)
        averaged = checkpoint.with_weights("average")
        for name in wanted:  # saved once, and what the ranks hold
            here = next(w[layout][2][name] for w in written if name in w[layout][2])
            assert torch.equal(checkpoint.tensor(AVERAGE + name), here)
            assert torch.equal(averaged.tensor("model/" + name), here)
    some = {name: recipes[name] for name in ("full_shard", "tensor", "pipeline")}
    for world, kinds in {1: single, 2: some}.items():
        for per_rank in run_ranks(read, world, kinds, str(tmp_path), timeout=120):
            for (origin, layout), tensors in per_rank.items():
                for name, tensor in tensors.items():
                    saved = next(w[origin][2] for w in written if name in w[origin][2])
                    assert torch.equal(tensor, saved[name]), (origin, layout, name)
