"""The proof on the user's own machine: real trainings try each promise.

`python -m windlass.verification TASK` is such a training in processes of its own; see `run_rank`.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import windlass
from windlass import processes
from windlass.checkpoint.load import choose_checkpoint, open_checkpoint
from windlass.data.order import Order
from windlass.data.prepare import open_data
from windlass.errors import DONE, Stopped, installed, needs, plural
from windlass.launch.local import launch
from windlass.recipe import Recipe
from windlass.recipe.layers import dotted
from windlass.recipe.strategies import NO_LAYOUT
from windlass.run import Run

STEPS, BATCH, MICRO = 12, 8, 2
EXACT = ("step", "loss", "grad_norm", "lr", "tokens", "samples")
ROUNDING = 1e-9  # the largest difference in float64 that counts as rounding

TINY = {
    "model": {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocab": 0, "dropout": 0.1},
    "data": {"tokenizer": "byte", "val_fraction": 0.1},
}
COMMON = {
    "train": {"steps": STEPS, "global_batch": BATCH, "micro_batch": MICRO, "compile": False},
    "train.deterministic": True,
    "train.on_spike": "ignore",
    "checkpoint": {"every": 1, "keep_last": 2 * STEPS, "best": "loss"},
    "eval": {"every": 0, "sample_every": 0, "suites": ["loss"]},
    "telemetry": {"every": 1, "trackers": []},
    "parallel": {"strategy": "auto", "timeout_seconds": 120, "startup_timeout_seconds": 300},
    **NO_LAYOUT,
    "optim.schedule.warmup": 2,
}
FLOAT64: dict[str, Any] = {"train.precision": "fp64"}
GPT2_SHAPE: dict[str, Any] = {
    "model": {"position": "learned", "norm": "layernorm", "activation": "gelu_tanh"},
    **dict.fromkeys(("model.attn_bias", "model.ff_bias", "model.tie_head"), True),
    **dict.fromkeys(("model.qk_norm", "model.zero_init_output"), False),
}

Outcome = tuple[bool | None, str]  # `passed` and `measured` of a Proof
Task = dict[str, Any]  # see `run_rank`


@dataclass
class Proof:
    """A promise and whether it holds; None: it could not be tried, and `measured` says why."""

    name: str
    claim: str
    passed: bool | None
    measured: str
    seconds: float = 0.0
    untried: list[str] = field(default_factory=list)  # parts of a proof that need more ranks


class Bench:
    """Where the proofs run: a directory, and a tiny recipe or the given one, shortened."""

    def __init__(
        self,
        folder: Path,
        recipe: str = "",
        overrides: Sequence[str] = (),
        worlds: Sequence[int] = (1, 2, 4),
        kills: int = 10,
    ):
        self.folder, self.recipe = folder.resolve(), recipe or "quickstart"
        self.worlds, self.kills = worlds, kills
        self.untried: list[str] = []  # by the proof that runs
        self.base = dotted(COMMON) | {"data.dir": str(self.folder / "data")}
        # One number for all worlds, because threads change bits.
        self.base["train.threads"] = processes.thread_share(max(worlds))
        if not recipe:
            text = self.folder / "text.txt"
            text.write_text(Path(__file__).read_text(encoding="utf-8")[:900], encoding="utf-8")
            self.base |= dotted(TINY) | {"data.source": str(text)}
        self.base |= dotted(overrides)
        self.model = self.settings("model").model

    def settings(self, run: str, **settings: Any) -> Recipe:
        """The base recipe with changes for a run, as `train__micro_batch=4`."""
        changes = {key.replace("__", "."): value for key, value in settings.items()}
        place = {"run.dir": str(self.folder / run)}
        return Recipe.load(self.recipe, self.base | dotted(changes) | place)

    def start(
        self, run: str, world: int, task: Task | None = None, **settings: Any
    ) -> subprocess.Popen[bytes]:
        """Begin to train in `world` processes, which write to RUN.out."""
        recipe = self.folder / f"{run}.toml"
        recipe.write_text(self.settings(run, **settings).toml(), encoding="utf-8")
        task = {"recipe": str(recipe), "world": world, **(task or {})}
        command = [sys.executable, "-m", "windlass.verification", json.dumps(task)]
        env = {**os.environ, processes.PARENT: str(os.getpid())}
        with (self.folder / f"{run}.out").open("ab") as out:
            return subprocess.Popen(
                command, stdout=out, stderr=out, env=env, start_new_session=True
            )

    def train(self, run: str, world: int = 1, task: Task | None = None, **settings: Any) -> Run:
        """Train in this process without output, or for a task or a world in processes of their own.

        Raises RuntimeError with the last lines of processes that fail.
        """
        if world == 1 and task is None:
            with open(os.devnull, "w", encoding="utf-8") as null, contextlib.redirect_stdout(null):
                return windlass.train(self.settings(run, **settings))
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
    """Prove, with real runs on this machine, that nothing is lost or silently wrong.

    A proof that raises an error has failed.

    Args:
        recipe: A recipe to prove, shortened to 12 steps of 8 samples, instead of a tiny one.
        overrides: Settings to change, as `KEY=VALUE`; UserError for a wrong one.
        world: The most ranks; 0: 4 on a CPU, else one for each GPU.
        kills: How often to kill a run that saves.
        directory: Keep the runs of the proofs there.
        show: Called with each result at once.
    """
    import torch

    most = world or (torch.cuda.device_count() if torch.cuda.is_available() else 4)
    results = []
    with tempfile.TemporaryDirectory(prefix="windlass-verify-") as temporary:
        folder = Path(directory or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, recipe or "", overrides, [w for w in (1, 2, 4) if w <= most], kills)
        for name, (claim, prove) in PROOFS.items():
            began, bench.untried = time.monotonic(), []
            try:
                passed, measured = prove(bench)
            except Exception as error:
                passed, measured = False, f"{type(error).__name__}: {error}"
            seconds = time.monotonic() - began
            results.append(Proof(name, claim, passed, measured, seconds, bench.untried))
            show(results[-1])
    return results


def numbers(run: Run) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """The EXACT numbers of each step, and the tensors of the last checkpoint."""
    checkpoint = open_checkpoint(run.checkpoints_dir / f"step-{STEPS:08d}")
    steps = [tuple(line[key] for key in EXACT) for line in run.lines("train")]
    return steps, {name: checkpoint.tensor(name) for name in checkpoint.names()}


def same_bits(run: Run, reference: Run, first: int = 0) -> bool:
    """Whether two runs have equal bits in each step after the `first` ones and at the end."""
    (steps, a), (expected, b) = numbers(run), numbers(reference)
    same = (a[name].dtype == b[name].dtype and bool((a[name] == b[name]).all()) for name in a)
    return steps == expected[first:] and a.keys() == b.keys() and all(same)


def difference(run: Run, reference: Run) -> float:
    """The largest relative difference of losses and gradient norms, and absolute one of weights."""
    (steps, a), (expected, b) = numbers(run), numbers(reference)
    differences = [
        abs(x[i] - y[i]) / max(abs(y[i]), 1e-12)
        for x, y in zip(steps, expected, strict=True)
        for i in (1, 2)  # loss and norm
    ]
    weights = [name for name in b if name.startswith("model/")]
    differences += [float((a[w].double() - b[w].double()).abs().max()) for w in weights]
    return max(differences)


def resume_exact(bench: Bench) -> Outcome:
    """Resume from every step, and after a kill -9 on two ranks."""
    whole, equal = bench.train("whole"), dict[str, bool]()
    for step in range(1, STEPS):
        checkpoint = str(whole.checkpoints_dir / f"step-{step:08d}")
        run = bench.train(f"from-{step}", checkpoint__resume=checkpoint)
        equal[str(step)] = same_bits(run, whole, step)
    tried = "one process"
    if 2 in bench.worlds:
        tried += ", and kill -9 on 2 ranks"
        two = bench.train("two", 2)
        bench.train("two-killed", 2, {"kill_after": STEPS // 2 + 1})
        equal["kill -9 on 2 ranks"] = same_bits(bench.train("two-killed", 2), two)
    else:
        bench.untried.append("kill -9 on 2 ranks (needs 2 ranks)")
    if wrong := [name for name, same in equal.items() if not same]:
        return False, f"losses, norms, weights or optimizer states differ after: {', '.join(wrong)}"
    return True, f"all bits equal ({tried})"


def strategies_agree(bench: Bench) -> Outcome:
    """Each strategy in float64 against one process, with equal micro-batches and dropout."""
    worlds = {"ddp": 2, "shard_optim": 2, "full_shard": 2, "shard_grad_op": 2, "hybrid_shard": 4}
    cells = {strategy: world for strategy, world in worlds.items() if world in bench.worlds}
    if not cells:
        return None, "only one rank is possible here"
    more = {strategy: world for strategy, world in worlds.items() if strategy not in cells}
    bench.untried += [f"{strategy} (needs {world} ranks)" for strategy, world in more.items()]
    reference = bench.train("s-one", **FLOAT64)
    runs = [
        bench.train(f"s-{name}", world, parallel__strategy=name, **FLOAT64)
        for name, world in cells.items()
    ]
    tried = ", ".join(f"{strategy} x {world}" for strategy, world in cells.items())
    if bench.model.kind == "gpt" and not bench.model.init_from:
        sharded: dict[str, Any] = {"parallel.strategy": "full_shard", **FLOAT64}
        runs.append(bench.train("s-module", 2, {"module": True}, **sharded))
        tried += ", your own module with full_shard x 2"
    worst = max(difference(run, reference) for run in runs)
    return worst < ROUNDING, f"{tried}: largest difference {worst:.1e} in float64"


def world_changes_nothing(bench: Bench) -> Outcome:
    """In float64: worlds with dropout and equal micro-batches; any micro-batch without dropout."""
    from windlass.model.build import build_model
    from windlass.training.checks import uses_dropout

    library, recipe = bench.model.kind != "gpt", bench.settings("model")
    differences, parts = list[float](), list[str]()
    if worlds := [w for w in bench.worlds if w > 1 and BATCH % (w * MICRO) == 0]:
        reference = bench.train("w-one", **FLOAT64)
        differences += [difference(bench.train(f"w-{w}", w, **FLOAT64), reference) for w in worlds]
        dropout = f"dropout {bench.model.dropout:g}"
        dropout = "the dropout of its configuration" if library else dropout
        parts.append(f"{len(worlds) + 1} worlds with micro-batch {MICRO} and {dropout}")
    # Only its own configuration can set the dropout of a library's model.
    if not (library and uses_dropout(build_model(recipe, open_data(recipe).vocab, "meta"))):
        even = FLOAT64 if library else FLOAT64 | {"model.dropout": 0.0}

        def run(world: int, micro: int) -> Run:
            return bench.train(f"w-{world}-{micro}", world, **even, train__micro_batch=micro)

        divisions = [(1, micro) for micro in (1, 2, 4)]
        divisions += [(w, micro) for w in bench.worlds[1:] for micro in sorted({1, BATCH // w})]
        reference = run(1, BATCH)
        differences += [difference(run(*division), reference) for division in divisions]
        parts.append(f"{len(divisions) + 1} divisions without dropout")
    if not parts:
        reason = "one rank, and other micro-batches draw other dropout masks"
        return None, f"{reason}: set the configuration's dropout to 0"
    worst = max(differences)
    return worst < ROUNDING, f"{'; '.join(parts)}: largest difference {worst:.1e} in float64"


def sequence_whole(bench: Bench) -> Outcome:
    """A run that moves over worlds reads every sample once, in the defined order."""
    worlds = [1, 2, 4, 1] if 4 in bench.worlds else [1, 2, 1, 2] if 2 in bench.worlds else [1] * 4
    steps, read = STEPS // len(worlds), list[int]()
    for part, world in enumerate(worlds):
        record = str(bench.folder / f"reads-{part}")
        task = {"stop_at": steps * (part + 1), "record": record}
        bench.train("moving", world, task, train__micro_batch=1)
        ranks = [json.loads(Path(f"{record}-{rank}.json").read_text()) for rank in range(world)]
        # The loader reads ahead: only the samples of steps that were done count.
        turns = list(zip(*ranks, strict=False))[: steps * BATCH // world]
        read += [micro[0] for turn in turns for micro in turn]
    recipe = bench.settings("moving")
    samples, seed = len(open_data(recipe).train), recipe.run.seed
    places = (divmod(number, samples) for number in range(STEPS * BATCH))
    expected = [int(Order(recipe.data.order, seed, epoch, samples)[i]) for epoch, i in places]
    epochs = [read[i : i + samples] for i in range(0, len(read), samples)]
    repeats = sum(len(epoch) - len(set(epoch)) for epoch in epochs)
    text = f"{len(read)} samples over worlds {' -> '.join(map(str, worlds))}: {repeats} repeated"
    return not repeats and read == expected, f"{text}, order as defined: {read == expected}"


def kills_lose_nothing(bench: Bench) -> Outcome:
    """SIGKILL at random moments of saving; each committed checkpoint or a later one stays good."""
    run, draw = bench.folder / "killed", random.Random(0)
    worlds = bench.worlds[: min(2, bench.kills)]
    endless: dict[str, Any] = {"train.steps": 10_000, "checkpoint.keep_last": 2}
    committed = lost = finished = 0
    for number in range(bench.kills):
        process = bench.start("killed", worlds[number % len(worlds)], **endless)
        until, newest = time.monotonic() + 120, committed
        while newest == committed and process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
            saved = (run / "checkpoints").glob("step-????????")
            newest = max((int(path.name[5:]) for path in saved), default=0)
        time.sleep(draw.random() * 0.2)
        finished += process.poll() == 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        choice = choose_checkpoint(run) if (run / "checkpoints").is_dir() else None
        step = choice.step if choice else 0
        lost += bool(choice and choice.notes) or step < committed
        committed = step
    ranks = " or ".join(map(str, worlds))
    kills = f"{plural(bench.kills, 'kill')} -9"
    text = f"{kills} of a run on {ranks} ranks that saves at every step"
    return lost == 0 and committed > 0 and not finished, f"{text}: {lost} lost, newest {committed}"


def export_equal(bench: Bench) -> Outcome:
    """The logits in transformers, of a GPT-2-shaped model or of the recipe's own."""
    if not installed("transformers"):
        return None, needs("transformers")
    import torch
    import transformers

    from windlass.evaluation.source import alone, find_source, open_model
    from windlass.interop.export import export

    given = bench.model.kind != "gpt" or bool(bench.model.init_from)
    run = bench.train("export", train__steps=3, **({} if given else GPT2_SHAPE))
    transformers.utils.logging.disable_progress_bar()
    export(str(run.path), folder := bench.folder / "hf")
    load = transformers.AutoModelForCausalLM.from_pretrained
    exported = load(folder, trust_remote_code=True).eval()
    ours = open_model(find_source(str(run.path)), alone("cpu"))
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        worst = float((ours(tokens) - exported(tokens).logits).abs().max())
    name = type(exported).__name__ if given else "GPT-2 shape"
    return worst < 1e-5, f"{name}, largest difference of a logit {worst:.1e}"


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


def run_rank(task: Task) -> None:
    """One rank of a training of a proof. The task has the `recipe`'s file and the `world`.

    It may have `stop_at`, a step; `kill_after`, a step; `module`: give `train` the model as a
    user's own module; `record`: write the indices of the samples of each micro-batch to
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
    processes.exit_with_parent()
    task = json.loads(sys.argv[1])
    if task["world"] > 1 and "RANK" not in os.environ:
        command = [sys.executable, "-m", "windlass.verification", sys.argv[1]]
        sys.exit(launch(command, task["world"]))
    run_rank(task)
