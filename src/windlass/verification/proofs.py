"""The proofs: real trainings try each promise."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from windlass.checkpoint.choose import choose_checkpoint
from windlass.checkpoint.format import open_checkpoint
from windlass.errors import UserError, first_line, installed, needs, plural
from windlass.run import Run
from windlass.verification.bench import BATCH, MICRO, STEPS, Bench, Settings, wait

FLOAT64 = {"train.precision": "fp64"}
ROUNDING = 1e-9  # the largest difference in float64 that counts as rounding

EXACT = ("step", "loss", "grad_norm", "lr", "tokens", "samples")
STRATEGIES = {"ddp": 2, "shard_optim": 2, "full_shard": 2, "shard_grad_op": 2, "hybrid_shard": 4}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"tp 2": {"tensor": 2}, "cp 2": {"context": 2}, "pp 2": {"pipeline": 2}},
    4: {
        "tp 2, full_shard": {"tensor": 2, "strategy": "full_shard"},
        "tp 2, cp 2": {"tensor": 2, "context": 2},
        "cp 2, shard_optim": {"context": 2, "strategy": "shard_optim"},
        "pp 2, ddp": {"pipeline": 2},
        "pp 2, tp 2": {"pipeline": 2, "tensor": 2},
    },
    8: {
        "tp 2, cp 2, full_shard": {"tensor": 2, "context": 2, "strategy": "full_shard"},
        "pp 2, tp 2, full_shard": {"pipeline": 2, "tensor": 2, "strategy": "full_shard"},
        "pp 2, tp 2, cp 2": {"pipeline": 2, "tensor": 2, "context": 2},
    },
}
"""By the number of ranks: what divides the model; the rest of the ranks is data parallel."""
GPT2_SHAPE: dict[str, Any] = {
    "model": {"position": "learned", "norm": "layernorm", "activation": "gelu_tanh"},
    **dict.fromkeys(("model.attn_bias", "model.ff_bias", "model.tie_head"), True),
    **dict.fromkeys(("model.qk_norm", "model.zero_init_output"), False),
}


class Outcome(NamedTuple):
    """Whether a promise holds; None: it could not be tried, and `measured` has the reason."""

    passed: bool | None
    measured: str
    untried: Sequence[str] = ()  # parts of the proof that were not tried, with the reasons


def resume_exact(bench: Bench) -> Outcome:
    """Resume from every step, and after a kill -9 on two ranks."""
    whole, equal = bench.train("whole"), dict[str, bool]()
    for step in range(1, STEPS):
        run = bench.train(f"from-{step}", branch_from=f"{whole.path}@{step}")
        equal[str(step)] = same_bits(run, whole, step)
    tried, untried = "one process", list[str]()
    if 2 in bench.worlds:
        tried += ", and kill -9 on 2 ranks"
        wait(bench.start("two-killed", world=2, kill_after=STEPS // 2 + 1))
        killed = bench.train("two-killed", world=2)
        two = bench.train("two", world=2)
        resumed = [event["step"] for event in killed.events if event["event"] == "resumed"]
        equal["kill -9 on 2 ranks"] = any(resumed) and same_bits(killed, two)
    else:
        untried.append("kill -9 on 2 ranks (needs 2 ranks)")
    if wrong := [name for name, same in equal.items() if not same]:
        differ = "losses, norms, weights or optimizer states differ after: "
        return Outcome(False, differ + ", ".join(wrong), untried)
    return Outcome(True, f"all bits equal ({tried})", untried)


def same_bits(run: Run, reference: Run, first: int = 0) -> bool:
    """Whether two runs have equal bits in each step after the `first` ones and at the end."""
    (steps, a), (expected, b) = numbers(run), numbers(reference)
    same = (a[name].dtype == b[name].dtype and bool((a[name] == b[name]).all()) for name in a)
    return steps == expected[first:] and a.keys() == b.keys() and all(same)


def numbers(run: Run) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """The EXACT numbers of each step, and the tensors of the last checkpoint."""
    checkpoint = open_checkpoint(run.checkpoints_dir / f"step-{STEPS:08d}")
    steps = [tuple(line[key] for key in EXACT) for line in run.lines("train")]
    return steps, {name: checkpoint.tensor(name) for name in checkpoint.names()}


class Cell(NamedTuple):
    """A training in float64, and the run that it must equal up to rounding."""

    run: str
    world: int
    settings: Settings
    reference: str


def strategies_agree(bench: Bench) -> Outcome:
    """Each strategy in float64 against one process, with equal micro-batches and dropout."""
    cells, untried = [Cell("s-one", 1, FLOAT64, "s-one")], list[str]()
    for strategy, world in STRATEGIES.items():
        if world in bench.worlds:
            settings = {"parallel.strategy": strategy, **FLOAT64}
            cells.append(Cell(f"s-{strategy}", world, settings, "s-one"))
        else:
            untried.append(f"{strategy} (needs {world} ranks)")
    if len(cells) == 1:
        return Outcome(None, "only one rank is possible here", untried)
    tried = [f"{cell.run.removeprefix('s-')} x {cell.world}" for cell in cells[1:]]
    return agree(bench, cells, ", ".join(tried), untried)


def layouts_agree(bench: Bench) -> Outcome:
    """Layouts with tensor, context and pipeline parallelism in float64 against one process."""
    if bench.model.kind != "gpt":
        return Outcome(None, "the proof divides Windlass's own GPT only")
    once = {"checkpoint.every": STEPS, "checkpoint.keep_every": 0, **FLOAT64}
    cells, tried, untried = [Cell("l-one", 1, once, "l-one")], list[str](), list[str]()
    for world, layouts in LAYOUTS.items():
        for name, layout in layouts.items():
            run = f"l-{world}-{name.replace(', ', '-').replace(' ', '')}"
            settings = {f"parallel.{key}": value for key, value in layout.items()} | once
            try:
                if world > bench.most:
                    raise UserError(f"needs {world} ranks")
                bench.settings(run, settings).batch(world)
            except UserError as error:
                untried.append(f"{name} on {world} ranks ({first_line(error)})")
                continue
            cells.append(Cell(run, world, settings, "l-one"))
            tried.append(f"{name} x {world}")
    if not tried:
        return Outcome(None, "no layout divides this model on these ranks", untried)
    return agree(bench, cells, "; ".join(tried), untried)


def world_changes_nothing(bench: Bench) -> Outcome:
    """In float64: worlds with dropout and equal micro-batches; any micro-batch without dropout."""
    library = bench.model.kind != "gpt"
    cells, tried = list[Cell](), list[str]()
    if worlds := [w for w in bench.worlds if w > 1 and BATCH % (w * MICRO) == 0]:
        cells += [Cell(f"w-{world}", world, FLOAT64, "w-1") for world in (1, *worlds)]
        dropout = f"dropout {bench.model.dropout:g}"
        dropout = "the dropout of its configuration" if library else dropout
        tried.append(f"{len(worlds) + 1} worlds with micro-batch {MICRO} and {dropout}")
    if not library:  # only its own configuration can set the dropout of a library's model
        divisions = [(1, micro) for micro in (1, 2, 4, BATCH)]
        divisions += [(w, micro) for w in bench.worlds[1:] for micro in sorted({1, BATCH // w})]
        for world, micro in divisions:
            settings = FLOAT64 | {"model.dropout": 0.0, "train.micro_batch": micro}
            cells.append(Cell(f"w-{world}-{micro}", world, settings, f"w-1-{BATCH}"))
        tried.append(f"{len(divisions)} divisions without dropout")
    if not tried:
        return Outcome(None, "only one rank is possible here, and the model may have dropout")
    return agree(bench, cells, "; ".join(tried))


def agree(bench: Bench, cells: Sequence[Cell], tried: str, untried: Sequence[str] = ()) -> Outcome:
    """Train the cells and compare each with its reference."""
    runs = {cell.run: bench.train(cell.run, cell.settings, cell.world) for cell in cells}
    worst = max(difference(runs[cell.run], runs[cell.reference]) for cell in cells)
    measured = f"{tried}: largest difference {worst:.1e} in float64"
    return Outcome(worst < ROUNDING, measured, untried)


def difference(run: Run, reference: Run) -> float:
    """The largest relative difference of losses and gradient norms, and absolute one of weights.

    A resumed run is compared from its first step on.
    """
    (steps, a), (expected, b) = numbers(run), numbers(reference)
    differences = [
        abs(x[i] - y[i]) / max(abs(y[i]), 1e-12)
        for x, y in zip(steps, expected[-len(steps) :], strict=True)
        for i in (1, 2)  # loss and norm
    ]
    weights = [name for name in b if name.startswith("model/")]
    differences += [float((a[w].double() - b[w].double()).abs().max()) for w in weights]
    return max(differences)


def kills_lose_nothing(bench: Bench) -> Outcome:
    """SIGKILL at random moments of saving; each committed checkpoint or a later one stays good."""
    run, draw = bench.folder / "killed", random.Random(0)
    worlds = bench.worlds[: min(2, bench.kills)]
    endless = {"train.steps": 10_000, "checkpoint.keep_last": 2}
    committed = lost = 0
    for number in range(bench.kills):
        ranks = bench.start("killed", endless, worlds[number % len(worlds)])
        until, newest = time.monotonic() + 120, committed
        while newest == committed and time.monotonic() < until and ranks[0].is_alive():
            time.sleep(0.005)
            saved = (run / "checkpoints").glob("step-????????")
            newest = max((int(path.name[5:]) for path in saved), default=0)
        time.sleep(draw.random() * 0.2)
        for rank in ranks:
            rank.kill()
        if any(code != -signal.SIGKILL for code in wait(ranks)):
            ended = f"a training ended before it was killed:\n{bench.tail('killed')}"
            return Outcome(False, ended)
        choice = choose_checkpoint(run) if (run / "checkpoints").is_dir() else None
        step = choice.step if choice else 0
        lost += bool(choice and choice.notes) or step < committed
        committed = step
    sizes = " or ".join(map(str, worlds))
    text = f"{plural(bench.kills, 'kill')} -9 of a run on {sizes} ranks that saves at every step"
    return Outcome(lost == 0 and committed > 0, f"{text}: {lost} lost, newest {committed}")


def export_equal(bench: Bench) -> Outcome:
    """The logits in transformers, of a GPT-2-shaped model or of the recipe's own."""
    if not installed("transformers"):
        return Outcome(None, needs("transformers"))
    import torch
    import transformers

    from windlass.evaluation.source import find_source, open_model
    from windlass.interop.export import export
    from windlass.parallel.ranks import alone

    given = bench.model.kind != "gpt" or bool(bench.model.init_from)
    run = bench.train("export", {"train.steps": 3, **({} if given else GPT2_SHAPE)})
    transformers.utils.logging.disable_progress_bar()
    export(str(run.path), folder := bench.folder / "hf")
    load = transformers.AutoModelForCausalLM.from_pretrained
    exported = load(folder, trust_remote_code=True).eval()
    ours = open_model(find_source(str(run.path)), alone("cpu"))
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        worst = float((ours(tokens) - exported(tokens).logits).abs().max())
    name = type(exported).__name__ if given else "GPT-2 shape"
    return Outcome(worst < 1e-5, f"{name}, largest difference of a logit {worst:.1e}")


PROOFS: dict[str, tuple[str, Callable[[Bench], Outcome]]] = {
    "resume": (f"resume is bit-exact at every step of {STEPS}", resume_exact),
    "strategies": ("strategies agree with one process", strategies_agree),
    "layouts": ("tensor, context and pipeline parallelism agree with one process", layouts_agree),
    "world": (
        "world size, micro-batch and accumulation change nothing but rounding",
        world_changes_nothing,
    ),
    "kills": ("no kill loses a committed checkpoint", kills_lose_nothing),
    "export": ("export to transformers gives equal logits", export_equal),
}
