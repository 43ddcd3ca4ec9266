"""Train on one rank: set up all parts of a training in order, and run it; start again if memory ran
out."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from windlass.checkpoint.base import base_of, fill_base
from windlass.checkpoint.format import AVERAGE, Checkpoint
from windlass.checkpoint.state_dict import restore
from windlass.data.directory import data_dirs
from windlass.data.open import Data, open_data
from windlass.data.samples import real_tokens
from windlass.errors import OutOfMemory, UserError
from windlass.estimate.activations import measure_peaks
from windlass.estimate.calendar import measures_all, resolve_steps
from windlass.estimate.candidates import layout_on
from windlass.estimate.devices import USABLE, Device
from windlass.evaluation.suites import Suites
from windlass.model.build import build_model, read_sizes, sizes_of
from windlass.optim.average import Average
from windlass.optim.build import build_optimizer
from windlass.optim.schedule import check_fits
from windlass.parallel.connect import init_process_group, init_store
from windlass.parallel.env import detect_env
from windlass.parallel.parallelize import attention_without_plans, unwrap
from windlass.parallel.precision import resolve_precision
from windlass.parallel.ranks import Ranks
from windlass.recipe import BatchPlan, Horizon, Recipe
from windlass.telemetry.console import Console
from windlass.training.callbacks import Callbacks, UserCode
from windlass.training.checks import check_prompt, check_shared
from windlass.training.directory import RunDirectory, compare
from windlass.training.evaluator import Evaluator
from windlass.training.header import report_start
from windlass.training.memory import recorded_micro_batch
from windlass.training.network import Network
from windlass.training.record import Recorder
from windlass.training.saver import Saver
from windlass.training.start import Start, resolve_start
from windlass.training.state import LossScaler, LossSum, TrainState, mixture_of
from windlass.training.stop import StopSignals, event_of
from windlass.training.trainer import Trainer


def train_rank(
    start: Start,
    code: UserCode,
    stop: StopSignals,
    module: nn.Module | None,
    data: Data | None,
    stop_at: int,
) -> None:
    """Train on this rank; a single rank starts again if memory ran out.

    `module` and `data` are the user's; None: the recipe's.
    """
    while True:
        try:
            with ExitStack() as stack:
                return set_up(start, code, stop, stack, module, data, stop_at).run()
        except OutOfMemory:
            # Several ranks start together, by their launcher. A user's module has lost the weights
            # that it began with.
            if detect_env().world > 1 or module is not None:
                raise
        # Here the exception is gone, which held what the step had allocated.
        gc.collect()
        torch.compiler.reset()  # else the next graph has a dynamic batch size, as no resume has it
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        start = resolve_start(start.recipe.replace({"checkpoint.resume": "latest"}))


def set_up(
    start: Start,
    code: UserCode,
    stop: StopSignals,
    stack: ExitStack,
    module: nn.Module | None,
    data: Data | None,
    stop_at: int,
) -> Trainer:
    """Set up a training, in order; `stack` closes the parts in reverse order."""
    recipe, run, is_own = start.recipe, start.run, module is not None

    # At first the ranks exchange values only, because preparing the data may take longer than a
    # collective. Then each rank chooses its device, and the mesh gets its groups.
    ranks = stack.enter_context(init_store(detect_env(), recipe))
    if ranks.env.nodes > 1:
        check_shared(ranks, run.path, data_dirs(recipe) if data is None else [])
    if data is None:
        data = open_data(recipe, ranks, resuming=start.from_checkpoint)
    init_process_group(ranks, recipe)
    prepare_device(recipe, stack)
    batch = batch_of(start, ranks, 0 if is_own else data.vocab, free_memory(ranks.device))
    horizon = horizon_of(recipe, data, is_own)

    # The model without values, so that most bad input is found before the directory changes.
    origin = None if start.fresh else run.path
    network = Network(recipe, ranks, data, horizon.steps, stack, module, origin)
    check_prompt(recipe, network.model, data.tokenizer)

    # The directory, its lock, and the checkpoint to start from.
    console = Console(horizon.steps, ranks.rank)
    stack.callback(console.close)
    directory = RunDirectory(start, ranks, horizon, console, stack)
    checkpoint, warnings = directory.checkpoint, [*directory.warnings, *network.warnings]

    # The model on its device, divided among the ranks.
    console.begin("building the model, with its first weights")
    model = network.divide(run.path)
    bare = unwrap(model)
    optimizer = build_optimizer(
        bare,
        recipe.optim,
        ranks.device.type,
        replicas=ranks.mesh.replicas,
        shard_state=ranks.strategy.shards_optimizer,
        seed=recipe.run.seed,
    )
    average = Average(bare, recipe.train.average)

    # The weights: first ones, or with the rest of the state from a checkpoint.
    meta = {
        "data": data.fingerprint,
        "vocab": data.vocab,
        "micro_batch": batch.micro_batch,
        "precision": network.precision,
        "compiles": network.compiled,
        "optimizer": recipe.optimizer_state,
        "average": recipe.train.average,
    }
    if checkpoint is None:
        network.fill(model, data)
        average.load(0)
        state = TrainState()
    else:
        console.begin(f"reading {checkpoint.path}")
        ranks.mark(checkpoint.step, "load")
        warnings += compare(checkpoint, meta)
        state = load_state(checkpoint, model, optimizer, average, recipe, ranks)
    ranks.mark(state.step, "start")
    scaler = LossScaler(ranks.device, state, network.precision)
    mixture = mixture_of(recipe, data.train, horizon, state)
    losses = LossSum(state, ranks)
    callbacks = Callbacks(code, recipe, ranks, state, horizon, model, optimizer)

    # Every part that a user's input can break has worked, so the run begins.
    directory.begin(data.save_tokenizer)
    recorder = Recorder(
        run=run,
        recipe=recipe,
        ranks=ranks,
        state=state,
        horizon=horizon,
        console=console,
        stack=stack,
        attempt=directory.attempt,
        precision=network.precision,
        flops_per_token=network.flops_per_token,
    )
    stop.follow(state, lambda name: recorder.emit(event_of(name), reason=name, saved=True))
    saver = Saver(
        recorder=recorder,
        callbacks=callbacks,
        losses=losses,
        scaler=scaler,
        average=average,
        meta=meta,
        base=None if is_own else base_of(bare, recipe, checkpoint, network.initial, ranks),
        checkpoint=checkpoint,
        attempt=directory.attempt_name,
        extended_from=start.extends_from,
        is_own=is_own,
    )
    suites = Suites(
        recipe,
        data.tokenizer,
        ranks,
        data.val,
        batch.micro_batch,
        callbacks.suites(),
        data.train,
        data.template,
    )
    whole_at_end = measures_all(recipe, horizon, len(data.val or ()))
    trainer = Trainer(
        samples=data.train,
        mixture=mixture,
        batch=batch,
        precision=network.precision,
        compiled=network.compiled,
        model=model,
        optimizer=optimizer,
        average=average,
        scaler=scaler,
        losses=losses,
        callbacks=callbacks,
        recorder=recorder,
        saver=saver,
        evaluator=Evaluator(recorder, suites, model, average, whole_at_end, stop),
        stop=stop,
        stop_at=stop_at,
    )
    report_start(recorder, start, network, data, batch, mixture, checkpoint, warnings)
    if start.changes:
        directory.write_settings()
    return trainer


def load_state(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer,
    average: Average,
    recipe: Recipe,
    ranks: Ranks,
) -> TrainState:
    """Fill model, optimizer and average from a checkpoint; returns its counters."""
    state = TrainState.from_json(checkpoint.counters)
    if not average.tensors or not checkpoint.names(AVERAGE):
        state.averaged = 0
    # A branch may have changed `optim.kind`.
    same_kind = checkpoint.manifest.meta.get("optimizer") == recipe.optimizer_state
    averages = average.tensors if state.averaged else {}
    fill_base(checkpoint, unwrap(model), recipe, ranks)
    restore(checkpoint, model, optimizer if same_kind else None, averages)
    average.load(state.averaged)
    return state


def prepare_device(recipe: Recipe, stack: ExitStack) -> None:
    """Configure torch until `stack` ends."""
    if torch.are_deterministic_algorithms_enabled() != recipe.train.deterministic:
        torch.use_deterministic_algorithms(recipe.train.deterministic)  # imports torch's compiler
    if recipe.data.ragged_:
        stack.enter_context(attention_without_plans())


def horizon_of(recipe: Recipe, data: Data, own_model: bool) -> Horizon:
    """The length of a run. UserError if the data does not allow it."""
    samples, parameters = len(data.train), None
    if samples < 1:
        context = recipe.model.context
        raise UserError(f"the training data lacks a sample of model.context = {context} tokens")
    if recipe.train.steps == "compute-optimal":
        if own_model:
            problem = 'train.steps = "compute-optimal" is for a recipe\'s own model'
            raise UserError(f"{problem}; write steps or epochs")
        parameters = read_sizes(recipe).total if recipe.model.kind == "hf" else None
    tokens = real_tokens(data.train)
    per_sample = tokens / samples if tokens else None
    steps = resolve_steps(recipe, data.vocab, per_sample, samples, parameters)
    horizon = recipe.horizon(steps, samples)
    check_fits(recipe.optim.schedule, horizon)
    return horizon


def free_memory(device: torch.device) -> int | None:
    """The bytes of a GPU that this process may fill, with a margin; None for a CPU."""
    if device.type == "cpu":
        return None
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free - (1 - USABLE) * total)


def batch_of(start: Start, ranks: Ranks, vocab: int, free: int | None) -> BatchPlan:
    """How the ranks divide a step's samples; all ranks call it.

    A micro-batch that the recipe leaves open stays as it was in a resumed run, for equal bits,
    unless memory ran out. On CUDA it is the largest that fits into the `free` bytes of every rank;
    on a CPU (None) the one by tokens. `vocab`: 0 for a user's module.
    """
    recipe = start.recipe
    batch = recipe.batch(ranks.world, "cpu" if free is None else "cuda")
    if recipe.train.micro_batch:
        return batch
    if free is not None:
        free = min(ranks.all_gather_object("free memory", free))

    def choose() -> int:
        if start.resuming:
            recorded = recorded_micro_batch(start.run, ranks.world)
            if recorded and batch.share % recorded == 0:
                return recorded
        if free is None:
            return batch.micro_batch
        rows = vocab and (recipe.model.vocab or vocab)
        precision = resolve_precision(recipe.train.precision, ranks.device)
        counted = None
        if rows and recipe.model.kind == "hf":
            try:  # its activations by a pass with fake tensors
                network = build_model(recipe, rows)
                peaks = measure_peaks(network, recipe, precision, batch.micro_batch, "cuda")
                counted = replace(sizes_of(network), peaks=peaks)
            except Exception:  # code of `transformers`, or an operation without a fake kernel
                counted = None  # the micro-batch by tokens stays
        device = Device("", "cuda", None)
        layout = layout_on(recipe, rows, ranks.world, device, precision, free, counted)
        return layout.micro_batch

    return replace(batch, micro_batch=ranks.decide("micro-batch", choose))
