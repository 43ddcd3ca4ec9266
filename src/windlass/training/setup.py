"""From a recipe to a run: `train` makes the parts of a training in order, and has the `Trainer` run them."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.checkpoint.commit import shortage
from windlass.checkpoint.load import Choice, open_checkpoint, recover, rename_damaged
from windlass.checkpoint.retention import policy_of, read_lineage
from windlass.checkpoint.save import Saver
from windlass.checkpoint.state_dict import named_state, restore, state_bytes
from windlass.data.facts import describe
from windlass.data.prepare import Data, data_dir, open_data
from windlass.data.samples import real_tokens
from windlass.errors import UserError, argument
from windlass.estimate.milestones import checkpoints_to_come
from windlass.estimate.optimum import resolve_steps
from windlass.evaluation.suites import Suites
from windlass.fileio import Files
from windlass.interop.init_from import load_initial
from windlass.model import hf_files
from windlass.model.build import build_model, own_module, read_sizes, sizes_of
from windlass.model.convert import export_note
from windlass.model.gpt import initialise
from windlass.model.hf import HfModel
from windlass.model.size import flops_per_token
from windlass.optim.build import build_optimizer, torch_optimizer
from windlass.parallel.architecture import code_for
from windlass.parallel.dist import Ranks, init_process_group, init_store
from windlass.parallel.env import detect_env
from windlass.parallel.parallelize import (
    attention_without_plans,
    autocast,
    parallelize,
    resolve_precision,
    unwrap,
)
from windlass.processes import usable_cores
from windlass.recipe import BatchPlan, Horizon, Recipe, as_recipe
from windlass.run import Run, read_lines
from windlass.telemetry.console import Console
from windlass.telemetry.timing import Goodput, peak_flops
from windlass.training import start
from windlass.training.callbacks import Callbacks, Evaluated, Measuring, Saved, Step
from windlass.training.checks import check_loss_is_a_sum, tie_groups, uses_dropout
from windlass.training.memory import micro_batch_of
from windlass.training.nonfinite import BadSteps, check_is_deferred
from windlass.training.record import ModelFacts, Recorder
from windlass.training.rewind import Rewinder
from windlass.training.start import (
    StartPlan,
    candidate_checkpoints,
    choose_undamaged,
    decide_on_rank_0,
    resolve_start,
    set_aside,
)
from windlass.training.state import LossScaler, TrainState
from windlass.training.stop import StopSignals
from windlass.training.threads import set_threads
from windlass.training.trainer import Trainer


def train(
    recipe: Recipe | Run | str | Path,
    model: nn.Module | None = None,
    data: Data | None = None,
    on_step: Callable[[Step], object] | None = None,
    *,
    on_eval: Callable[[Evaluated], object] | None = None,
    on_save: Callable[[Saved], object] | None = None,
    suites: Mapping[str, Measuring] | None = None,
    fresh: bool = False,
    extend_to: int | str = 0,
    branch_from: str = "",
    stop_at: int = 0,
) -> Run:
    """Train a recipe in this process, as one rank among those of the launcher that started it; returns the run.

    A run directory that holds a committed checkpoint is resumed; a finished run is returned as it is. A signal before
    the first step ends the process with exit code 75: nothing is lost. (In a notebook, an interrupt is a KeyboardInterrupt.)

    Args:
        recipe: Everything that defines the run: a recipe, a preset's name, a `.toml` file, or a run.
        model: A module of the user's own, which is trained with the weights it has: `forward(tokens [B, T], labels
            [B, T])` gives the sum of the loss over labels that are not -100. FSDP2 needs `blocks()`, the list of its
            repeated parts, which are also what is checkpointed and compiled.
            With `vocab` it is checked against the data's, with `new_cache` (as `GPT` has it) it is sampled.
            A causal language model of `transformers` is taken as it is.
        data: Samples of the user's own; with no tokenizer no text is generated.
        on_step, on_eval, on_save: Called after every step, evaluation and committed save, with an object that has `step`,
            `log(name, value)` and `stop()`, and `loss`, `results` or `path`. Each rank calls them; `on_save` rank 0 alone.
        suites: Suites of your own by name: `f(model, step)` gives a dictionary of numbers at each
            evaluation; `windlass.Suite(f, lower=[NAME])` says that less of a number is better.
        fresh: Set an existing run directory aside.
        extend_to: Continue to so many steps or epochs (`"3 epochs"`), past the horizon of the run in the directory.
        branch_from: `RUN@STEP` or `RUN@best`: begin a new run from that checkpoint.
        stop_at: Save, stop and return after this step.

    Raises:
        UserError: The recipe, the data, the directory or the environment are not what they must be.
        RunFailed: The run cannot continue: a non-finite step, a lost rank, a disk that takes no checkpoint.
        Stopped: A signal stopped the run and everything is saved.
    """
    callbacks = Callbacks(on_step, on_eval, on_save, suites or {})
    with StopSignals() as stop, ExitStack() as stack:
        wanted = as_recipe(recipe)
        torch_optimizer(wanted.optim)  # refuses what torch does not have
        plan = resolve_start(wanted, fresh=fresh, extend_to=extend_to, branch_from=branch_from)
        if plan.finished:
            if (
                env := detect_env()
            ).nodes > 1:  # a host that does not see it would wait for the others
                with init_store(env, wanted) as ranks:
                    start.check_shared(ranks, plan.run.path, None)
            if env.rank == 0:
                text = f"{plan.run.path} is finished: {plan.why_finished}"
                print(f"{text}; it is returned as it is; extend it to train on")
            return plan.run
        plan.recipe.check_packages()
        callbacks.check(plan.recipe)
        if plan.recipe.data.format != "text":  # rows of varying lengths
            stack.enter_context(attention_without_plans())
        set_up(plan, model, data, callbacks, stop, stack, stop_at).run()
    gc.collect()  # the parts refer to each other: memory of the device, files and sockets are free when this returns
    return Run(plan.run.path)  # reads the recipe again, which an extension has changed


def set_up(
    plan: StartPlan,
    custom: nn.Module | None,
    data: Data | None,
    callbacks: Callbacks,
    stop: StopSignals,
    stack: ExitStack,
    stop_at: int,
) -> Trainer:
    """Make every part of a training, in order; `stack` ends them in the reverse order."""
    recipe, goodput = plan.recipe, Goodput()
    ranks = stack.enter_context(init_store(detect_env(), recipe))
    data = open_shared(plan, ranks, data)
    init_process_group(ranks, recipe)
    batch, horizon = batch_and_horizon(plan, ranks, data, custom is not None)
    custom = custom and own_module(custom, recipe.model.context)
    built = (
        build_model(recipe, data.vocab, run=None if plan.fresh else plan.run.path)
        if custom is None
        else custom
    )
    console = Console(horizon.steps, ranks.rank)
    stack.callback(console.close)
    attempt, token, choice, notes = open_run_directory(plan, ranks, console, horizon, stack)

    begin = partial(begin_run, plan, data, choice)
    if custom is None:
        decide_on_rank_0(ranks, "write", begin)
    console.begin("building the model, with its first weights")
    model, facts = prepare_model(recipe, plan.run, ranks, data, built, custom is not None, choice)
    if custom is not None:  # a run begins once its forward pass has worked
        decide_on_rank_0(ranks, "write", begin)
    optimizer = build_optimizer(
        unwrap(model),
        recipe.optim,
        ranks.device.type,
        ranks.mesh.replicas,
        ranks.strategy.shards_optimizer,
    )
    state, recorded = TrainState(), dict[str, Any]()
    if choice is not None:
        console.begin(f"reading {choice.path}")
        state = load_checkpoint(
            choice.path, recipe, ranks, data, batch, facts, model, optimizer, notes
        )
        recorded = open_checkpoint(choice.path, deep=False).meta
    console.begin("measuring how many CPU threads are fastest")
    threads = set_threads(
        recipe, model, batch.micro_batch, data.vocab, ranks, recorded, custom is not None
    )
    ranks.mark(state.step, "start")
    scaler = LossScaler(ranks.device, state) if facts.precision == "fp16" else None

    saver = open_saver(plan, ranks, horizon, f"{attempt}_{token}")
    origin = describe_own(custom) if custom is not None else {}
    origin |= {"model": hf_files.describe_origin(unwrap(model))} if facts.hf and ranks.main else {}
    recorder = Recorder(
        plan, ranks, facts, horizon, state, goodput, attempt, origin, console, stack
    )
    # A signal before the first step ends the process (see stop.py), but the ledger says how this start ended.
    stop.before_exit = lambda name: recorder.event("preempted", reason=name, saved=True)
    if (
        ranks.main
    ):  # an optimizer of torch has no state before its first step: say 8 bytes a parameter
        size = state_bytes(named_state(model, optimizer)[0]) + (
            0 if optimizer.state else 8 * facts.sizes.trained
        )
        notes += shortages(plan, horizon, state.step, size)
    notes += [note] if custom is None and (note := export_note(recipe.model)) else []
    recorder.started(
        batch, threads, describe(data), unwrap(model), str(choice.path) if choice else "", notes
    )
    if plan.changes:
        decide_on_rank_0(ranks, "settings", lambda: start.write_settings(plan))
    if choice is not None:
        saver.resume_from(state.step)
    deferred = check_is_deferred(ranks.device, optimizer, recipe.parallel.offload)
    bad_steps = BadSteps(recorder, recipe.train, scaler, deferred)
    return Trainer(
        recipe=recipe,
        stop=stop,
        ranks=ranks,
        data=data,
        batch=batch,
        horizon=horizon,
        model=model,
        facts=facts,
        optimizer=optimizer,
        parameters=[p for p in model.parameters() if p.requires_grad],
        scaler=scaler,
        state=state,
        bad_steps=bad_steps,
        saver=saver,
        meta=describe_checkpoints(recipe, data, facts),
        rewinder=Rewinder(saver, model, optimizer, scaler, recorder, bad_steps),
        suites=Suites(
            recipe,
            data.tokenizer,
            ranks,
            data.val,
            batch.micro_batch,
            callbacks.suites(state, ranks, recipe),
            data.train,
        ),
        recorder=recorder,
        callbacks=callbacks,
        stop_at=stop_at,
    )


def describe_checkpoints(recipe: Recipe, data: Data, facts: ModelFacts) -> dict[str, Any]:
    """What every checkpoint of this start records beside its state: on what, and by which arithmetic, it was trained."""
    return {
        "recipe": recipe.config_hash,
        "line": start.hash_without_steps(recipe),
        "data": data.fingerprint,
        "precision": facts.precision,
        "optimizer": recipe.optim.kind,
        "threads": torch.get_num_threads(),
        "cores": usable_cores(),
    }


def describe_own(model: nn.Module) -> dict[str, Any]:
    """What opens a run of the user's own model must be given: its class, and whether it is wrapped here."""
    wrapped = isinstance(model, HfModel)
    return {"own_model": type(model.model if wrapped else model).__name__, "wrapped": wrapped}


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
    """What the disk lacks for the checkpoints, of `size` bytes each, that are still to come after `done` steps."""
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
) -> tuple[int, str, Choice | None, list[str]]:
    """Lock the run directory and choose the checkpoint to start from.

    Returns the number of this attempt, a token that names it among all, the checkpoint (None: step 0) and warnings.
    """
    run = plan.run
    ranks.mark(0, "load")
    console.begin("looking for a checkpoint, and verifying it")

    def choose() -> Choice | None:
        return choose_undamaged(ranks, lambda: candidate_checkpoints(plan, horizon))

    def lock() -> tuple[int, str, list[str]]:
        if plan.fresh:
            set_aside(run.path)
        Files().make_dirs(run.path)
        if (lock := start.acquire_run_lock(run.path)) is not None:
            stack.enter_context(lock)
        if not plan.resuming and run.recipe_path.exists():
            raise UserError(
                f"another process has just begun a run in {run.path}; give another run.dir"
            )
        run.heartbeat_path.touch()
        attempt = (
            max((int(line.get("attempt", 0)) for line in read_lines(run.metrics_path)), default=-1)
            + 1
        )
        return attempt, secrets.token_hex(4), recover(run.checkpoints_dir)

    # What a new run starts from (a branch, a path) is verified before anything is changed; else it is under the lock.
    choice = None if plan.resuming else choose()
    attempt, token, notes = decide_on_rank_0(ranks, "lock", lock)
    console.open_log(run.log_path)
    choice = choose() if plan.resuming else choice
    return attempt, token, choice, notes + (choice.notes if choice is not None else [])


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
    """The model on this rank, parallelized, with its initial weights; a user's own module with the weights it has."""
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    # The rows of a user's own model: by its attribute `vocab`, or of its embedding, if it has one alone.
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
