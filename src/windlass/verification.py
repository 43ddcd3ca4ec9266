"""The proof on the user's own machine: each promise tried with real trainings, by their ledgers and checkpoints.

`python -m windlass.verification TASK` is such a training, in processes of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import windlass
from windlass import processes
from windlass.checkpoint.load import choose_checkpoint, open_checkpoint
from windlass.data.order import Order
from windlass.data.prepare import open_data
from windlass.errors import DONE, Stopped, installed, needs
from windlass.launch.local import launch
from windlass.recipe import Recipe
from windlass.run import Run

STEPS, BATCH, MICRO = 12, 8, 2
EXACT = ("step", "loss", "grad_norm", "lr", "tokens", "samples")
ROUNDING = 1e-9  # largest difference in float64 that counts as rounding

TINY = {
    "model.layers": 2,
    "model.heads": 2,
    "model.width": 32,
    "model.context": 16,
    "model.vocab": 0,
    "model.dropout": 0.1,
    "data.tokenizer": "byte",
    "data.val_fraction": 0.1,
}
COMMON = {
    "train.steps": STEPS,
    "train.global_batch": BATCH,
    "train.micro_batch": MICRO,
    "train.deterministic": "true",
    "train.compile": "false",
    "train.on_spike": "ignore",
    "checkpoint.every": 1,
    "checkpoint.keep_last": 2 * STEPS,
    "checkpoint.best": "loss",
    "eval.every": 0,
    "eval.sample_every": 0,
    "eval.suites": '["loss"]',
    "telemetry.every": 1,
    "telemetry.trackers": "[]",
    "parallel.timeout_seconds": 120,
    "parallel.startup_timeout_seconds": 300,
    "parallel.strategy": "auto",
    "optim.schedule.warmup": 2,
}
FLOAT64: dict[str, Any] = {"train__precision": "fp64"}
GPT2_SHAPE = {
    "model__position": "learned",
    "model__norm": "layernorm",
    "model__activation": "gelu_tanh",
    "model__attn_bias": "true",
    "model__ff_bias": "true",
    "model__qk_norm": "false",
    "model__tie_head": "true",
    "model__zero_init_output": "false",
}

Outcome = tuple[bool | None, str]  # `passed` and `measured` of a Proof
Task = dict[str, Any] | None  # see `run_rank`


@dataclass
class Proof:
    """What was tried, and whether it holds. `passed` is None where it could not be tried, and `measured` says why."""

    name: str
    claim: str
    passed: bool | None
    measured: str
    seconds: float = 0.0


class Bench:
    """Where the proofs run: a base recipe (a tiny one, or the given one shortened), a directory, and how to train."""

    def __init__(
        self,
        folder: Path,
        recipe: str = "",
        overrides: Sequence[str] = (),
        worlds: Sequence[int] = (1, 2, 4),
        kills: int = 10,
    ):
        self.folder, self.recipe, self.worlds, self.kills = (
            folder.resolve(),
            recipe or "quickstart",
            worlds,
            kills,
        )
        self.base: dict[str, Any] = {**COMMON, "data.dir": f"'{self.folder / 'data'}'"}
        self.base["train.threads"] = processes.thread_share(
            max(worlds)
        )  # equal for all, so that bits are
        if not recipe:
            text = self.folder / "text.txt"
            text.write_text(Path(__file__).read_text(encoding="utf-8")[:900], encoding="utf-8")
            self.base |= {**TINY, "data.source": f"'{text}'"}
        self.base |= dict(override.partition("=")[::2] for override in overrides)
        self.model = self.settings("model").model

    def settings(self, run: str, **settings: Any) -> Recipe:
        """The base recipe with changes for a run, as `train__micro_batch=4`."""
        values = {**self.base, **settings, "run.dir": f"'{self.folder / run}'"}
        return Recipe.load(
            self.recipe, [f"{key.replace('__', '.')}={value}" for key, value in values.items()]
        )

    def here(self, run: str, **settings: Any) -> Run:
        """Train in this process, with nothing on the terminal."""
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            contextlib.redirect_stdout(nowhere),
        ):
            return windlass.train(self.settings(run, **settings))

    def start(
        self, run: str, world: int, task: Task = None, **settings: Any
    ) -> subprocess.Popen[bytes]:
        """Begin to train in `world` processes of their own, which write to RUN.out; for `task` see `run_rank`."""
        recipe = self.folder / f"{run}.toml"
        recipe.write_text(self.settings(run, **settings).toml(), encoding="utf-8")
        task = {"recipe": str(recipe), "world": world, **(task or {})}
        command = [sys.executable, "-m", "windlass.verification", json.dumps(task)]
        environ = {**os.environ, processes.PARENT: str(os.getpid())}
        with (self.folder / f"{run}.out").open("ab") as out:
            return subprocess.Popen(
                command, stdout=out, stderr=out, env=environ, start_new_session=True
            )

    def train(self, run: str, world: int, task: Task = None, **settings: Any) -> Run:
        """The same to its end; raises RuntimeError with its last lines where it fails."""
        code = self.start(run, world, task, **settings).wait()
        if code not in ((1, -signal.SIGKILL) if "kill_after" in (task or {}) else (DONE,)):
            lines = (self.folder / f"{run}.out").read_text(errors="replace").splitlines()[-12:]
            raise RuntimeError("\n".join([f"a training ended with exit code {code}:", *lines]))
        return Run(self.folder / run)


def verify(
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    world: int = 0,
    kills: int = 10,
    directory: str | Path | None = None,
    show: Callable[[Proof], None] = lambda proof: None,
) -> list[Proof]:
    """Prove, with real runs on this machine, that nothing is lost and nothing is wrong in silence.

    Args:
        recipe: a recipe to prove, shortened to 12 steps of 8 samples, instead of a tiny one.
        overrides: settings to change, as `KEY=VALUE`; UserError where one is wrong.
        world: use at most so many ranks; 0: 4 on a CPU, else one a GPU.
        kills: how often a run that saves is killed.
        directory: leave the runs of the proofs there.
        show: called with each result when it is there. A proof that breaks down has failed, and says how.
    """
    import torch

    most = world or (torch.cuda.device_count() if torch.cuda.is_available() else 4)
    results = []
    with tempfile.TemporaryDirectory(prefix="windlass-verify-") as temporary:
        folder = Path(directory or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, recipe or "", overrides, [w for w in (1, 2, 4) if w <= most], kills)
        for name, (claim, prove) in PROOFS.items():
            began = time.monotonic()
            try:
                passed, measured = prove(bench)
            except Exception as error:
                passed, measured = False, f"{type(error).__name__}: {error}"
            results.append(Proof(name, claim, passed, measured, time.monotonic() - began))
            show(results[-1])
    return results


def numbers(run: Run) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """What the ledger has of each step, and every tensor of the last checkpoint, whole."""
    checkpoint = open_checkpoint(run.checkpoints_dir / f"step-{STEPS:08d}")
    steps = [tuple(line[key] for key in EXACT) for line in run.lines("train")]
    return steps, {name: checkpoint.tensor(name) for name in checkpoint.names()}


def same_bits(run: Run, reference: Run, first: int = 0) -> bool:
    """Whether two runs have the same bits in every step after the `first` ones, and in their last checkpoint."""
    (steps, a), (expected, b) = numbers(run), numbers(reference)
    same = (a[name].dtype == b[name].dtype and bool((a[name] == b[name]).all()) for name in a)
    return steps == expected[first:] and a.keys() == b.keys() and all(same)


def difference(run: Run, reference: Run) -> float:
    """The largest relative difference of losses and gradient norms, and absolute one of weights."""
    (steps, a), (expected, b) = numbers(run), numbers(reference)
    pairs = zip(steps, expected, strict=True)
    scalars = (
        abs(one[i] - other[i]) / max(abs(other[i]), 1e-12) for one, other in pairs for i in (1, 2)
    )
    weights = (
        float((a[name].double() - b[name].double()).abs().max())
        for name in b
        if name.startswith("model/")
    )
    return max(*scalars, *weights)


def resume_exact(bench: Bench) -> Outcome:
    """Resume from every step, and after a kill -9 on two ranks."""
    whole = bench.here("whole")
    equal = {}
    for step in range(1, STEPS):
        run = bench.here(
            f"from-{step}", checkpoint__resume=f"'{whole.checkpoints_dir / f'step-{step:08d}'}'"
        )
        equal[str(step)] = same_bits(run, whole, step)
    if 2 in bench.worlds:
        two = bench.train("two", 2)
        bench.train("two-killed", 2, {"kill_after": STEPS // 2 + 1})
        equal["kill -9 on 2 ranks"] = same_bits(bench.train("two-killed", 2), two)
    if wrong := [name for name, same in equal.items() if not same]:
        return False, f"losses, norms, weights or optimizer states differ after: {', '.join(wrong)}"
    return (
        True,
        f"all bits equal (one process{', and kill -9 on 2 ranks' if 2 in bench.worlds else ''})",
    )


def strategies_agree(bench: Bench) -> Outcome:
    """Each strategy in float64 against one process, with the recipe's dropout: the micro-batches are equal."""
    worlds = {"ddp": 2, "shard_optim": 2, "full_shard": 2, "shard_grad_op": 2, "hybrid_shard": 4}
    cells = {strategy: world for strategy, world in worlds.items() if world in bench.worlds}
    if not cells:
        return None, "only one rank is possible here"
    reference = bench.here("s-one", **FLOAT64)
    runs = [
        bench.train(f"s-{name}", world, parallel__strategy=name, **FLOAT64)
        for name, world in cells.items()
    ]
    tried = ", ".join(f"{strategy} x {world}" for strategy, world in cells.items())
    if (
        bench.model.kind == "gpt" and not bench.model.init_from
    ):  # the same weights, as a module given to `train`
        runs.append(
            bench.train("s-module", 2, {"module": True}, parallel__strategy="full_shard", **FLOAT64)
        )
        tried += ", a module of one's own with full_shard x 2"
    worst = max(difference(run, reference) for run in runs)
    return worst < ROUNDING, f"{tried}: largest difference {worst:.1e} in float64"


def world_changes_nothing(bench: Bench) -> Outcome:
    """World and accumulation with dropout and equal micro-batches; without dropout any micro-batch. In float64."""
    from windlass.model.build import build_model
    from windlass.training.checks import uses_dropout

    library, recipe = bench.model.kind != "gpt", bench.settings("model")
    differences, parts = list[float](), list[str]()
    if worlds := [w for w in bench.worlds if w > 1 and BATCH % (w * MICRO) == 0]:
        reference = bench.here("w-one", **FLOAT64)
        differences += [difference(bench.train(f"w-{w}", w, **FLOAT64), reference) for w in worlds]
        drawn = (
            "the dropout of its configuration" if library else f"dropout {bench.model.dropout:g}"
        )
        parts.append(f"{len(worlds) + 1} worlds with micro-batch {MICRO} and {drawn}")
    # The dropout of a library's model is in its own configuration, and cannot be set to 0 from here.
    if not (library and uses_dropout(build_model(recipe, open_data(recipe).vocab, "meta"))):
        even = FLOAT64 if library else FLOAT64 | {"model__dropout": 0.0}
        reference = bench.here("w-even", **even, train__micro_batch=BATCH)
        runs = [bench.here(f"w-1-{micro}", **even, train__micro_batch=micro) for micro in (1, 2, 4)]
        divisions = [
            (world, micro) for world in bench.worlds[1:] for micro in sorted({1, BATCH // world})
        ]
        runs += [
            bench.train(f"w-{w}-{micro}", w, **even, train__micro_batch=micro)
            for w, micro in divisions
        ]
        differences += [difference(run, reference) for run in runs]
        parts.append(f"{len(runs) + 1} divisions without dropout")
    if not parts:
        return (
            None,
            "one rank, and other micro-batches draw other dropout masks: set the configuration's dropout to 0",
        )
    return max(
        differences
    ) < ROUNDING, f"{'; '.join(parts)}: largest difference {max(differences):.1e} in float64"


def sequence_whole(bench: Bench) -> Outcome:
    """One run that moves over worlds reads every sample where the order says, once."""
    worlds = (
        [1, 2, 4, 1] if 4 in bench.worlds else [1, 2, 1, 2] if 2 in bench.worlds else [1, 1, 1, 1]
    )
    steps, read = STEPS // len(worlds), list[int]()
    for part, world in enumerate(worlds):
        record = str(bench.folder / f"reads-{part}")
        bench.train(
            "moving", world, {"stop_at": steps * (part + 1), "record": record}, train__micro_batch=1
        )
        ranks = [json.loads(Path(f"{record}-{rank}.json").read_text()) for rank in range(world)]
        # the loader reads ahead: only the samples of the steps that were done count
        read += [
            micro[0]
            for turn in list(zip(*ranks, strict=False))[: steps * BATCH // world]
            for micro in turn
        ]
    recipe = bench.settings("moving")
    samples, seed = len(open_data(recipe).train), recipe.run.seed
    places = (divmod(number, samples) for number in range(STEPS * BATCH))
    expected = [int(Order(recipe.data.order, seed, epoch, samples)[i]) for epoch, i in places]
    repeats = sum(
        len(read[i : i + samples]) - len(set(read[i : i + samples]))
        for i in range(0, len(read), samples)
    )
    text = f"{len(read)} samples over worlds {' -> '.join(map(str, worlds))}: {repeats} repeated"
    return not repeats and read == expected, f"{text}, order as defined: {read == expected}"


def kills_lose_nothing(bench: Bench) -> Outcome:
    """SIGKILL at random moments of saving; after each, what was committed before is there and good, or a successor is."""
    run, draw = bench.folder / "killed", random.Random(0)
    worlds = bench.worlds[: min(2, bench.kills)]
    committed = lost = finished = 0
    for number in range(bench.kills):
        process = bench.start(
            "killed", worlds[number % len(worlds)], train__steps=10_000, checkpoint__keep_last=2
        )
        until, newest = time.monotonic() + 120, committed
        while newest == committed and process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
            newest = max(
                (int(p.name[5:]) for p in (run / "checkpoints").glob("step-????????")), default=0
            )
        time.sleep(draw.random() * 0.2)
        finished += process.poll() == 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        choice = choose_checkpoint(run) if (run / "checkpoints").is_dir() else None
        step = choice.step if choice else 0
        lost += bool(choice and choice.notes) or step < committed
        committed = step
    text = f"{bench.kills} kills -9 of a run on {' or '.join(map(str, worlds))} ranks that saves at every step"
    return lost == 0 and committed > 0 and not finished, f"{text}: {lost} lost, newest {committed}"


def export_equal(bench: Bench) -> Outcome:
    """A GPT-2-shaped model of ours, or the recipe's own where its shape is given, in transformers."""
    if not installed("transformers"):
        return None, needs("transformers")
    import torch
    import transformers

    from windlass.evaluation.source import alone, find_source, open_model
    from windlass.interop.export import export

    given = bench.model.kind != "gpt" or bool(bench.model.init_from)
    run = bench.here("export", train__steps=3, **({} if given else GPT2_SHAPE))
    transformers.utils.logging.disable_progress_bar()
    export(str(run.path), bench.folder / "hf")
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        bench.folder / "hf", trust_remote_code=True
    ).eval()
    ours = open_model(find_source(str(run.path)), alone("cpu"))
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        far = float((ours(tokens) - exported(tokens).logits).abs().max())
    return (
        far < 1e-5,
        f"{type(exported).__name__ if given else 'GPT-2 shape'}, largest difference of a logit {far:.1e}",
    )


PROOFS: dict[str, tuple[str, Callable[[Bench], Outcome]]] = {
    "resume": (f"resume is bit-exact at every step of {STEPS}", resume_exact),
    "strategies": ("strategies agree with one process", strategies_agree),
    "world": (
        "world size, micro-batch and accumulation change nothing but rounding",
        world_changes_nothing,
    ),
    "order": ("the sample sequence has no repeat and no gap over worlds", sequence_whole),
    "kills": ("no kill loses a committed checkpoint", kills_lose_nothing),
    "export": ("export to transformers gives equal logits", export_equal),
}


def run_rank(task: dict[str, Any]) -> None:
    """One rank of a training of a proof.

    The task: the `recipe`'s file and the `world`; `stop_at` a step, `kill_after` so many steps, `module`: give `train` the model as
    a user's own module, or `record`: write the indices of the samples that are read, a list for each micro-batch, to
    `RECORD-RANK.json`.
    """
    from windlass.model.build import build_model
    from windlass.model.gpt import initialise

    recipe = Recipe.load(task["recipe"])
    data = open_data(recipe)
    model = build_model(recipe, data.vocab, "cpu") if task.get("module") else None
    if model is not None:
        initialise(model, recipe.run.seed)
    reads, read = list[list[int]](), data.train.read

    def recorded(indices: Any) -> Any:
        reads.append([int(i) for i in indices])
        return read(indices)

    class AtStep(windlass.Callback):
        def on_step(self, now: Any) -> None:
            if now.step == task.get("kill_after"):
                while not any((recipe.run_dir / "checkpoints").glob("step-????????")):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)

    data.train.read = recorded  # type: ignore[method-assign]
    with contextlib.suppress(Stopped):
        windlass.train(recipe, model, data, callbacks=[AtStep()], stop_at=task.get("stop_at", 0))
    if "record" in task:
        Path(f"{task['record']}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(reads))


if __name__ == "__main__":
    if parent := os.environ.pop(processes.PARENT, ""):
        processes.exit_with_parent(int(parent))
    task = json.loads(sys.argv[1])
    if task["world"] > 1 and "RANK" not in os.environ:
        sys.exit(
            launch([sys.executable, "-m", "windlass.verification", sys.argv[1]], task["world"])
        )
    run_rank(task)
