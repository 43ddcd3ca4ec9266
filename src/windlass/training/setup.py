"""The larger steps of a training's set-up, in the order of `Trainer.__init__`."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from windlass.checkpoint.choose import recover, rename_damaged
from windlass.checkpoint.commit import shortage
from windlass.checkpoint.load import Checkpoint, open_checkpoint
from windlass.checkpoint.retention import left_out
from windlass.checkpoint.state_dict import named_state, restore
from windlass.data.loader import Loader
from windlass.data.locate import data_dirs
from windlass.data.mixture import (
    MixedSamples,
    Mixture,
    Stage,
    continue_stages,
    next_sample,
    stages_of,
)
from windlass.data.open import Data, open_data
from windlass.data.samples import documents_per_row, masks_documents, real_tokens
from windlass.errors import UserError, argument, plural
from windlass.estimate.milestones import checkpoints_to_come
from windlass.estimate.optimum import resolve_steps
from windlass.fileio import Files
from windlass.interop.init_from import load_initial
from windlass.model import hf_files
from windlass.model.build import read_sizes, sizes_of
from windlass.model.documents import takes_documents
from windlass.model.frozen import hold_trained
from windlass.model.gpt import initialise
from windlass.model.hf import HfModel
from windlass.model.loss import Objective, takes_sources
from windlass.model.size import flops_per_token
from windlass.optim.average import Average
from windlass.optim.build import count_groups
from windlass.optim.schedule import check_fits
from windlass.parallel.architecture import code_for
from windlass.parallel.dist import Ranks, use_deterministic
from windlass.parallel.parallelize import (
    autocast,
    counted,
    parallelize,
    resolve_precision,
    unwrap,
    varying_shapes,
)
from windlass.recipe import BatchPlan, Horizon, Recipe
from windlass.run import read_lines
from windlass.telemetry.console import Console
from windlass.telemetry.profile import StepProfile, record_memory
from windlass.telemetry.timing import peak_flops
from windlass.training import memory, start
from windlass.training.checks import check_documents, check_loss_is_a_sum, tie_groups, uses_dropout
from windlass.training.record import ModelFacts
from windlass.training.start import (
    StartPlan,
    candidate_checkpoints,
    choose_undamaged,
    decide_on_rank_0,
)
from windlass.training.state import LossSum, TrainState


class RunPlace(NamedTuple):
    """The locked run directory of a start."""

    attempt: int  # the number of this start
    name: str  # of this start, different from all others
    choice: Checkpoint | None  # the checkpoint to start from; None: step 0
    skipped: list[tuple[int, int]]  # samples that rewinds to it have left out
    notes: list[str]  # warnings


def open_shared(plan: StartPlan, ranks: Ranks, data: Data | None) -> Data:
    """The user's or the recipe's data, once all hosts have seen the run and data directories."""
    if ranks.env.nodes > 1:
        prepared = data_dirs(plan.recipe) if data is None else []
        start.check_shared(ranks, plan.run.path, prepared)
    if data is not None:
        return data
    return open_data(plan.recipe, ranks, resuming=plan.from_checkpoint)


def batch_and_horizon(
    plan: StartPlan, ranks: Ranks, data: Data, custom: bool
) -> tuple[BatchPlan, Horizon]:
    """The division of a step's samples over the ranks, and the length of the run."""
    recipe, samples = plan.recipe, len(data.train)
    batch = recipe.batch(ranks.world, ranks.device.type)
    if not recipe.train.micro_batch:
        free = memory.free_bytes(ranks.device)
        vocab, documents = 0 if custom else data.vocab, documents_per_row(data.train)
        batch = memory.open_micro_batch(plan, ranks, batch, vocab, free, documents)
    if samples < 1:
        context = recipe.model.context
        raise UserError(f"the training data has no sample of model.context = {context} tokens")
    if recipe.train.early_stop and data.val is None:
        advice = "give data.eval_source=FILE, or data.val_fraction=0.1"
        raise UserError(f"train.early_stop needs validation data: {advice}")
    optimum = recipe.train.steps == "compute-optimal"
    if optimum and custom:
        problem = 'train.steps = "compute-optimal" is for a recipe\'s own model'
        raise UserError(f"{problem}; write steps or epochs")
    parameters = read_sizes(recipe).total if optimum and recipe.model.kind == "hf" else None
    tokens = real_tokens(data.train)
    per_sample = tokens / samples if tokens else None
    steps = resolve_steps(recipe, data.vocab, per_sample, samples, parameters)
    check_fits(recipe.optim.schedule, horizon := recipe.horizon(steps, samples))
    return batch, horizon


def open_run_directory(
    plan: StartPlan, ranks: Ranks, console: Console, horizon: Horizon, stack: ExitStack
) -> RunPlace:
    """Lock the run directory and choose the checkpoint to start from."""
    ranks.mark(0, "load")
    console.begin("looking for a checkpoint, and verifying it")

    def choose() -> Checkpoint | None:
        return choose_undamaged(ranks, lambda: candidate_checkpoints(plan, horizon))

    # The checkpoint of a new run (a branch, a path) is verified before anything changes, the
    # checkpoint of a resumed run under the lock.
    choice = None if plan.resuming else choose()
    attempt, name, notes = decide_on_rank_0(ranks, "lock", lambda: lock_directory(plan, stack))
    console.open_log(plan.run.log_path)
    choice = choose() if plan.resuming else choice
    if choice is not None:
        notes = notes + choice.notes
        notes += start.describe_extension(plan, choice.step, horizon) if ranks.main else []
    skipped = list[tuple[int, int]]()
    if choice is not None:
        path = choice.path
        skipped = decide_on_rank_0(ranks, "left out", lambda: left_out(plan.run.path, path))
    return RunPlace(attempt, name, choice, skipped, notes)


def lock_directory(plan: StartPlan, stack: ExitStack) -> tuple[int, str, list[str]]:
    """Lock the run directory on rank 0; returns the attempt, its name and warnings."""
    run = plan.run
    if plan.fresh:
        start.rename_old_run(run.path)
    Files().make_dirs(run.path)
    if (lock := start.acquire_run_lock(run.path)) is not None:
        stack.enter_context(lock)
    if not plan.resuming and run.exists:
        raise UserError(f"another process has just begun a run in {run.path}; give another run.dir")
    run.heartbeat_path.touch()
    attempts = [int(line.get("attempt", 0)) for line in read_lines(run.metrics_path)]
    attempt = max(attempts, default=-1) + 1
    return attempt, f"{attempt}_{secrets.token_hex(4)}", recover(run.checkpoints_dir)


def begin_run(plan: StartPlan, data: Data, choice: Checkpoint | None) -> None:
    """Write the start of a new run or lineage. On rank 0."""
    run = plan.run
    if choice is not None:
        rename_damaged(choice, run.path)
    goes_back = not plan.restarted and plan.recipe.checkpoint.resume != "latest"
    if not plan.resuming or plan.extends_from or goes_back:
        start.write_start(plan, choice)
    data.save_tokenizer(run.path)
    if (run.path / "tokenizer").is_dir():
        Files().sync_tree(run.path / "tokenizer")
        Files().sync_dir(run.path)


def prepare_model(
    plan: StartPlan,
    ranks: Ranks,
    data: Data,
    model: nn.Module,
    custom: bool,
    choice: Checkpoint | None,
    compiles: bool,
) -> tuple[nn.Module, ModelFacts]:
    """Parallelize the model, with its initial weights; a user's module keeps its own weights."""
    recipe = plan.recipe.replace({"train.compile": compiles})
    named_state(model)  # raises for a tensor that a checkpoint cannot hold
    use_deterministic(recipe.train.deterministic)
    if custom and recipe.train.master == "bf16":
        hold_trained(model)
    # A user's module has its vocabulary in `vocab`, or is given by its only embedding.
    tables = [m.num_embeddings for m in model.modules() if custom and isinstance(m, nn.Embedding)]
    rows = getattr(model, "vocab", tables[0] if len(tables) == 1 else data.vocab)
    if data.vocab > rows:
        problem = f"{rows:,} token embeddings for {data.vocab:,} tokens of the data"
        raise UserError(f"model.vocab: {problem}; set 0 or more")
    precision = resolve_precision(recipe.train.precision, ranks.device)
    check_master(recipe, precision)
    device_name = check_device(ranks.device)
    sizes, hf = sizes_of(model), isinstance(model, HfModel) and not custom
    counted = hf or bool(recipe.model.freeze)
    masked = masks_documents(data.train) and takes_documents(model)
    attended = getattr(data.train, "attended", None) if masked else None
    own_flops = flops_per_token(recipe.model, rows, attended)
    flops = sizes.flops_per_token() if counted else own_flops
    pretrained = recipe.model.kind == "hf" and not recipe.model.from_scratch
    # FSDP2 gives the module another class.
    own_class = type(model.model if isinstance(model, HfModel) else model).__name__
    facts = ModelFacts(
        sizes,
        *(precision, compiles, uses_dropout(model), tie_groups(model)),
        hf,
        own_class if custom else "",
        None if custom else flops,
        device_name,
        peak_flops(device_name, precision, tf32=recipe.train.tf32),
        rows,
        fresh=not custom and not recipe.model.init_from and not pretrained,
    )
    set_objective(model, recipe)
    model = parallelize(model.double() if precision == "fp64" else model, ranks, recipe)
    if hf:
        path = plan.run.path
        decide_on_rank_0(ranks, "origin", lambda: hf_files.save_origin(unwrap(model), path))
    init_from = recipe.model.init_from and choice is None
    if custom and choice is None and recipe.train.startup_checks:
        check_loss_is_a_sum(model, data.train, ranks, partial(trial, recipe, ranks.device))
    if not custom and not init_from and choice is None:
        initialise(unwrap(model), recipe.run.seed, ranks.mesh.loss_group)
    if not custom and init_from:
        load_initial(unwrap(model), recipe, ranks)
    d = recipe.data
    if choice is None and (masked or d.document_mask is True or d.packing == "best-fit"):
        check_documents(model, ranks, partial(trial, recipe, ranks.device), d.packing)
    return model, facts


def check_master(recipe: Recipe, precision: str) -> None:
    """UserError if the weights are bf16 and the arithmetic is not."""
    if recipe.train.master == "bf16" and precision != "bf16":
        problem = (
            f'train.master = "bf16" needs bf16 arithmetic, and it is {precision} on this device'
        )
        raise UserError(f'{problem}: write train.precision="bf16", or train.master="fp32"')


@contextmanager
def trial(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """The context of a check's pass, whose shapes must not reach the training's graphs."""
    with varying_shapes(), autocast(recipe, device):
        yield


def set_objective(model: nn.Module, recipe: Recipe) -> None:
    """Give the objective to the module that computes the loss; UserError if it is the user's."""
    objective = Objective(recipe.train.z_loss, recipe.train.label_smoothing)
    owners = [m for m in model.modules() if isinstance(getattr(m, "objective", None), Objective)]
    for owner in owners:
        owner.objective = objective
    if any(objective) and not owners:
        key = "train.z_loss" if objective.z else "train.label_smoothing"
        problem = "your own module computes its loss itself"
        raise UserError(f"{key}: {problem}: add the term there, and write {key}=0")


def check_device(device: torch.device) -> str:
    """The device's name; UserError if this build of torch has no kernels for the GPU."""
    if device.type != "cuda":
        return "CPU"
    about, cuda = torch.cuda.get_device_properties(device), torch.version.cuda or ""
    capability, compiled = (about.major, about.minor), torch.cuda.get_arch_list()
    text, wheel = code_for(about.name, capability, compiled, torch.__version__, cuda)
    if wheel and cuda:
        raise UserError(f"{text}: {wheel}")
    return str(about.name)


def load_checkpoint(
    place: RunPlace,
    recipe: Recipe,
    ranks: Ranks,
    data: Data,
    batch: BatchPlan,
    facts: ModelFacts,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average,
) -> tuple[TrainState, str]:
    """Fill model, optimizer and average from the chosen checkpoint, and note what has changed.

    Returns the checkpoint's counters and its origin in words. Raises UserError if the data has
    changed.
    """
    if place.choice is None:
        return TrainState(), ""
    checkpoint, notes = open_checkpoint(place.choice.path, deep=False), place.notes
    meta, step = checkpoint.meta, checkpoint.step
    recorded = ("data", "optimizer", "micro_batch", "precision")
    fingerprint, old_kind, micro_batch, precision = (meta.get(key) for key in recorded)
    if fingerprint != data.fingerprint:
        raise UserError(
            f"the data is not what {place.choice.path} was trained on (fingerprint {fingerprint}, "
            f"here {data.fingerprint}): bring the old data back (data.dir), or start over with "
            f"{argument('fresh')}"
        )
    ranks.mark(step, "load")
    same_kind = old_kind == recipe.optimizer_state
    if not same_kind:  # a branch may change it
        problem = f"{recipe.optimizer_state} cannot use the state of {old_kind}"
        notes.append(f"{problem}: the optimizer state starts over")
    state, kind = TrainState.from_json(checkpoint.counters), recipe.train.average.kind
    state.skipped += [(start, stop) for start, stop in place.skipped]
    if (there := meta.get("average", "none")) != kind:  # a branch may change it
        new = f"starts anew after step {max(step, average.begin)}"
        new = "is dropped" if kind == "none" else new
        notes.append(f"the average {new}: the checkpoint has train.average.kind = {there}")
        state.averaged = 0
    averages = average.tensors if state.averaged else {}
    restore(checkpoint, model, optimizer if same_kind else None, averages)
    average.load(state.averaged)
    source, world = str(place.choice.path), checkpoint.manifest.world
    if (world, micro_batch) != (ranks.world, batch.micro_batch):
        source += f", saved by {plural(world, 'rank')} with micro-batches of {micro_batch}"
    if facts.dropout and micro_batch != batch.micro_batch:
        # The masks follow from the number and the shape of the micro-batch.
        change = f"the micro-batch was {micro_batch} sequences and is {batch.micro_batch}"
        notes.append(f"dropout draws other masks from here on: {change} (train.micro_batch)")
    if precision != facts.precision:
        change = f"was {precision} up to step {step} and is {facts.precision} from here on"
        setting = f"train.precision = {recipe.train.precision}"
        notes.append(f"the arithmetic {change} ({setting}): the losses differ")
    compiled = meta.get("compiles", facts.compiles)
    if compiled != facts.compiles:
        change = f"from {compiled} to {facts.compiles}, which rounds otherwise".lower()
        notes.append(f"train.compile changes {change}")
    return state, source


def open_profile(plan: StartPlan, ranks: Ranks, horizon: Horizon, stack: ExitStack) -> StepProfile:
    """The profile of `telemetry.profile`; also begins to record memory for its snapshot."""
    settings, where = plan.recipe.telemetry, (plan.run.path, ranks.rank, ranks.device)
    profile = StepProfile(settings.profile, *where, horizon.steps)
    stack.callback(profile.close)
    if settings.memory_snapshot and ranks.device.type == "cuda":
        record_memory()
    return profile


def describe_checkpoints(recipe: Recipe, data: Data, facts: ModelFacts) -> dict[str, Any]:
    """The meta data of every checkpoint of this start."""
    return {
        "recipe": recipe.config_hash,
        "line": start.hash_without_steps(recipe),
        "data": data.fingerprint,
        "precision": facts.precision,
        "compiles": facts.compiles,
        "optimizer": recipe.optimizer_state,
        "average": recipe.train.average.kind,
        "threads": torch.get_num_threads(),
    }


def describe_origin(model: nn.Module, facts: ModelFacts, ranks: Ranks) -> dict[str, Any]:
    """The model's origin for `environment.json`: a user's class, or files of `transformers`."""
    origin: dict[str, Any] = {}
    if facts.own_model:
        wrapped = isinstance(unwrap(model), HfModel)
        origin = {"own_model": facts.own_model, "wrapped": wrapped}
    if facts.hf and ranks.main:
        origin["model"] = hf_files.describe_origin(unwrap(model))
    return origin


def open_losses(
    plan: StartPlan, data: Data, horizon: Horizon, state: TrainState, ranks: Ranks, model: nn.Module
) -> LossSum:
    """The sum of the losses, with the mixture, if any, from the state's step on.

    Puts the stages of the mixture into the state. UserError if its sources end before the run.
    """
    recipe, samples = plan.recipe, data.train
    if not isinstance(samples, MixedSamples):
        return LossSum(state, ranks)
    planned = stages_of(recipe.data, horizon, list(map(len, samples.parts)))
    at = next_sample(state.step, horizon.samples_per_step, state.skipped)
    past = [Stage(start, tuple(weights), tuple(limits)) for start, weights, limits in state.mixture]
    stages = continue_stages(past, planned, at)
    mixture = Mixture(samples, stages, recipe.run.seed, recipe.data.order)
    mixture.check(horizon.steps, horizon.samples_per_step)
    state.mixture = [list(stage) for stage in stages]
    return LossSum(state, ranks, mixture, takes_sources(unwrap(model)))


def open_loader(
    recipe: Recipe,
    data: Data,
    batch: BatchPlan,
    ranks: Ranks,
    state: TrainState,
    mixture: Mixture | None = None,
) -> Loader:
    """The batches from the state's step on, read ahead in the background."""
    settings = recipe.data
    formats = {settings.part(number).format for number in range(len(settings.mix) or 1)}
    return Loader(
        data.train,
        batch,
        ranks.mesh.data_rank,
        seed=recipe.run.seed,
        kind=settings.order,
        device=ranks.device,
        prefetch=settings.prefetch,
        first_step=state.step,
        skipped=tuple(state.skipped),
        length_buckets=settings.length_buckets
        and (formats != {"text"} and settings.packing != "best-fit"),
        mixture=mixture,
    )


def describe_costs(model: nn.Module, batch: BatchPlan) -> list[str]:
    """A warning if a model of `transformers` needs the logits of all tokens."""
    network = unwrap(model)
    if not isinstance(network, HfModel) or network.head_form is not None:
        return []
    name, logits = type(network.model).__name__, 4 * batch.micro_batch * batch.context
    size = f"{logits * network.vocab / 1e9:.2g} GB in fp32"
    problem = f"the loss needs all logits of a micro-batch at once ({size})"
    return [f"{problem}, because the head of {name} is not one matrix (train.micro_batch)"]


def optimizer_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> list[dict[str, Any]]:
    """`count_groups` over all stages of a pipeline."""
    stages = ranks.mesh.rows(("pp",))[0]
    if len(stages) == 1:
        return count_groups(optimizer.param_groups)
    rows: Any = getattr(optimizer, "rows", {})
    own = {id(rows.get(p, p)) for p in counted(model)}
    groups = [
        g | {"params": [p for p in g["params"] if id(p) in own]} for g in optimizer.param_groups
    ]
    total = dict[str, dict[str, Any]]()
    every = ranks.all_gather_object("optimizer groups", count_groups(groups))
    for group in itertools.chain.from_iterable(every[stage] for stage in stages):
        before = total.setdefault(group["name"], group | {"tensors": 0, "parameters": 0})
        for key in ("tensors", "parameters"):
            before[key] += group[key]
    return list(total.values())


def disk_shortage(plan: StartPlan, horizon: Horizon, done: int, size: int) -> list[str]:
    """A warning if the disk has no room for the checkpoints, of `size` bytes, after step `done`."""
    present = len(list(plan.run.checkpoints_dir.glob("step-????????")))
    count = checkpoints_to_come(plan.recipe, horizon, done, present)
    missing = shortage(plan.run.path, count * size, "the run") if count else ""
    return [missing] if missing else []
