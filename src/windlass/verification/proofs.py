"""The proofs: real trainings try each promise, and each proof is tried on an injected error."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from windlass.checkpoint.choose import choose_checkpoint
from windlass.checkpoint.format import open_checkpoint
from windlass.errors import UserError, first_line, installed, needs, plural
from windlass.run import Run
from windlass.verification.bench import BATCH, FLOAT64, MICRO, ROUNDING, STEPS, Bench, Outcome

EXACT = ("step", "loss", "grad_norm", "lr", "tokens", "samples")

GPT2_SHAPE: dict[str, Any] = {
    "model": {"position": "learned", "norm": "layernorm", "activation": "gelu_tanh"},
    **dict.fromkeys(("model.attn_bias", "model.ff_bias", "model.tie_head"), True),
    **dict.fromkeys(("model.qk_norm", "model.zero_init_output"), False),
}


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
FAULTS = {"tp 2": "norms", "cp 2": "labels", "pp 2": "clipping"}  # of `rank.FAULTS`, by layout
SEEN, UNSEEN = "; an injected error was seen", "the proof did not see an injected error: "
OWN_COUNT = "each rank divides by its own number of labels"


def numbers(run: Run, spoil: bool = False) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """The EXACT numbers of each step, and the tensors of the last checkpoint.

    `spoil` changes the last bit of one element of the last tensor.
    """
    checkpoint = open_checkpoint(run.checkpoints_dir / f"step-{STEPS:08d}")
    steps = [tuple(line[key] for key in EXACT) for line in run.lines("train")]
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    if spoil:
        name, tensor = max(tensors.items())
        flat = tensor.flatten().numpy()
        flat[-1] = np.nextafter(flat[-1], np.inf)
        tensors[name] = tensor.new_tensor(flat).view_as(tensor)
    return steps, tensors


def same_bits(run: Run, reference: Run, first: int = 0, spoil: bool = False) -> bool:
    """Whether two runs have equal bits in each step after the `first` ones and at the end."""
    (steps, a), (expected, b) = numbers(run, spoil), numbers(reference)
    same = (a[name].dtype == b[name].dtype and bool((a[name] == b[name]).all()) for name in a)
    return steps == expected[first:] and a.keys() == b.keys() and all(same)


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


def resume_exact(bench: Bench) -> Outcome:
    """Resume from every step, and after a kill -9 on two ranks."""
    whole, equal = bench.train("whole"), dict[str, bool]()
    for step in range(1, STEPS):
        run = bench.train(f"from-{step}", branch_from=f"{whole.path}@{step}")
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
    if same_bits(whole, whole, spoil=True):
        return False, f"{UNSEEN}one bit of one optimizer state"
    return True, f"all bits equal ({tried}){SEEN}"


def within_rounding(text: str, differences: list[float], faulty: Mapping[str, float]) -> Outcome:
    """The outcome of differences in float64, and of the differences with injected errors."""
    worst = max(differences)
    if unseen := [fault for fault, found in faulty.items() if found < 1e3 * ROUNDING]:
        return False, UNSEEN + ", ".join(unseen)
    seen = f"; with injected errors {min(faulty.values()):.1e} or more" if faulty else ""
    return worst < ROUNDING, f"{text}: largest difference {worst:.1e} in float64{seen}"


def strategies_agree(bench: Bench) -> Outcome:
    """Each strategy in float64 against one process, with equal micro-batches and dropout."""
    worlds = {"ddp": 2, "shard_optim": 2, "full_shard": 2, "shard_grad_op": 2, "hybrid_shard": 4}
    cells = {strategy: world for strategy, world in worlds.items() if world in bench.worlds}
    if not cells:
        return None, "only one rank is possible here"
    more = {strategy: world for strategy, world in worlds.items() if strategy not in cells}
    bench.untried += [f"{strategy} (needs {world} ranks)" for strategy, world in more.items()]
    reference = bench.train("s-one", **FLOAT64)
    runs, faulty = list[Run](), dict[str, float]()
    for world in sorted(set(cells.values())):
        names = {f"s-{name}": name for name in cells if cells[name] == world}
        faults = {"s-wrong": "own count"} if world == 2 else {}
        names |= dict.fromkeys(faults, "ddp")
        trainings = {run: {"parallel.strategy": name, **FLOAT64} for run, name in names.items()}
        of_world = bench.train_all(trainings, world, faults)
        if faults:
            faulty[OWN_COUNT] = difference(of_world.pop(), reference)
        runs += of_world
    tried = ", ".join(f"{strategy} x {world}" for strategy, world in cells.items())
    return within_rounding(tried, [difference(run, reference) for run in runs], faulty)


def layouts_agree(bench: Bench) -> Outcome:
    """Layouts with tensor, context and pipeline parallelism in float64 against one process."""
    if bench.model.kind != "gpt":
        return None, "the proof divides Windlass's own GPT only"
    once = {"checkpoint.every": STEPS, "checkpoint.keep_every": 0, **FLOAT64}
    reference, names = bench.train("l-one", **once), list[str]()
    differences, faulty = list[float](), dict[str, float]()
    for world, layouts in LAYOUTS.items():
        runs, faults = dict[str, dict[str, Any]](), dict[str, str]()
        for name, layout in layouts.items():
            run = f"l-{world}-{name.replace(', ', '-').replace(' ', '')}"
            settings = {f"parallel.{key}": value for key, value in layout.items()} | once
            try:
                if world > bench.most:
                    raise UserError(f"needs {world} ranks")
                bench.settings(run, **settings).batch(world)
            except UserError as error:
                bench.untried.append(f"{name} on {world} ranks ({first_line(error)})")
                continue
            runs[run] = settings
            names.append(f"{name} x {world}")
            if world == 2 and name in FAULTS:
                faults[f"{run}-wrong"] = FAULTS[name]
                runs[f"{run}-wrong"] = settings
        for run, trained in zip(runs, bench.train_all(runs, world, faults), strict=True):
            found = difference(trained, reference)
            if fault := faults.get(run):
                faulty[fault] = found
            else:
                differences.append(found)
    if not differences:
        return None, "no layout divides this model on these ranks"
    return within_rounding("; ".join(names), differences, faulty)


def world_changes_nothing(bench: Bench) -> Outcome:
    """In float64: worlds with dropout and equal micro-batches; any micro-batch without dropout."""
    library = bench.model.kind != "gpt"
    parts, cells = list[str](), list[tuple[str, int, dict[str, Any], str]]()
    if worlds := [w for w in bench.worlds if w > 1 and BATCH % (w * MICRO) == 0]:
        cells = [(f"w-{w}", w, FLOAT64, "w-1") for w in (1, *worlds)]
        dropout = f"dropout {bench.model.dropout:g}"
        dropout = "the dropout of its configuration" if library else dropout
        parts.append(f"{len(worlds) + 1} worlds with micro-batch {MICRO} and {dropout}")
    if not library:  # only its own configuration can set the dropout of a library's model
        even = FLOAT64 | {"model.dropout": 0.0}
        divisions = [(1, micro) for micro in (1, 2, 4, BATCH)]
        divisions += [(w, micro) for w in bench.worlds[1:] for micro in sorted({1, BATCH // w})]
        for world, micro in divisions:
            settings = even | {"train.micro_batch": micro}
            cells.append((f"w-{world}-{micro}", world, settings, f"w-1-{BATCH}"))
        parts.append(f"{len(divisions)} divisions without dropout")
    if not parts:
        return None, "only one rank is possible here, and the model may have dropout"
    runs, wrong = dict[str, Run](), dict[str, float]()
    for world in sorted({world for _, world, _, _ in cells}):
        trainings = {name: settings for name, of, settings, _ in cells if of == world}
        faults = {}
        if world == 2:  # once more the first of them, with an error
            faults, trainings["w-wrong"] = {"w-wrong": "own count"}, next(iter(trainings.values()))
        runs |= dict(zip(trainings, bench.train_all(trainings, world, faults), strict=True))
    if "w-wrong" in runs:
        reference = next(of for _, world, _, of in cells if world == 2)
        wrong[OWN_COUNT] = difference(runs.pop("w-wrong"), runs[reference])
    differences = [difference(runs[name], runs[of]) for name, _, _, of in cells]
    return within_rounding("; ".join(parts), differences, wrong)


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
    for path in (run / "checkpoints" / f"step-{committed:08d}").glob("*.safetensors"):
        os.truncate(path, path.stat().st_size - 1)
    with contextlib.suppress(UserError):  # the damaged checkpoint may be the only one
        newest_good = choose_checkpoint(run)
        if newest_good is not None and not newest_good.notes:
            return False, f"{UNSEEN}a checkpoint without its last byte"
    ranks = " or ".join(map(str, worlds))
    text = f"{plural(bench.kills, 'kill')} -9 of a run on {ranks} ranks that saves at every step"
    passed = lost == 0 and committed > 0 and not finished
    return passed, f"{text}: {lost} lost, newest {committed}{SEEN}"


def export_equal(bench: Bench) -> Outcome:
    """The logits in transformers, of a GPT-2-shaped model or of the recipe's own."""
    if not installed("transformers"):
        return None, needs("transformers")
    import torch
    import transformers

    from windlass.evaluation.source import find_source, open_model
    from windlass.interop.export import export
    from windlass.parallel.dist import alone

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
        next(exported.parameters())[0, 0] += 1e-2
        wrong = float((ours(tokens) - exported(tokens).logits).abs().max())
    if wrong < 1e-5:
        return False, f"{UNSEEN}one weight that differs by 0.01"
    name = type(exported).__name__ if given else "GPT-2 shape"
    return worst < 1e-5, f"{name}, largest difference of a logit {worst:.1e}{SEEN}"


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
