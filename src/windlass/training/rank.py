"""Train on one rank: set up all parts of a training in order, and run it; start again if memory ran
out."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import replace

import torch

from windlass.checkpoint.base import base_of, fill_base
from windlass.checkpoint.format import AVERAGE
from windlass.checkpoint.state_dict import restore
from windlass.data.batch import unpadded_tokens
from windlass.data.mixture import MixedSamples, Mixture, Stage, continue_stages, stages_of
from windlass.data.open import Data, open_data
from windlass.errors import OutOfMemory, RunFailed, UserError
from windlass.estimate.activations import measure_peaks
from windlass.estimate.calendar import resolve_steps
from windlass.estimate.devices import USABLE, Device, peak_flops
from windlass.estimate.micro_batch import layout_on
from windlass.evaluation.suites import Suites
from windlass.fileio import read_json
from windlass.ledger import STARTS
from windlass.model.build import build_model, read_sizes, sizes_of
from windlass.model.sharding import unwrap
from windlass.optim.average import Average
from windlass.optim.build import build_optimizer
from windlass.optim.schedule import check_fits
from windlass.parallel.env import detect_env
from windlass.parallel.parallelize import attention_without_plans, resolve_precision
from windlass.parallel.ranks import Ranks, init_store
from windlass.recipe import BatchPlan, Horizon, Recipe
from windlass.telemetry.console import Console
from windlass.training.bad_steps import SMALLER, ran_out_of_memory
from windlass.training.callbacks import Callbacks, UserCode
from windlass.training.directory import RunDirectory, check_same_data, check_shared, compare
from windlass.training.evaluator import Evaluator, check_prompt
from windlass.training.header import report_start
from windlass.training.network import Network
from windlass.training.record import Recorder
from windlass.training.saver import Saver
from windlass.training.start import Start, resolve_start
from windlass.training.state import LossScaler, TrainState
from windlass.training.stop import StopSignals, event_of
from windlass.training.trainer import Trainer


def train_rank(start: Start, user: UserCode, stop: StopSignals, stop_at: int) -> None:
    """Train on this rank; a single rank starts again if memory ran out."""
    while True:
        try:
            with ExitStack() as stack:
                return set_up(start, user, stop, stop_at, stack).run()
        except OutOfMemory:
            # Several ranks start together, by their launcher. A user's module has lost the weights
            # that it began with.
            if detect_env().world > 1 or user.model is not None:
                raise
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            problem = "memory ran out before the first step, for the model and its optimizer state"
            advice = "divide them among more ranks (parallel.strategy=full_shard)"
            plan = "`windlass plan` shows what each setting needs"
            raise RunFailed(f"{problem}: {advice}; {plan}") from None
        # Here the exception is gone, which held what the step had allocated.
        gc.collect()
        torch.compiler.reset()  # else the next graph has a dynamic batch size, as no resume has it
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        start = resolve_start(start.recipe.replace({"checkpoint.resume": "latest"}))


def set_up(  # noqa: PLR0915 (in order, in one piece)
    start: Start, user: UserCode, stop: StopSignals, stop_at: int, stack: ExitStack
) -> Trainer:
    """Set up a training, in order; `stack` closes the parts in reverse order."""
    recipe, run, is_own = start.recipe, start.run, user.model is not None

    # At first the ranks exchange values only, because preparing the data may take longer than a
    # collective. Then each rank chooses its device, and the mesh gets its groups.
    ranks = stack.enter_context(init_store(detect_env(), recipe))
    if ranks.env.nodes > 1:
        check_shared(ranks, run.path)
    data: Data = user.data or open_data(recipe, ranks, resuming=start.from_checkpoint)
    check_same_data(ranks, data.fingerprint)
    ranks.connect(recipe)
    prepare_device(recipe, stack)
    batch = batch_of(start, ranks, 0 if is_own else data.vocab, free_memory(ranks.device))
    horizon = horizon_of(recipe, data, is_own)

    # The model without values, so that most bad input is found before the directory changes.
    origin = run.path if start.resuming else None
    network = Network(recipe, ranks, data, horizon.steps, stack, user.model, origin)
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
        state = TrainState.from_json(checkpoint.counters)
        if not average.tensors or not checkpoint.names(AVERAGE):
            state.averaged = 0
        # A branch may have changed `optim.kind`.
        same_kind = checkpoint.manifest.meta.get("optimizer") == recipe.optimizer_state
        averages = average.tensors if state.averaged else {}
        fill_base(checkpoint, bare, recipe, ranks)
        restore(checkpoint, model, optimizer if same_kind else None, averages)
        average.load(state.averaged)
    ranks.mark(state.step, "start")
    scaler = LossScaler(ranks.device, state, network.precision)
    mixture = None
    if isinstance(data.train, MixedSamples):
        past = [Stage(at, tuple(weights)) for at, weights in state.mixture]
        planned = stages_of(recipe.data, horizon)
        stages = continue_stages(past, planned, state.step * horizon.samples_per_step)
        state.mixture = [list(stage) for stage in stages]
        mixture = Mixture(data.train, stages, recipe.run.seed, recipe.data.order)

    # Every part that a user's input can break has worked, so the run begins.
    directory.begin(data.save_tokenizer)
    on_gpu = ranks.device.type == "cuda"
    device_name = torch.cuda.get_device_name(ranks.device) if on_gpu else "CPU"
    recorder = Recorder(
        run=run,
        recipe=recipe,
        ranks=ranks,
        state=state,
        horizon=horizon,
        console=console,
        stack=stack,
        attempt=directory.attempt,
        began=start.began,
        device_name=device_name,
        peak_flops=peak_flops(device_name, network.precision, tf32=recipe.train.tf32),
        flops_per_token=network.flops_per_token,
    )
    stop.follow(state, lambda name: recorder.emit(event_of(name), reason=name, saved=True))
    callbacks = Callbacks(user, recorder, model, optimizer)
    # `keep_every` as a fraction of the run meant other steps before the run was extended.
    lengths = {horizon.steps, start.extends_from or horizon.steps}
    saver = Saver(
        recorder,
        callbacks,
        scaler,
        average,
        meta=meta,
        base=None if is_own else base_of(bare, recipe, checkpoint, network.initial, ranks),
        checkpoint=checkpoint,
        attempt=directory.attempt_name,
        horizons=[replace(horizon, steps=steps) for steps in lengths],
        is_own=is_own,
    )
    own, tokenizer = callbacks.suites(), data.tokenizer
    suites = Suites(
        recipe, tokenizer, ranks, data.val, batch.micro_batch, own, data.train, data.template
    )
    trainer = Trainer(
        samples=data.train,
        mixture=mixture,
        batch=batch,
        compiled=network.compiled,
        model=model,
        optimizer=optimizer,
        average=average,
        scaler=scaler,
        callbacks=callbacks,
        recorder=recorder,
        saver=saver,
        evaluator=Evaluator(recorder, suites, model, average, stop),
        stop=stop,
        stop_at=stop_at,
    )
    resumed_from = str(checkpoint.path) if checkpoint else ""
    report_start(trainer, start, network, data, resumed_from, warnings)
    return trainer


def prepare_device(recipe: Recipe, stack: ExitStack) -> None:
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
    tokens = unpadded_tokens(data.train)
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
            # The smaller one after memory ran out, else the last start's, for the same world size
            begun = [event for event in start.run.events if event["event"] in STARTS]
            recorded = [read_json(start.run.path / SMALLER), *begun[-1:]]
            sizes = [each["micro_batch"] for each in recorded if each.get("world") == ranks.world]
            if sizes and batch.share % sizes[0] == 0:
                return int(sizes[0])
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
