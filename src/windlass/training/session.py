"""Everything a training needs, put together once and in order: data, ranks, model, optimizer, state, ledger, checkpoints."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from windlass.checkpoint import load as checkpoints
from windlass.checkpoint.commit import shortage
from windlass.checkpoint.lineage import read_lineage
from windlass.checkpoint.reshard import gather_state, restore
from windlass.checkpoint.retention import Policy, policy_of
from windlass.checkpoint.save import Saver
from windlass.data.dataset import Data, open_data
from windlass.errors import RunFailed, Stopped, UserError
from windlass.estimate.milestones import checkpoints_to_come
from windlass.estimate.optimum import resolve_steps
from windlass.fileio import Files
from windlass.interop.init_from import load_initial
from windlass.model import hf_files
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.hf import HfModel, read_sizes, sizes_of
from windlass.model.size import HfSizes, flops_per_token
from windlass.optim.build import build_optimizer
from windlass.parallel.dist import Ranks, init_process_group, init_store
from windlass.parallel.env import detect_env
from windlass.parallel.parallelize import parallelize, resolve_precision, unwrap
from windlass.recipe import BatchPlan, Horizon, Recipe
from windlass.run import Run, read_lines
from windlass.telemetry.console import Console, Header
from windlass.telemetry.devices import DeviceSampler, measure_cpu_peak
from windlass.telemetry.environment import describe, describe_rank, write_environment
from windlass.telemetry.ledger import Ledger
from windlass.telemetry.timing import Goodput, StepTimer, peak_flops
from windlass.telemetry.trackers import Trackers, start_trackers
from windlass.training.checks import tie_groups
from windlass.training.guard import Signals, Together
from windlass.training.start import (
    StartPlan,
    acquire_run_lock,
    candidate_checkpoints,
    set_aside,
    write_start,
    write_tokenizer,
)
from windlass.training.state import TrainState
from windlass.training.step import Step

if TYPE_CHECKING:
    from types import TracebackType

Value = TypeVar("Value")


@dataclass(frozen=True)
class Options:
    """What is asked of one start of a run, besides the recipe."""

    stop_at: int = 0
    """Save and stop after this step; 0: at the run's end."""
    profile: int = 0
    """Steps to write a profiler's trace of."""


@dataclass
class Session:
    """One start of a run on one rank. A context manager: leaving it ends what it began, and waits for nobody on an error."""

    claim: StartPlan
    options: Options
    signals: Signals
    recipe: Recipe = field(init=False)
    run: Run = field(init=False)
    ranks: Ranks = field(init=False)
    together: Together = field(init=False)
    data: Data = field(init=False)
    batch: BatchPlan = field(init=False)
    horizon: Horizon = field(init=False)
    model: nn.Module = field(init=False)
    precision: str = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    state: TrainState = field(init=False)
    step: Step = field(init=False)
    saver: Saver = field(init=False)
    ledger: Ledger = field(init=False)
    console: Console = field(init=False)
    timer: StepTimer = field(init=False)
    goodput: Goodput = field(init=False)
    attempt: int = 0
    resumed_from: Path | None = None
    device_name: str = ""
    peak: float | None = None
    trackers: Trackers | None = None
    sampler: DeviceSampler | None = None
    parameters: int = 0
    hf: HfSizes | None = None
    """The sizes of a model of `transformers`, whole, as it was before it was wrapped."""
    ties: list[list[str]] = field(default_factory=list)
    """Names of weights that were tied before the model was wrapped."""
    theirs: bool = False
    """Whether the model is a module of the user's own."""

    def __post_init__(self) -> None:
        self._stack = ExitStack()
        self._lock: IO[str] | None = None
        self._nonce = ""
        self._outside: checkpoints.Choice | None = None
        """Where a new run begins, if not at step 0; on rank 0."""
        self.recipe, self.run = self.claim.recipe, self.claim.run
        self.goodput = Goodput()

    def open(self, model: nn.Module | None, data: Data | None) -> Session:
        """Put it all together; on an error everything that was begun is ended."""
        self.custom_model = model is not None
        try:
            place = detect_env()
            self.ranks = self._stack.enter_context(init_store(place, self.recipe))
            self.together = self._stack.enter_context(Together(self.signals, self.ranks))
            with self.together.stage("data"), self.signals.at_once():
                self.data = data if data is not None else open_data(self.recipe)
            init_process_group(self.ranks, self.recipe)
            self._numbers()
            self._open_directory()
            self._build(model)
            self._resume()
            self._observe()
        except BaseException as error:
            if isinstance(error, Stopped):
                self._stopped()
            self.close(error)
            raise
        return self

    def _stopped(self) -> None:
        """Leave word in the ledger of a stop before it was opened, at its last step: the line makes none of them void."""
        if self.ranks.main and self._nonce:
            step = max((line["step"] for line in self.run.ledger()), default=0)
            ledger = Ledger(self.run.metrics_path, self.attempt, enabled=True, stamp=self.goodput.stamp)
            ledger.write("event", step, event="preempted", reason=self.signals.name, saved=True)
            ledger.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(error)

    def close(self, error: BaseException | None) -> None:
        """End threads and sidecars, then the process group; with an error no other rank is waited for."""
        try:
            self._stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        finally:
            if self._lock is not None:
                self._lock.close()

    def _numbers(self) -> None:
        """Batch arithmetic and the length of the run."""
        device, world = self.ranks.device.type, self.ranks.world
        train = self.recipe.train
        if device == "cpu" and train.precision == "fp16" and train.compile:  # the recipe cannot know what "auto" finds
            raise UserError("train.compile: fp16 on a CPU is for tests and is not compiled; use bf16 or fp32")
        self.batch = self.recipe.batch(world, device)
        samples = len(self.data.train)
        if samples < 1:
            raise UserError(
                f"the training data has no sample of model.context = {self.recipe.model.context} tokens; use a larger corpus "
                "or a shorter context"
            )
        steps = self.recipe.train.steps
        foreign = None
        if steps == "compute-optimal" and self.custom_model:
            raise UserError('train.steps = "compute-optimal" is for a recipe\'s own model; write steps or epochs')
        if steps == "compute-optimal" and self.recipe.model.kind == "hf":
            foreign = read_sizes(self.recipe).total
        per_sample = getattr(self.data.train, "sample_tokens", None)  # a source of the user's own may not know
        steps = resolve_steps(self.recipe, self.data.vocab, per_sample() if per_sample else None, samples, foreign)
        self.horizon = Horizon(steps, samples, self.recipe.train.global_batch)

    def _open_directory(self) -> None:
        """Rank 0 makes or sets aside the run's directory; all agree on the number of this start."""
        if not self.claim.resuming:
            self._outside = self._choose()

        def prepare() -> tuple[int, str]:
            if self.claim.fresh:
                set_aside(self.run.path)
            Files().make_dirs(self.run.path)
            self._lock = acquire_run_lock(self.run.path)
            if not self.claim.resuming and self.run.recipe_path.exists():
                raise UserError(f"another process has just begun a run in {self.run.path}; give another run.dir")
            self.run.heartbeat_path.touch()
            number = max((int(x.get("attempt", 0)) for x in read_lines(self.run.metrics_path)), default=-1) + 1
            if not self.claim.resuming:
                write_start(self.claim, self._outside)
            write_tokenizer(self.run, self.data)
            return number, secrets.token_hex(4)

        self.attempt, self._nonce = self.agreed("attempt", prepare)

    def agreed(self, name: str, decide: Callable[[], Value]) -> Value:
        """What rank 0 decides, on every rank; its mistake of the user's is every rank's, and so is said once."""
        answer: dict[str, Any] = {}
        if self.ranks.main:
            try:
                answer = {"value": decide()}
            except UserError as error:
                answer = {"error": str(error)}
            except RunFailed as error:
                answer = {"failure": str(error)}
            except Stopped as error:
                answer = {"stopped": str(error)}
            except OSError as error:
                answer = {"error": f"{error.filename or self.run.path}: {error.strerror}; give another run.dir"}
        answer = self.ranks.broadcast_object(name, answer)
        if "error" in answer:
            raise UserError(answer["error"])
        if "failure" in answer:
            raise RunFailed(answer["failure"])
        if "stopped" in answer:
            raise Stopped(answer["stopped"])
        value: Value = answer["value"]
        return value

    def _build(self, model: nn.Module | None) -> None:
        """The model on this rank, wrapped and filled, and its optimizer."""
        recipe, ranks = self.recipe, self.ranks
        torch.use_deterministic_algorithms(recipe.train.deterministic)
        if model is None:
            model = build_model(recipe, self.data.vocab, device="meta", run=self.run.path)
        if self.data.vocab > getattr(model, "vocab", self.data.vocab):
            raise UserError(
                f"the model has {model.vocab:,} token embeddings, and the tokenizer {self.data.vocab:,} tokens: set model.vocab "
                "to 0 or to at least that"
            )
        self.parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.hf = sizes_of(model) if isinstance(model, HfModel) and not self.custom_model else None
        self.precision = resolve_precision(recipe.train.precision, ranks.device)
        if self.precision == "fp64":
            model = model.double()
        self.ties = tie_groups(model)
        self.model = parallelize(model, ranks, recipe)
        if self._foreign:  # its values come when it is known that no checkpoint has them
            self.agreed("origin", lambda: hf_files.save_origin(unwrap(self.model), self.run.path))
        elif not self.custom_model:
            initialise(unwrap(self.model), recipe.run.seed)
        replicas = torch.distributed.group.WORLD if ranks.strategy == "ddp" and ranks.world > 1 else None
        self.optimizer = build_optimizer(unwrap(self.model), recipe.optim, ranks.device.type, replicas)
        self.timer = StepTimer(ranks.device, self.goodput)
        self.step = Step(self.model, self.optimizer, ranks, recipe, self.timer)

    @property
    def _foreign(self) -> bool:
        """Whether the model is one of `transformers`, named by the recipe."""
        return self.recipe.model.kind == "hf" and not self.custom_model

    def _resume(self) -> None:
        """The newest good checkpoint, if there is one, into model, optimizer and counters."""
        self.saver = Saver(
            self.run.checkpoints_dir, self.ranks.rank, self.ranks.world, f"{self.attempt}_{self._nonce}",
            device=self.ranks.device, background=self.recipe.checkpoint.background,
        )  # fmt: skip
        self._stack.callback(self.saver.close)

        def recover_run() -> list[str]:
            return checkpoints.recover(self.run.checkpoints_dir)

        self.ranks.mark(0, "load")
        self.resume_notes = self.agreed("recovered", recover_run)
        choice = self._choose() if self.claim.resuming else self._outside

        def settle() -> None:
            if self.claim.resuming and choice is not None:
                checkpoints.set_aside(choice, self.run.path)
            if self.claim.resuming and self.claim.new_lineage:
                write_start(self.claim, choice)

        self.agreed("settled", settle)
        lineage = read_lineage(self.run.path)
        self.saver.policy = self._policy(lineage.own_step() if lineage is not None else None)
        self.resume_notes += choice.notes if choice is not None else []
        path = choice.path if choice is not None else None
        self.state = TrainState()
        if path is not None:
            self._load(path)
        elif self.recipe.model.init_from and not self.custom_model:
            load_initial(unwrap(self.model), self.recipe, self.ranks)
        elif self._foreign:
            initialise(unwrap(self.model), self.recipe.run.seed)
        self.ranks.mark(self.state.step, "start")
        self.step.load(self.state)

    def _choose(self) -> checkpoints.Choice | None:
        """The checkpoint to start from; every rank hashes its share of the files."""
        paths = self.agreed("candidates", lambda: list(map(str, candidate_checkpoints(self.claim, self.horizon))))
        return checkpoints.first_undamaged([Path(p) for p in paths], self.ranks)

    def _policy(self, start: int | None = None) -> Policy:
        horizons = [self.horizon]
        if old := self.claim.extends_from:  # what was kept for good goes not before it is known what is needed of it
            horizons.append(replace(self.horizon, steps=old))
        return policy_of(self.recipe.checkpoint, horizons, start)

    def _load(self, path: Path) -> None:
        checkpoint = checkpoints.open_checkpoint(path, deep=False)
        fingerprint = checkpoint.meta.get("data")
        if fingerprint != self.data.fingerprint:
            raise UserError(
                f"the data is not what {path} was trained on (fingerprint {self.data.fingerprint}, there {fingerprint}): bring "
                "the old data back (data.dir), or start anew with --fresh"
            )
        self.ranks.mark(checkpoint.step, "load")
        saved = checkpoint.meta.get("optimizer")
        moments = saved == self.recipe.optim.kind
        if not moments:
            self.resume_notes.append(
                f"{path} has the moments of {saved}, of which {self.recipe.optim.kind} has no use: they begin anew"
            )
        with self.together.stage("load"):  # what is half loaded when a signal comes is never used: all ranks stop
            restore(checkpoint, self.model, self.optimizer if moments else None)
        self.state = TrainState.from_json(checkpoint.counters)
        self.resumed_from = path

    def _observe(self) -> None:
        """Ledger, terminal, sampler, trackers: on rank 0, but for the sampler."""
        recipe, ranks, run = self.recipe, self.ranks, self.run
        self.ledger = Ledger(run.metrics_path, self.attempt, enabled=ranks.main, stamp=self.goodput.stamp)
        self._stack.callback(self.ledger.close)
        self.console = Console(self.horizon.steps, ranks.main, run.log_path, ranks.rank)
        self._stack.callback(self.console.close)
        cuda = ranks.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(ranks.device) if cuda else "CPU"
        self.peak = peak_flops(self.device_name, self.precision) if cuda else None
        if not cuda and recipe.telemetry.cpu_peak:
            self.peak = measure_cpu_peak()
        everywhere = ranks.all_gather_object("environment", describe_rank(ranks.rank, ranks.device))
        if ranks.main:
            origin = {"model": hf_files.describe_origin(unwrap(self.model))} if self._foreign else {}
            write_environment(run.path, {**describe(everywhere), **origin})
        self.sampler = DeviceSampler(
            run.devices_dir, rank=ranks.rank, world=ranks.world, device=ranks.device,
            every=recipe.telemetry.sample_seconds, attempt=self.attempt,
        ).start()  # fmt: skip
        self._stack.callback(self.sampler.stop)
        self.goodput.listen(self.sampler.phase)
        if ranks.main and recipe.telemetry.trackers:
            self.trackers = start_trackers(run.path, recipe)
            self._stack.callback(self.trackers.close)
        self._check_space()

    def _check_space(self) -> None:
        """Warn before step 1 where the disk will not hold what the run is going to save."""
        if not self.ranks.main:
            return
        present = len(list(self.run.checkpoints_dir.glob("step-????????")))
        count = checkpoints_to_come(self.recipe, self.horizon, self.state.step, present)
        size = gather_state(self.model, self.optimizer, 0, 1).total_bytes
        size += 0 if self.state.step else 8 * self.parameters  # moments that are not there before the first step
        short = shortage(self.run.path, count * size, "the run") if count else ""
        if short:
            self.console.warning(short)

    @property
    def flops_per_token(self) -> float | None:
        """Model FLOPs of a token, forward and backward, by the 6N convention plus attention; None where not known."""
        if self.recipe.model.kind == "gpt" and not self.custom_model:
            return flops_per_token(self.recipe.model, self.data.vocab)
        return self.hf.flops_per_token() if self.hf else None

    @property
    def can_generate(self) -> bool:
        """Whether texts can be generated: a model or a tokenizer of the user's own may not know how."""
        return hasattr(unwrap(self.model), "new_cache") and hasattr(self.data.tokenizer, "encode")

    def header(self) -> Header:
        """What the terminal shows first."""
        return Header(
            run=str(self.run.path), recipe=self.recipe.preset, config_hash=self.recipe.config_hash, device=self.device_name,
            world=self.ranks.world, strategy=self.ranks.strategy, precision=self.precision,
            parameters=self.parameters, steps=self.horizon.steps, tokens_per_step=self.batch.tokens_per_step,
            first_step=self.state.step,
        )  # fmt: skip


class Heartbeat:
    """Touches a file every few seconds while the run lives, so that `windlass runs` can tell running from killed."""

    def __init__(self, path: Path, every: float = 10.0):
        self.path, self.every, self._next = path, every, 0.0

    def beat(self) -> None:
        """Touch the file where it is time; costs a clock reading otherwise."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self.every
            try:
                self.path.touch()
            except OSError:
                self._next = now + 10 * self.every
