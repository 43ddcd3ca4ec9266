"""The larger steps of a training's set-up, in the order in which `Trainer` takes them."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from windlass.checkpoint.commit import shortage
from windlass.checkpoint.load import Choice, open_checkpoint, recover, rename_damaged
from windlass.checkpoint.retention import policy_of, read_lineage
from windlass.checkpoint.save import Saver
from windlass.checkpoint.state_dict import restore
from windlass.data.prepare import Data, data_dir, open_data
from windlass.data.samples import real_tokens
from windlass.errors import UserError, argument
from windlass.estimate.milestones import checkpoints_to_come
from windlass.estimate.optimum import resolve_steps
from windlass.fileio import Files
from windlass.interop.init_from import load_initial
from windlass.model import hf_files
from windlass.model.build import build_model, own_module, read_sizes, sizes_of
from windlass.model.gpt import initialise
from windlass.model.hf import HfModel
from windlass.model.size import flops_per_token
from windlass.parallel.architecture import code_for
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import (
    autocast,
    parallelize,
    resolve_precision,
    unwrap,
)
from windlass.processes import usable_cores
from windlass.recipe import BatchPlan, Horizon, Recipe
from windlass.run import Run, read_lines
from windlass.telemetry.console import Console
from windlass.telemetry.timing import peak_flops
from windlass.training import start
from windlass.training.checks import check_loss_is_a_sum, tie_groups, uses_dropout
from windlass.training.memory import micro_batch_of
from windlass.training.record import ModelFacts
from windlass.training.start import (
    StartPlan,
    candidate_checkpoints,
    choose_undamaged,
    decide_on_rank_0,
    set_aside,
)
from windlass.training.state import TrainState


class RunPlace(NamedTuple):
    """The locked run directory of a start."""

    attempt: int  # the number of this start
    name: str  # of this start, unique among all
    choice: Choice | None  # the checkpoint to start from; None: step 0
    notes: list[str]  # warnings


def make_model(plan: StartPlan, data: Data, module: nn.Module | None) -> nn.Module:
    """The user's module, or the recipe's model without weights."""
    if module is not None:
        return own_module(module, plan.recipe.model.context)
    return build_model(plan.recipe, data.vocab, run=None if plan.fresh else plan.run.path)


def load_state(
    place: RunPlace,
    recipe: Recipe,
    ranks: Ranks,
    data: Data,
    batch: BatchPlan,
    facts: ModelFacts,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    console: Console,
) -> tuple[TrainState, dict[str, Any]]:
    """Fill model and optimizer from the chosen checkpoint; returns its counters and meta data."""
    if place.choice is None:
        return TrainState(), {}
    path = place.choice.path
    console.begin(f"reading {path}")
    state = load_checkpoint(path, recipe, ranks, data, batch, facts, model, optimizer, place.notes)
    return state, open_checkpoint(path, deep=False).meta


def describe_checkpoints(recipe: Recipe, data: Data, facts: ModelFacts) -> dict[str, Any]:
    """What every checkpoint of this start records beside its state: on what, and by which
    arithmetic, it was trained."""
    return {
        "recipe": recipe.config_hash,
        "line": start.hash_without_steps(recipe),
        "data": data.fingerprint,
        "precision": facts.precision,
        "optimizer": recipe.optim.kind,
        "threads": torch.get_num_threads(),
        "cores": usable_cores(),
    }


def describe_origin(
    module: nn.Module | None, model: nn.Module, facts: ModelFacts, ranks: Ranks
) -> dict[str, Any]:
    """What `environment.json` says of the model: the class of the user's `module`, and the files
    of a model of transformers."""
    origin: dict[str, Any] = {}
    if module is not None:
        wrapped = isinstance(module, HfModel)
        name = type(module.model if wrapped else module).__name__
        origin = {"own_model": name, "wrapped": wrapped}
    if facts.hf and ranks.main:
        origin["model"] = hf_files.describe_origin(unwrap(model))
    return origin


def open_saver(plan: StartPlan, ranks: Ranks, horizon: Horizon, attempt: str) -> Saver:
    """What saves this rank's share; `attempt` names this start among all."""
    # `keep_every` as a share of the run named other steps before the run was extended.
    horizons = [
        replace(horizon, steps=steps)
        for steps in {horizon.steps, plan.extends_from or horizon.steps}
    ]
    policy = policy_of(plan.recipe.checkpoint, horizons, read_lineage(plan.run.path))
    background = plan.recipe.checkpoint.background
    return Saver(
        plan.run.checkpoints_dir,
        ranks.rank,
        ranks.world,
        attempt,
        policy,
        device=ranks.device,
        background=background,
    )


def shortages(plan: StartPlan, horizon: Horizon, done: int, size: int) -> list[str]:
    """What the disk lacks for the checkpoints, of `size` bytes each, that are still to come after
    `done` steps."""
    present = len(list(plan.run.checkpoints_dir.glob("step-????????")))
    count = checkpoints_to_come(plan.recipe, horizon, done, present)
    missing = shortage(plan.run.path, count * size, "the run") if count else ""
    return [missing] if missing else []


def open_shared(plan: StartPlan, ranks: Ranks, data: Data | None) -> Data:
    """The user's own data, or the recipe's, once all hosts have seen run and data directory."""
    if ranks.env.nodes > 1:
        start.check_shared(ranks, plan.run.path, data_dir(plan.recipe) if data is None else None)
    return open_data(plan.recipe, ranks) if data is None else data


def batch_and_horizon(
    plan: StartPlan, ranks: Ranks, data: Data, custom: bool
) -> tuple[BatchPlan, Horizon]:
    """How a step's samples are divided over the ranks, and the length of the run."""
    recipe, samples = plan.recipe, len(data.train)
    batch = recipe.batch(ranks.mesh.data_world, ranks.device.type)
    if plan.resuming and ranks.world == 1 and not recipe.train.micro_batch:
        batch = micro_batch_of(plan.run, batch)
    if samples < 1:
        raise UserError(
            f"the training data has no sample of model.context = {recipe.model.context} tokens"
        )
    if recipe.train.early_stop and data.val is None:
        raise UserError(
            "train.early_stop needs validation data: give data.eval_source=FILE, or data.val_fraction=0.1"
        )
    optimum = recipe.train.steps == "compute-optimal"
    if optimum and custom:
        raise UserError(
            'train.steps = "compute-optimal" is for a recipe\'s own model; write steps or epochs'
        )
    parameters = read_sizes(recipe).total if optimum and recipe.model.kind == "hf" else None
    tokens = real_tokens(data.train)
    steps = resolve_steps(
        recipe, data.vocab, None if tokens is None else tokens / samples, samples, parameters
    )
    return batch, Horizon(steps, samples, recipe.train.global_batch)


def open_run_directory(
    plan: StartPlan, ranks: Ranks, console: Console, horizon: Horizon, stack: ExitStack
) -> RunPlace:
    """Lock the run directory and choose the checkpoint to start from."""
    ranks.mark(0, "load")
    console.begin("looking for a checkpoint, and verifying it")

    def choose() -> Choice | None:
        return choose_undamaged(ranks, lambda: candidate_checkpoints(plan, horizon))

    # A new run's checkpoint (a branch, a path) is verified before anything changes; a resumed
    # run's under the lock.
    choice = None if plan.resuming else choose()
    attempt, name, notes = decide_on_rank_0(ranks, "lock", lambda: lock_directory(plan, stack))
    console.open_log(plan.run.log_path)
    choice = choose() if plan.resuming else choice
    return RunPlace(attempt, name, choice, notes + (choice.notes if choice is not None else []))


def lock_directory(plan: StartPlan, stack: ExitStack) -> tuple[int, str, list[str]]:
    """Lock the run directory on rank 0; returns the attempt, its name and warnings."""
    run = plan.run
    if plan.fresh:
        set_aside(run.path)
    Files().make_dirs(run.path)
    if (lock := start.acquire_run_lock(run.path)) is not None:
        stack.enter_context(lock)
    if not plan.resuming and run.recipe_path.exists():
        raise UserError(f"another process has just begun a run in {run.path}; give another run.dir")
    run.heartbeat_path.touch()
    attempts = [int(line.get("attempt", 0)) for line in read_lines(run.metrics_path)]
    attempt = max(attempts, default=-1) + 1
    return attempt, f"{attempt}_{secrets.token_hex(4)}", recover(run.checkpoints_dir)


def begin_run(plan: StartPlan, data: Data, choice: Choice | None) -> None:
    """Write what a new run or a new lineage starts from. On rank 0."""
    run = plan.run
    if choice is not None:
        rename_damaged(choice, run.path)
    gives_up_steps = plan.extends_from or (
        not plan.restarted and plan.recipe.checkpoint.resume != "latest"
    )
    if not plan.resuming or gives_up_steps:
        start.write_start(plan, choice)
    data.save_tokenizer(run.path)
    if (run.path / "tokenizer").is_dir():
        Files().sync_tree(run.path / "tokenizer")
        Files().sync_dir(run.path)


def prepare_model(
    recipe: Recipe,
    run: Run,
    ranks: Ranks,
    data: Data,
    model: nn.Module,
    custom: bool,
    choice: Choice | None,
) -> tuple[nn.Module, ModelFacts]:
    """The model on this rank, parallelized, with its initial weights; a user's own module with the
    weights it has."""
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    # The rows of a user's own model: by its attribute `vocab`, or of its embedding, if it has one
    # alone.
    tables = [m.num_embeddings for m in model.modules() if custom and isinstance(m, nn.Embedding)]
    rows = getattr(model, "vocab", tables[0] if len(tables) == 1 else data.vocab)
    if data.vocab > rows:
        raise UserError(
            f"model.vocab: {rows:,} token embeddings for {data.vocab:,} tokens of the data; set 0 or more"
        )
    precision = resolve_precision(recipe.train.precision, ranks.device)
    device_name = "CPU"
    if ranks.device.type == "cuda":
        about, cuda = torch.cuda.get_device_properties(ranks.device), torch.version.cuda
        device_name, capability = about.name, (about.major, about.minor)
        text, wheel = code_for(
            device_name, capability, torch.cuda.get_arch_list(), torch.__version__, cuda or ""
        )
        if wheel and cuda:  # else the first kernel ends it, and says less
            raise UserError(f"{text}: {wheel}")
    sizes, hf = sizes_of(model), isinstance(model, HfModel) and not custom
    counted = hf or bool(recipe.model.freeze)
    flops = sizes.flops_per_token() if counted else flops_per_token(recipe.model, data.vocab)
    facts = ModelFacts(
        sizes,
        precision,
        uses_dropout(model),
        tie_groups(model),
        hf,
        None if custom else flops,
        device_name,
        peak_flops(device_name, precision, tf32=recipe.train.tf32),
        rows,
        fresh=not custom
        and not recipe.model.init_from
        and (recipe.model.kind == "gpt" or recipe.model.from_scratch),
    )
    model = parallelize(model.double() if precision == "fp64" else model, ranks, recipe)
    if hf:
        decide_on_rank_0(ranks, "origin", lambda: hf_files.save_origin(unwrap(model), run.path))
    init_from = recipe.model.init_from and choice is None
    if not custom and not (
        hf and (init_from or choice)
    ):  # a base of `transformers` may be gone by a resume
        initialise(unwrap(model), recipe.run.seed)
    if not custom and init_from:
        load_initial(unwrap(model), recipe, ranks)
    if custom and choice is None and recipe.train.startup_checks:
        check_loss_is_a_sum(model, data.train, ranks, partial(autocast, recipe, ranks.device))
    return model, facts


def load_checkpoint(
    path: Path,
    recipe: Recipe,
    ranks: Ranks,
    data: Data,
    batch: BatchPlan,
    facts: ModelFacts,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    notes: list[str],
) -> TrainState:
    """Fill model and optimizer from a checkpoint, return its counters, and note what changes."""
    checkpoint = open_checkpoint(path, deep=False)
    recorded = ("data", "optimizer", "micro_batch", "precision")
    fingerprint, kind, micro_batch, precision = (checkpoint.meta.get(key) for key in recorded)
    if fingerprint != data.fingerprint:
        problem = f"the data is not what {path} was trained on (fingerprint {fingerprint}, here {data.fingerprint})"
        raise UserError(
            f"{problem}: bring the old data back (data.dir), or start over with {argument('fresh')}"
        )
    ranks.mark(checkpoint.step, "load")
    if kind != recipe.optim.kind:  # a branch may change it
        notes.append(
            f"{recipe.optim.kind} cannot use the state of {kind}: the optimizer state starts over"
        )
    restore(checkpoint, model, optimizer if kind == recipe.optim.kind else None)
    if facts.dropout and micro_batch != batch.micro_batch:
        # The masks of a micro-batch follow from its number in the step and its shape.
        changed = f"{micro_batch} sequences and is {batch.micro_batch}"
        notes.append(
            f"dropout draws other masks from here on: the micro-batch was {changed} (train.micro_batch)"
        )
    if precision != facts.precision:
        changed = (
            f"was {precision} up to step {checkpoint.step} and is {facts.precision} from here on"
        )
        notes.append(
            f"the arithmetic {changed} (train.precision = {recipe.train.precision}): the losses differ"
        )
    return TrainState.from_json(checkpoint.counters)
