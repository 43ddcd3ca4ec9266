"""One rank of a training: its set-up in order, and another start if memory ran out."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from windlass.checkpoint.format import Checkpoint
from windlass.data.describe import DataFacts, describe, lines
from windlass.data.describe import warnings as data_warnings
from windlass.data.directory import data_dirs
from windlass.data.mixture import Mixture, shares_of_run
from windlass.data.open import open_data
from windlass.data.run_data import Data
from windlass.data.samples import real_tokens
from windlass.errors import OutOfMemory, UserError, plural
from windlass.estimate.activations import measure_peaks
from windlass.estimate.calendar import resolve_steps
from windlass.estimate.devices import USABLE, Device
from windlass.estimate.layouts import layout_on
from windlass.evaluation.suites import Suites
from windlass.model.build import build_model, read_sizes, sizes_of
from windlass.model.size import describe_sizes
from windlass.optim.average import Average
from windlass.optim.build import build_optimizer, describe_groups
from windlass.optim.schedule import check_fits
from windlass.parallel.dist import Ranks, init_process_group, init_store, use_deterministic
from windlass.parallel.env import detect_env
from windlass.parallel.parallelize import attention_without_plans, resolve_precision, unwrap
from windlass.processes import usable_cores
from windlass.recipe import BatchPlan, Horizon, Recipe, typed
from windlass.run import Run
from windlass.telemetry import environment
from windlass.telemetry.console import Console
from windlass.telemetry.measures import short
from windlass.training.callbacks import Callbacks, UserCode
from windlass.training.directory import RunDirectory, check_shared
from windlass.training.evaluator import Evaluator, can_sample
from windlass.training.network import Network
from windlass.training.nonfinite import (
    OUT_OF_MEMORY,
    BadSteps,
    check_is_deferred,
    is_new_size,
    recorded_micro_batch,
)
from windlass.training.record import Recorder
from windlass.training.saver import Saver
from windlass.training.start import StartPlan, resolve_start
from windlass.training.state import Buffers, LossScaler, LossSum, TrainState, load_state, mixture_of
from windlass.training.stop import StopSignals, event_of
from windlass.training.trainer import Trainer


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


def batch_of(plan: StartPlan, ranks: Ranks, data: Data, own_model: bool) -> BatchPlan:
    """The division of a step's samples over the ranks, with a micro-batch that fits into memory."""
    batch, device, usable = plan.recipe.batch(ranks.world, ranks.device.type), ranks.device, None
    if plan.recipe.train.micro_batch:
        return batch
    if device.type == "cuda":  # what this process may fill, with a plan's margin
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        usable = int(free - (1 - USABLE) * total)
    return open_micro_batch(plan, ranks, batch, 0 if own_model else data.vocab, usable)


def open_micro_batch(
    plan: StartPlan,
    ranks: Ranks,
    batch: BatchPlan,
    vocab: int,
    free: int | None,
) -> BatchPlan:
    """The plan with the micro-batch that the recipe leaves open; all ranks call it.

    A resumed run keeps its micro-batch, for equal bits, unless memory ran out. On CUDA it is the
    largest that fits into the `free` bytes of every rank; on a CPU (None) the one by tokens stays.
    `vocab`: 0 for a user's module.
    """
    recipe = plan.recipe
    if free is not None:
        free = min(ranks.all_gather_object("free memory", free))

    def choose() -> int:
        size = recorded_micro_batch(plan.run, ranks.world, free is not None) if plan.resuming else 0
        if size and batch.share % size == 0:
            return size
        if free is None:
            return batch.micro_batch
        precision, gpu = resolve_precision(recipe.train.precision, ranks.device), "cuda"
        rows, counted = vocab and (recipe.model.vocab or vocab), None
        if rows and recipe.model.kind == "hf":
            try:  # its activations by a pass with fake tensors
                network = build_model(recipe, rows)
                sizes = sizes_of(network)
                peaks = measure_peaks(network, recipe, precision, batch.micro_batch, gpu)
                counted = replace(sizes, peaks=peaks)
            except Exception:  # code of `transformers`, or an operation without a fake kernel
                counted = None  # the micro-batch by tokens stays
        device = Device("", gpu, None)
        layout = layout_on(recipe, rows, ranks.world, device, precision, free, counted)
        return layout.micro_batch

    return replace(batch, micro_batch=ranks.decide("micro-batch", choose))


def train_rank(
    plan: StartPlan,
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
                return open_trainer(plan, code, stop, stack, module, data, stop_at).run()
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
        plan = resolve_start(plan.recipe.replace({"checkpoint.resume": "latest"}))


def open_trainer(
    plan: StartPlan,
    code: UserCode,
    stop: StopSignals,
    stack: ExitStack,
    module: nn.Module | None,
    data: Data | None,
    stop_at: int,
) -> Trainer:
    """Set up a training, in order; `stack` closes the parts in reverse order."""
    recipe, run, own = plan.recipe, plan.run, module is not None

    # At first the ranks exchange values only, because preparing the data may take longer than a
    # collective. Then each rank chooses its device, and the mesh gets its groups.
    ranks = stack.enter_context(init_store(detect_env(), recipe))
    if ranks.env.nodes > 1:
        check_shared(ranks, run.path, data_dirs(recipe) if data is None else [])
    if data is None:
        data = open_data(recipe, ranks, resuming=plan.from_checkpoint)
    init_process_group(ranks, recipe)
    prepare_device(recipe, ranks.device, stack)
    batch = batch_of(plan, ranks, data, own)
    horizon = horizon_of(recipe, data, own)

    # The model without values, so that most bad input is found before the directory changes.
    origin = None if plan.fresh else run.path
    network = Network(recipe, ranks, data, horizon, stack, module, origin)
    check_prompt(recipe, data, network.model)

    # The directory, its lock, and the checkpoint to start from.
    console = Console(horizon.steps, ranks.rank)
    stack.callback(console.close)
    directory = RunDirectory(plan, ranks, horizon, console, stack)
    checkpoint = directory.checkpoint

    # The model on its device, divided among the ranks, with its first weights.
    console.begin("building the model, with its first weights")
    model = network.divide(data, run.path, from_checkpoint=checkpoint is not None)

    # What changes with the weights, perhaps from the checkpoint.
    bare, seed = unwrap(model), recipe.run.seed
    zero, replicas = ranks.strategy.shards_optimizer, ranks.mesh.replicas
    optimizer = build_optimizer(bare, recipe.optim, ranks.device.type, replicas, zero, seed)
    average = Average(bare, recipe.train.average)
    facts, state = network.facts(data, batch.micro_batch), TrainState()
    if checkpoint is not None:
        console.begin(f"reading {checkpoint.path}")
        ranks.mark(checkpoint.step, "load")
        directory.compare(facts)
        state = load_state(checkpoint, model, optimizer, average, recipe, ranks)
    ranks.mark(state.step, "start")
    scaler = LossScaler(ranks.device, state, network.precision)
    mixture = mixture_of(recipe, data.train, horizon, state)
    losses = LossSum(state, ranks)
    callbacks = Callbacks(code, recipe, ranks, state, horizon, model, optimizer)

    # Every part that a user's input can break has worked, so the run begins.
    directory.begin(data.save_tokenizer)
    attempt, precision, flops = directory.attempt, network.precision, network.flops_per_token
    recorder = Recorder(
        run, recipe, ranks, state, horizon, console, stack, attempt, precision, flops
    )
    stop.follow(state, lambda name: recorder.emit(event_of(name), reason=name, saved=True))
    saver = Saver(recorder, callbacks, directory, losses, scaler, average, facts, own)
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
    evaluator = Evaluator(recorder, suites, model, average, stop)
    deferred = check_is_deferred(ranks.device, optimizer, recipe.parallel.offload)
    trainer = Trainer(
        samples=data.train,
        mixture=mixture,
        batch=batch,
        precision=precision,
        compiled=network.compiled,
        model=model,
        optimizer=optimizer,
        average=average,
        scaler=scaler,
        losses=losses,
        buffers=Buffers(model, ranks),
        bad_steps=BadSteps(recorder, recipe.train, scaler, deferred),
        callbacks=callbacks,
        recorder=recorder,
        saver=saver,
        evaluator=evaluator,
        stop=stop,
        stop_at=stop_at,
    )
    warnings = [*directory.warnings, *network.warnings]
    report_start(recorder, plan, network, data, batch, mixture, checkpoint, warnings)
    if plan.changes:
        directory.write_settings()
    return trainer


def check_prompt(recipe: Recipe, data: Data, model: nn.Module) -> None:
    """Raise UserError, at the start, for a prompt that the tokenizer cannot read."""
    settings = recipe.eval
    if settings.sample_every and settings.prompt and can_sample(model, data.tokenizer):
        try:
            data.tokenizer.prompt(settings.prompt)
        except UserError as error:
            problem = f"eval.prompt = {settings.prompt!r}: {error}"
            raise UserError(f"{problem}; write another, or eval.sample_every=0") from None


def prepare_device(recipe: Recipe, device: torch.device, stack: ExitStack) -> None:
    """Configure the device until `stack` ends."""
    use_deterministic(recipe.train.deterministic)
    if recipe.data.ragged_:
        stack.enter_context(attention_without_plans())
        # Rows of varying length leave gaps between blocks of fixed sizes; segments that grow leave
        # none. Its environment variable would come too late.
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        if device.type == "cuda" and not any(name in os.environ for name in names):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


MORE_DATA = ("mixture", "template", "packing", "cut")
"""Facts of the data that have a line each in the header."""


def record_launch(run: Run, ranks: Ranks, network: Network) -> tuple[dict[str, str], list[str]]:
    """Write `environment.json`; returns the header's facts about the launch (empty for one rank
    outside a job), and a line a rank."""
    env = ranks.env
    place = environment.describe_rank(
        ranks.rank, ranks.device, env.local_rank, env.node, ranks.status.place
    )
    places = ranks.all_gather_object("environment", place)
    if not ranks.main:
        return {}, []
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else ""
    launch = {"launcher": env.launcher, "world": env.world, "nodes": env.nodes}
    launch |= {"strategy": ranks.strategy.name, "backend": backend}
    launch |= {"versions": environment.versions(places), **environment.describe_job(os.environ)}
    environment.write_environment(run.path, places, launch=launch, **network.origin)
    alone = ranks.world == 1 and "job" not in launch
    facts = {} if alone else environment.describe_launch(launch, places)
    return facts, environment.describe_places(places)


def report_start(
    recorder: Recorder,
    plan: StartPlan,
    network: Network,
    data: Data,
    batch: BatchPlan,
    mixture: Mixture | None,
    checkpoint: Checkpoint | None,
    warnings: list[str],
) -> None:
    """`environment.json`, the header, warnings, and the event of the start; all ranks call it."""
    ranks, console = recorder.ranks, recorder.console
    state, horizon = recorder.state, recorder.horizon
    launch, places = record_launch(plan.run, ranks, network)
    facts = describe(data)
    if mixture is not None:
        facts["mixture"] = shares_of_run(mixture, horizon)
    console.header(header(recorder, network, batch, facts, launch), state.step)
    console.log(places)
    for text in (*warnings, *data_warnings(facts)):
        if text:
            console.warning(text)
    sizes, branched = network.sizes, plan.branch_from
    event: dict[str, Any] = {
        "world": ranks.world,
        "strategy": ranks.strategy.name,
        "mesh": asdict(ranks.mesh.sizes),
        "precision": network.precision,
        "compiles": network.compiled,
        "device": recorder.device_name,
        "optimizer_groups": network.groups,
        "network": sizes.network or None,
        "parameters": sizes.total,
        "trained": sizes.trained,
        "threads": torch.get_num_threads(),
        "steps": horizon.steps,
        "micro_batch": batch.micro_batch,
        "accumulation": batch.accumulation,
        "global_batch": batch.global_batch,
        "data": facts,
        "samples_per_epoch": horizon.samples_per_epoch,
        "extended_from": plan.extends_from or None,
    }
    if branched:
        event["branched_from"] = str(branched.absolute())
    name = "branched" if branched else "resumed" if plan.resuming and state.step else "started"
    recorder.emit(name, f"resumed from {checkpoint.path}" if checkpoint else "", **event)
    if ranks.main and is_new_size(plan.run, batch.micro_batch):
        text = f"memory ran out: train.micro_batch={batch.micro_batch} from here on"
        recorder.emit(OUT_OF_MEMORY, text, warning=True, micro_batch=batch.micro_batch)
    if plan.changes:
        changes = [f"{k} {typed(old)} -> {typed(new)}" for k, (old, new) in plan.changes.items()]
        text = f"settings changed: {', '.join(changes)}"
        recorder.emit("settings_changed", text, settings=plan.changes)


def header(
    recorder: Recorder, network: Network, batch: BatchPlan, facts: DataFacts, launch: dict[str, str]
) -> dict[str, str]:
    """The facts of a start by name; an empty one is not shown."""
    recipe, ranks, horizon = recorder.recipe, recorder.ranks, recorder.horizon
    layout = [f"{plural(ranks.world, 'rank')} x {recorder.device_name}", ranks.strategy.name]
    layout += [ranks.mesh.sizes.layout, network.precision, "compiled" * network.compiled]
    threads = f"{torch.get_num_threads()} of {plural(usable_cores(), 'core')}"
    data = lines(facts, batch.context)
    epochs = horizon.samples_per_step * horizon.steps / horizon.samples_per_epoch
    count = f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"
    parts = [": ".join(data[key] for key in ("data", "training") if key in data)]
    parts += [f"validation {data['validation']}", data["tokenizer"]]
    parts += [f"{count} epoch{'s' * (count != '1')}"]
    if recipe.data.order == "shards-shuffled":
        parts += ["shards in file order, then in a new order each epoch"]
    per_sample = facts["train"].get("tokens_per_sample", batch.context)  # at most the context
    tokens = round(per_sample * horizon.samples_per_step)
    about = "about " * (per_sample != batch.context)  # rows differ in length
    work = f"{plural(horizon.steps, 'step')} x {about}{tokens:,} tokens"
    work += f" = {short(horizon.steps * tokens)} tokens"
    done = f", resumed after step {recorder.state.step:,}" if recorder.state.step else ""
    return {
        "run": str(recorder.run.path),
        "recipe": f"{recipe.preset} ({recipe.config_hash})",
        "ranks": ", ".join(filter(None, layout)),
        **launch,
        "threads": threads if ranks.device.type == "cpu" else "",
        "model": describe_sizes(network.sizes),
        "optim": f"{recipe.optim.kind}: {describe_groups(network.groups)}",
        "data": "; ".join(parts),
        **{key: data[key] for key in MORE_DATA if key in data},
        "work": work + done,
    }
