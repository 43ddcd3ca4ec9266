"""The proof on the user's own machine: each claim tried with real runs, and what was measured.

Every proof is made of trainings as `windlass train` does them, in a temporary directory, and of what they left there:
ledgers and checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.errors import DONE, STOPPED, UserError
from windlass.recipe import Recipe
from windlass.run import Run

if TYPE_CHECKING:
    from windlass.recipe.settings import ModelSettings

STEPS = 12
EXACT = ("step", "loss", "grad_norm", "lr", "tokens", "samples")
ROUNDING = 1e-9
"""Largest difference in float64 that counts as rounding."""

DRAWS = "the model draws random masks, other ones for every division: set the dropout of its configuration to 0"

TINY = {
    "model.layers": 2, "model.heads": 2, "model.width": 32, "model.context": 16, "model.vocab": 0, "model.dropout": 0.1,
    "data.tokenizer": "byte",
}  # fmt: skip
COMMON = {
    "train.steps": STEPS, "train.global_batch": 8, "train.deterministic": "true", "checkpoint.every": 1,
    "checkpoint.keep_last": 2 * STEPS, "eval.every": 0, "eval.sample_every": 0, "telemetry.every": 1,
    "telemetry.trackers": "[]", "parallel.timeout_seconds": 120, "parallel.startup_timeout_seconds": 300,
    "optim.schedule.warmup": 2, "parallel.strategy": "auto", "train.micro_batch": 2,
    "train.compile": "false", "train.on_spike": "ignore", "eval.suites": '["loss"]', "checkpoint.best": "loss",
}  # fmt: skip


@dataclass
class Result:
    """What a proof found."""

    name: str
    claim: str
    passed: bool | None
    """None: not tried here, and `measured` says why."""
    measured: str
    seconds: float = 0.0


@dataclass
class Bench:
    """Where the proofs run: a base recipe, a directory, and how to start trainings."""

    recipe: str
    base: dict[str, Any]
    folder: Path
    kills: int = 10
    worlds: tuple[int, ...] = (1, 2, 4)
    log: list[str] = field(default_factory=list)

    def overrides(self, run: str, **settings: Any) -> list[str]:
        """The base settings with changes (`train__micro_batch=4`), as they would be typed."""
        changed = {key.replace("__", "."): value for key, value in settings.items()}
        merged = {**COMMON, **self.base, **changed, "run.dir": f"'{self.folder / run}'"}
        return [f"{key}={value}" for key, value in merged.items()]

    def train(self, run: str, world: int = 1, task: dict[str, Any] | None = None, **settings: Any) -> Run:
        """Train in `world` processes of their own; raises AssertionError with their last words where that fails."""
        what = {"recipe": self.recipe, "overrides": self.overrides(run, **settings), **(task or {})}
        said: list[str] = []
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        log = self.folder / f"{run}.out"
        with log.open("ab") as output:
            command = _command(what, world)
            done = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode
        said = log.read_text(errors="replace").splitlines()[-12:]
        expected = (DONE, STOPPED) if not what.get("kill_after") else (1, -signal.SIGKILL)
        assert done in expected, "\n".join([f"a training ended with exit code {done}:", *said])
        return Run(self.folder / run)

    @cached_property
    def model(self) -> ModelSettings:
        """The model that is trained."""
        return Recipe.load(self.recipe, self.overrides("model")).model

    @property
    def float64(self) -> dict[str, Any]:
        """The settings under which divisions of a batch may differ by rounding alone: no random masks, 53 bits."""
        return {"train__precision": "fp64"} | ({"model__dropout": 0.0} if self.model.kind == "gpt" else {})

    def draws(self) -> bool:
        """Whether the model of a library draws random masks, which only its own configuration can end."""
        if self.model.kind == "gpt":
            return False
        from windlass.data.dataset import open_data
        from windlass.model.build import build_model
        from windlass.training.step import drops

        recipe = Recipe.load(self.recipe, self.overrides("model"))
        return any(map(drops, build_model(recipe, open_data(recipe).vocab, "meta").modules()))

    def here(self, run: str, **settings: Any) -> Run:
        """Train in this process."""
        from windlass.training import train

        with _quiet():
            return train(Recipe.load(self.recipe, self.overrides(run, **settings)))


def _command(task: dict[str, Any], world: int = 1) -> list[str]:
    one = [sys.executable, "-m", "windlass.verification_worker", json.dumps(task)]
    return one if world == 1 else [sys.executable, "-m", "windlass.launch", str(world), *one]


class _quiet:  # noqa: N801
    """Nothing of a training reaches the terminal."""

    def __enter__(self) -> None:
        self._kept, sys.stdout = sys.stdout, open(os.devnull, "w", encoding="utf-8")

    def __exit__(self, *_: object) -> None:
        sys.stdout.close()
        sys.stdout = self._kept


def curve(run: Run) -> list[tuple[Any, ...]]:
    """What must be equal, bit for bit, of each step."""
    return [tuple(line[key] for key in EXACT) for line in run.lines("train")]


def state(run: Run, step: int = STEPS) -> dict[str, Any]:
    """Every tensor of a checkpoint, gathered: weights and moments."""
    from windlass.checkpoint.load import open_checkpoint

    checkpoint = open_checkpoint(run.checkpoints_dir / f"step-{step:08d}")
    return {name: checkpoint.tensor(name) for name in checkpoint.names()}


def same_bits(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two states hold the same tensors with the same bits."""
    return first.keys() == second.keys() and all(
        a.dtype == b.dtype and bool((a.contiguous().view(-1) == b.contiguous().view(-1)).all())
        for a, b in ((first[name], second[name]) for name in first)
    )


def difference(run: Run, reference: Run) -> float:
    """The largest relative difference of losses and gradient norms, and absolute one of weights."""
    mine, theirs = curve(run), curve(reference)
    if [row[0] for row in mine] != [row[0] for row in theirs]:
        return float("inf")
    scalars = max(abs(a[i] - b[i]) / max(abs(b[i]), 1e-12) for a, b in zip(mine, theirs, strict=True) for i in (1, 2))
    from windlass.checkpoint.reshard import MODEL

    weights, others = state(run), state(reference)
    names = [name for name in others if name.startswith(MODEL)]
    assert names, "no weights in the checkpoint"
    return max(scalars, *(float((weights[n].double() - others[n].double()).abs().max()) for n in names))


def resume_exact(bench: Bench) -> Result:
    """Go on from every step, and from a kill -9 on two ranks."""
    whole = bench.here("whole")
    wanted, last = curve(whole), state(whole)
    broken = []
    for step in range(1, STEPS):
        path = whole.checkpoints_dir / f"step-{step:08d}"
        run = bench.here(f"from-{step}", checkpoint__resume=f"'{path}'")
        if curve(run) != wanted[step:] or not same_bits(state(run), last):
            broken.append(str(step))
    killed = "one process"
    if 2 in bench.worlds:
        two = bench.train("two", 2)
        bench.train("two-killed", 2, {"kill_after": STEPS // 2 + 1})
        resumed = bench.train("two-killed", 2)
        killed = "one process, and kill -9 on 2 ranks"
        if curve(resumed) != curve(two) or not same_bits(state(resumed), state(two)):
            broken.append("kill -9 on 2 ranks")
    text = (
        f"losses, norms, weights, moments differ after: {', '.join(broken)}" if broken else f"all bits equal ({killed})"
    )
    return Result("resume", f"resume is bit-exact at every step of {STEPS}", not broken, text)


def strategies_agree(bench: Bench) -> Result:
    """Each strategy in float64 against one process."""
    claim = "strategies agree with one process"
    if bench.draws():
        return Result("strategies", claim, None, DRAWS)
    reference = bench.here("s-one", **bench.float64)
    worst, tried = 0.0, []
    cells = [(s, 2) for s in ("ddp", "full_shard", "shard_grad_op") if 2 in bench.worlds]
    cells += [("hybrid_shard", 4)] if 4 in bench.worlds else []
    for strategy, world in cells:
        run = bench.train(f"s-{strategy}", world, parallel__strategy=strategy, **bench.float64)
        worst = max(worst, difference(run, reference))
        tried.append(f"{strategy} x {world}")
    if not tried:
        return Result("strategies", claim, None, "only one rank is possible here")
    text = f"{', '.join(tried)}: largest difference {worst:.1e} in float64"
    return Result("strategies", claim, worst < ROUNDING, text)


def world_changes_nothing(bench: Bench) -> Result:
    """Micro-batch, accumulation and world in float64."""
    claim = "world size, micro-batch and accumulation change nothing but rounding"
    if bench.draws():
        return Result("world", claim, None, DRAWS)
    reference = bench.here("w-one", **bench.float64, train__micro_batch=8)
    runs = [bench.here(f"w-1-{m}", **bench.float64, train__micro_batch=m) for m in (1, 2, 4)]
    for world in bench.worlds[1:]:
        for micro in sorted({1, 8 // world}):
            runs.append(bench.train(f"w-{world}-{micro}", world, **bench.float64, train__micro_batch=micro))
    worst = max(difference(run, reference) for run in runs)
    worlds = ", ".join(map(str, bench.worlds))
    text = f"{len(runs)} divisions over {worlds} ranks: largest difference {worst:.1e} in float64"
    return Result("world", claim, worst < ROUNDING, text)


def sequence_whole(bench: Bench) -> Result:
    """One run that moves over worlds reads every sample where the order says, once."""
    path = [1, 2, 4, 1] if 4 in bench.worlds else [1, 2, 1, 2] if 2 in bench.worlds else [1, 1, 1, 1]
    batches: list[list[int]] = []
    for part, world in enumerate(path):
        stop = STEPS * (part + 1) // len(path)
        record = bench.folder / f"reads-{part}"
        bench.train("moving", world, {"stop_at": stop, "record": str(record)}, train__micro_batch=1)
        ranks = [json.loads(Path(f"{record}-{rank}.json").read_text()) for rank in range(world)]
        each = len(ranks[0]) // (STEPS // len(path))
        for step in range(STEPS // len(path)):
            dealt = [ranks[r][step * each + turn][0] for turn in range(each) for r in range(world)]
            batches.append(dealt)
    expected, epoch_samples = _expected_order(bench)
    seen = [sample for batch in batches for sample in batch]
    repeats = sum(
        len(epoch) - len(set(epoch))
        for epoch in (seen[i : i + epoch_samples] for i in range(0, len(seen), epoch_samples))
    )
    text = f"{len(seen)} samples over worlds {' -> '.join(map(str, path))}: {repeats} repeated, order as defined: {batches == expected}"
    return Result(
        "order", "the sample sequence has no repeat and no gap over worlds", not repeats and batches == expected, text
    )


def _expected_order(bench: Bench) -> tuple[list[list[int]], int]:
    from windlass.data.dataset import open_data
    from windlass.data.order import Order

    recipe = Recipe.load(bench.recipe, bench.overrides("moving"))
    samples = len(open_data(recipe).train)
    batch = recipe.train.global_batch
    order = []
    for number in range(STEPS * batch):
        epoch, place = divmod(number, samples)
        order.append(int(Order(recipe.data.order, recipe.run.seed, epoch, samples)[place]))
    return [order[i : i + batch] for i in range(0, len(order), batch)], samples


def kills_lose_nothing(bench: Bench) -> Result:
    """SIGKILL at random moments of saving; after each, what was committed before is there and good, or a successor is."""
    from windlass.checkpoint.load import choose

    run, draw = bench.folder / "killed", random.Random(0)
    committed, lost, finished = 0, 0, 0
    for number in range(bench.kills):
        task = {
            "recipe": bench.recipe,
            "overrides": bench.overrides("killed", train__steps=10_000, checkpoint__keep_last=2),
        }
        world = bench.worlds[number % min(2, len(bench.worlds))]
        with (bench.folder / "killed.out").open("ab") as output:
            process = subprocess.Popen(_command(task, world), stdout=output, stderr=output, start_new_session=True)
            try:
                begin = time.monotonic()
                while committed == _newest(run) and process.poll() is None and time.monotonic() - begin < 120:
                    time.sleep(0.005)
                time.sleep(draw.random() * 0.2)
            finally:  # every process of it at once, also when this one is interrupted
                finished += process.poll() == 0
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        choice = choose(run) if (run / "checkpoints").is_dir() else None
        now = choice.step if choice else 0
        lost += now < committed or bool(choice and choice.notes)
        committed = now
        bench.log.append(f"kill {number} on {world}: newest good checkpoint {now}")
    ranks = " or ".join(map(str, bench.worlds[: min(2, bench.kills)]))
    text = f"{bench.kills} kills -9 of a run on {ranks} ranks that saves at every step: {lost} lost, newest checkpoint {committed}"
    return Result("kills", "no kill loses a committed checkpoint", lost == 0 and committed > 0 and not finished, text)


def _newest(run: Path) -> int:
    return max((int(p.name[5:]) for p in (run / "checkpoints").glob("step-????????")), default=0)


def export_equal(bench: Bench) -> Result:
    """A GPT-2-shaped model of ours, or the recipe's own where its shape is given, in transformers."""
    claim = "export to transformers gives equal logits"
    try:
        import transformers
    except ImportError:
        return Result("export", claim, None, "transformers is not installed: pip install 'windlass[hf]'")
    import torch

    from windlass.evaluation.source import alone, find_source, open_model
    from windlass.interop.export import export

    given = bench.model.kind != "gpt" or bool(bench.model.init_from)
    settings = {} if given else {
        "model__position": "learned", "model__norm": "layernorm", "model__activation": "gelu_tanh", "model__attn_bias": "true",
        "model__ff_bias": "true", "model__qk_norm": "false", "model__tie_head": "true", "model__zero_init_output": "false",
    }  # fmt: skip
    run = bench.here("export", train__steps=3, **settings)
    transformers.utils.logging.disable_progress_bar()
    with _quiet():
        try:
            export(str(run.path), bench.folder / "hf")
        except UserError as refusal:
            return Result("export", claim, None, f"this model has no counterpart there: {str(refusal).splitlines()[0]}")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(bench.folder / "hf").eval()
    ours = open_model(find_source(str(run.path)), alone("cpu"))
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        far = float((ours(tokens) - theirs(tokens).logits).abs().max())
    shape = type(theirs).__name__ if given else "GPT-2 shape"
    return Result("export", claim, far < 1e-5, f"{shape}, largest difference of a logit {far:.1e}")


PROOFS: tuple[Callable[[Bench], Result], ...] = (
    resume_exact, strategies_agree, world_changes_nothing, sequence_whole, kills_lose_nothing, export_equal,
)  # fmt: skip


def prepare_bench(recipe: str, folder: Path, kills: int, worlds: tuple[int, ...]) -> Bench:
    """The tiny recipe on a text of this package's own, or the given one shortened to 12 steps of 8 samples."""
    base: dict[str, Any] = {"data.dir": f"'{folder / 'data'}'"}
    if recipe:
        return Bench(recipe, base, folder, kills, worlds)
    text = Path(__file__).read_text(encoding="utf-8")[:900]
    (folder / "text.txt").write_text(text, encoding="utf-8")
    base |= TINY | {"data.source": f"'{folder / 'text.txt'}'", "data.val_fraction": 0.1}
    return Bench("quickstart", base, folder, kills, worlds)


def verify(bench: Bench) -> Iterator[Result]:
    """Every proof in turn; one that breaks down has failed, and says how."""
    for proof in PROOFS:
        begin = time.monotonic()
        try:
            result = proof(bench)
        except Exception as error:  # a proof that cannot be made is a proof that failed
            doc = (proof.__doc__ or proof.__name__).splitlines()[0]
            result = Result(proof.__name__, doc, False, f"{type(error).__name__}: {error}")
        result.seconds = time.monotonic() - begin
        yield result
