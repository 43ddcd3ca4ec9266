"""A checkpoint of any world and layout, read in any other: every tensor equal bit for bit, and equal
losses afterwards.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import STEPS, VOCAB, built, gathered, settings, train, trained
from harness import run_ranks
from test_parallel_equivalence import NEW, OLD, on
from torch import Tensor, nn
from toy import Toy, toy

import hf_fixtures
from windlass.checkpoint.base import base_of, fill_base
from windlass.checkpoint.choose import choose_checkpoint
from windlass.checkpoint.format import AVERAGE, MODEL, Checkpoint, open_checkpoint
from windlass.checkpoint.save import Writer
from windlass.checkpoint.state_dict import gather_shard, named_state, restore
from windlass.errors import UserError
from windlass.model.sharding import boxes_of, unwrap

STAGES = {"model__layers": 4}
LOW = {"precision": "bf16", "train__master": "bf16", "optim__kind": "adamw8bit"}
AVERAGED = {"train__average": 0.6}
VARIANTS: dict[str, dict[str, Any]] = {
    "old": OLD | STAGES | AVERAGED,
    "new": NEW,
    "muon": NEW | {"optim__kind": "muon"},
    "low": NEW | LOW,
    "own": {},
    "own frozen": {},
    "hf": {"model__kind": "hf"},
    "adapters": {"model__kind": "hf", "model__lora__rank": 2, **AVERAGED},
}
WORLDS = {
    1: [on("single", 3)],
    2: [
        on("ddp"),
        on("shard_optim"),
        on("ddp", tensor=2),
        on("full_shard", tensor=2),
        on("shard_optim", context=2),
        on("ddp", pipeline=2),
        on("full_shard", pipeline=2),
    ],
    3: [on("full_shard"), on("shard_optim")],
    4: [
        on("full_shard", 1),
        on("hybrid_shard", 1, shard_size=2),
        on("full_shard", 1, tensor=2),
        on("shard_optim", 1, tensor=2),
        on("ddp", 1, tensor=2),
        on("hybrid_shard", 1, context=2, shard_size=2),
        on("full_shard", 1, tensor=2, context=2),
        on("shard_optim", pipeline=2),
        on("hybrid_shard", pipeline=2, tensor=2),
    ],
}
SOME: dict[str, dict[int, list[int]]] = {
    "old": {1: [0], 2: [6], 4: [3]},
    "new": {1: [0], 2: [3, 4], 4: [6]},
    "muon": {1: [0], 3: [1]},
    "low": {1: [0], 2: [0, 1], 3: [0]},
    "own": {1: [0], 3: [0, 1]},
    "own frozen": {2: [1], 4: [1]},
    "hf": {1: [0], 2: [2, 3]},
    "adapters": {1: [0], 2: [1, 3], 4: [4]},
}
"""The cells of `make test`, by their places in WORLDS."""


CANNOT = {"old": set(), "new": {"pipeline"}, "muon": {"pipeline"}}
CANNOT |= {key: {"context", "pipeline"} for key in ("hf", "adapters")}
"""The layouts in which a model cannot train; others cannot in any."""


def own_network(variant: str) -> Toy:
    """A user's module with rows of 37, 6 and 2, uneven over 3 and 4 ranks, of which some have none;
    a buffer, an empty one, an unused parameter.
    """
    model = toy(3, width=2, tied=variant == "own")
    model.register_buffer("empty", torch.empty(0, 4))
    if variant == "own frozen":
        model.layers[1].requires_grad_(False)
        model.embedding.requires_grad_(False)
    return model


def cells_of(variant: str, every: bool) -> dict[int, list[dict[str, Any]]]:
    """The cells of each world, in which this model can train."""
    if not every:
        return {
            world: [WORLDS[world][i] for i in numbers] for world, numbers in SOME[variant].items()
        }
    out = CANNOT.get(variant, {"tensor", "context", "pipeline"})
    return {w: [cell for cell in cells if not out & cell.keys()] for w, cells in WORLDS.items()}


def recipes_of(world: int, variant: str, cells: list[Any], hf: Path) -> dict[str, Any]:
    more = {"precision": "fp64", "train__global_batch": 12, **VARIANTS[variant]}
    more |= {"model__name": str(hf)} if "model__kind" in more else {}
    return {
        "-".join(f"{key}={value}" for key, value in [("world", world), *cell.items()]): settings(
            world=world, **more | cell
        )
        for cell in cells
    }


def build(ranks, recipe, variant: str):
    own = functools.partial(own_network, variant) if variant.startswith("own") else None
    return built(ranks, recipe, own)


def named_tensors(model: nn.Module, trainer: Any) -> dict[str, Tensor]:
    """Every tensor of the state that a rank has a part of."""
    tensors = named_state(model, trainer.optimizer)[0]
    return tensors | {AVERAGE + name: tensor for name, tensor in trainer.average.tensors.items()}


def write(join, recipes, variant: str, folder: Path) -> None:
    """A step and a checkpoint in each layout."""
    for name, recipe in recipes.items():
        with join(recipe) as ranks:
            model, trainer = build(ranks, recipe, variant)
            train(ranks, recipe, trainer, range(1))
            path, base = folder / name, base_of(unwrap(model), recipe, None, None, ranks)
            frozen = base.weights if base else ()
            state = gather_shard(model, trainer.optimizer, ranks, trainer.average.tensors, frozen)
            size = sum(box.tensor.nbytes for box in state.boxes)
            sizes = ranks.all_gather_object("size", size)
            assert ranks.world == 1 or max(sizes) < 0.75 * sum(sizes), "a rank writes too much"
            writer = Writer(path / "checkpoints", ranks.rank, ranks.world, base=base)
            writer.write(1, state, {"step": 1})
            [outcome] = writer.wait()
            assert not outcome.error, outcome
            whole = {name: gathered(t) for name, t in named_tensors(model, trainer).items()}
            torch.save(whole, path / f"whole-{ranks.rank}.pt")
            ranks.all_gather_object("saved", 1)
            written = [tensor for name, tensor in saved(path).items() if name not in frozen]
            assert sum(sizes) == sum(tensor.nbytes for tensor in written)


@functools.cache
def saved(path: Path) -> dict[str, Tensor]:
    """The whole state of a checkpoint, as torch gathered it."""
    files = [torch.load(file) for file in sorted(path.glob("whole-*.pt"))]
    return {name: tensor for tensors in files for name, tensor in tensors.items()}


def check_tensors(checkpoint: Checkpoint, expected: dict[str, Tensor]) -> None:
    base = checkpoint.manifest.base
    for name, tensor in expected.items():
        if base and name in base.weights:
            continue
        assert torch.equal(checkpoint.tensor(name), tensor), name
        if name.startswith(AVERAGE):
            averaged = checkpoint.with_weights("average")
            assert torch.equal(averaged.tensor(MODEL + name.removeprefix(AVERAGE)), tensor), name


def read(join, recipes, variant: str, folder: Path) -> list[Any]:
    """Read every checkpoint in every layout, and make two more steps from the last."""
    outcomes = []
    for recipe in recipes.values():
        with join(recipe) as ranks:
            model, trainer = build(ranks, recipe, variant)
            for path in sorted(folder.iterdir()):  # from the second on over the state of another
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(float("nan"))
                checkpoint = open_checkpoint(choose_checkpoint(path).path)
                fill_base(checkpoint, unwrap(model), recipe, ranks)
                restore(checkpoint, model, trainer.optimizer, trainer.average.tensors)
                held, expected = named_tensors(model, trainer), saved(path)
                assert held.keys() <= expected.keys()
                assert len(held) == len(expected) or ranks.mesh.pp is not None
                for name, tensor in held.items():
                    for offsets, box in boxes_of(tensor):
                        ends = zip(offsets, box.shape, strict=True)
                        part = expected[name][tuple(slice(at, at + n) for at, n in ends)]
                        assert torch.equal(box, part), (path.name, name)
                if ranks.world == 1:
                    check_tensors(checkpoint, expected)
            outcomes.append(train(ranks, recipe, trainer, range(1, 3)))
    return outcomes


@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_world_and_layout_to_every_other(tmp_path: Path, variant: str, every: bool) -> None:
    folder, hf = tmp_path / "runs", tmp_path / "hf"
    folder.mkdir()
    if "model__kind" in VARIANTS[variant]:
        hf_fixtures.save("llama", hf, vocab=VOCAB, num_hidden_layers=2)
    cells = cells_of(variant, every)
    recipes = {world: recipes_of(world, variant, cells[world], hf) for world in cells}
    for world, of_world in recipes.items():
        run_ranks(write, world, of_world, variant, folder, timeout=240)
    assert len(list(folder.iterdir())) == sum(map(len, cells.values()))
    outcomes = [
        outcome
        for world, of_world in recipes.items()
        for rank in run_ranks(read, world, of_world, variant, folder, timeout=240)
        for outcome in rank
    ]
    assert len(outcomes) == sum(world * len(cells[world]) for world in cells)
    tolerance = 0.02 if variant == "low" else 1e-9
    wanted = outcomes[0]
    if variant != "low" and not variant.startswith("own"):
        [(losses, norms, _)] = run_ranks(trained, 1, next(iter(recipes[1].values())))
        wanted = losses[1:STEPS], norms[1:]
    for outcome in outcomes:
        for numbers, expected in zip(outcome, wanted, strict=True):
            assert numbers == pytest.approx(expected, rel=tolerance)


def other_model(join, recipe, folder: Path) -> None:
    with join(recipe) as ranks:
        model, _ = built(ranks, recipe)
        [path] = folder.iterdir()
        with pytest.raises(UserError, match=r"blocks\.3.*not in this model"):
            restore(open_checkpoint(choose_checkpoint(path).path), model)
        ranks.all_gather_object("both", 1)


@pytest.mark.dist
def test_a_checkpoint_of_a_larger_model_is_rejected(tmp_path: Path) -> None:
    """Although every stage finds all its names."""
    larger = recipes_of(1, "old", WORLDS[1], tmp_path)
    run_ranks(write, 1, larger, "old", tmp_path)
    smaller = OLD | {"model__layers": 3}
    run_ranks(other_model, 2, settings("fp64", "ddp", 2, 2, pipeline=2, **smaller), tmp_path)
