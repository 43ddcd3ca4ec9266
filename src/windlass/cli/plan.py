"""`windlass plan`: what a run will take, before a penny is spent; and what is left of a live one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from windlass.estimate.devices import Device
    from windlass.estimate.plan import Facts, Setting
    from windlass.estimate.time import Speed
    from windlass.model.size import HfSizes
    from windlass.recipe import Horizon, Recipe
    from windlass.run import Run


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("plan")(plan)


def plan(
    recipe: str = typer.Argument("", metavar="[RECIPE|RUN]", help="A preset's name, a .toml file or a run directory."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Settings to change, as optim.lr=3e-4."),
    world: int = typer.Option(0, min=0, help="Ranks; default: 1, or those of the run."),
    device: str = typer.Option("", metavar="NAME", help="A kind of device, as A100-80GB; default: this machine's."),
    memory: float = typer.Option(0.0, min=0, metavar="GB", help="Memory of the device, where it is not in the table."),
    mfu: float = typer.Option(0.4, min=0.001, max=1, help="Share of the peak to assume where nothing was measured."),
    from_: list[str] = typer.Option([], "--from", metavar="RUN|STUDY", help="Take the speed from past runs' ledgers."),
    measure: bool = typer.Option(False, "--measure", help="Make a few real steps here, and take the speed from them."),
    compute: float = typer.Option(0.0, metavar="FLOPS", help="Which N and D a budget of so many FLOPs buys."),
    fit_scaling: str = typer.Option("", metavar="STUDY", help="Fit a loss law to a study of several sizes."),
    schedule_plot: str = typer.Option("", metavar="FILE", help="Draw the learning rate over the run into a PNG."),
    json_: bool = typer.Option(False, "--json", help="Print everything as JSON: bytes, seconds, tokens a second."),
) -> None:
    """Say what a run needs: parameters, steps, FLOPs, memory for each strategy, time, disk, and what happens when.

    All of it is arithmetic from the recipe, and takes no torch. A Hugging Face model is counted from its configuration on
    torch's meta device, without its weights. Time comes from a measured speed (--from, --measure, or the
    recipe's own run directory) or from the device's published peak and an assumed MFU; the table says which. A run
    directory gives the plan of what is left of it, by its own ledger.
    """
    from windlass.errors import UserError

    if not (recipe or compute or fit_scaling):
        raise UserError("name a recipe or a run, for example `windlass plan c4-30m --world 4 --device A100-80GB`")
    out: dict[str, Any] = {}
    shown: list[Any] = []
    if compute:
        _compute(compute, out, shown)
    setting = None
    if recipe:
        room = int(memory * 1e9) or None
        setting, speeds, horizon, live = _open(recipe, overrides or [], world, device, room, from_, measure, mfu)
        prepare_command = shlex.join(["windlass", "prepare", recipe, *(overrides or [])])
        _plan(setting, speeds, horizon, live, prepare_command, out, shown)
        if schedule_plot:
            _draw(setting, horizon, schedule_plot)
    if fit_scaling:
        _fit(fit_scaling, setting, out, shown)
    if json_:
        typer.echo(json.dumps(out, indent=1))
    else:
        from rich.console import Console

        from windlass.reports.plan import show

        show(shown, Console(highlight=False))


def _open(
    name: str,
    overrides: list[str],
    world: int,
    device: str,
    room: int | None,
    from_: list[str],
    measured: bool,
    mfu: float,
) -> tuple[Setting, list[Speed], Horizon | None, Run | None]:
    """What the plan is for, the speeds that are known, and the run where there is one to go on with."""
    from windlass.errors import UserError
    from windlass.estimate.optimum import vocab_of
    from windlass.estimate.plan import Facts, Setting
    from windlass.estimate.speeds import device_of
    from windlass.recipe import Horizon, Recipe
    from windlass.run import Run

    live = Run(Path(name)) if (Path(name) / "recipe.toml").is_file() and not overrides else None
    if live is None:
        _refuse_foreign(name)
    loaded = Recipe.load(name, overrides)
    facts, started, horizon, done = _facts(loaded) if live is None else Facts(), {}, None, 0
    if live is not None:
        started = next((e for e in reversed(live.events) if "world" in e), {})
        if not started:
            live, facts = None, _facts(loaded)
        else:
            train = live.lines("train")
            done = train[-1]["step"] if train else int(started["step"])
            samples = int(started.get("samples_per_epoch", 0))
            per_sample = train[-1]["tokens"] / train[-1]["samples"] if train and train[-1].get("samples") else None
            vocab = vocab_of(loaded, int(started["parameters"]) if "parameters" in started else None)
            facts = Facts(vocab, samples, per_sample)
            horizon = Horizon(int(started["steps"]), samples, loaded.train.global_batch)
    ranks = world or int(started.get("world", 1))
    past = _past(from_)
    of_run = str(started.get("device", ""))
    if past and not (device or of_run or measured):
        of_run = device_of([speed for _, runs in past for _, speed in runs], f"--from {' '.join(from_)}")
    where = _device(loaded, device, room, ranks, of_run if not device else "")
    loaded.batch(ranks, where.kind)  # a UserError where the batch cannot be dealt out
    if loaded.strategy(ranks) == "single" and ranks > 1:
        raise UserError(
            f'parallel.strategy = "single" is for one rank, and the plan is for {ranks}; use "auto" or "ddp"'
        )
    precision = str(started["precision"]) if "precision" in started and not device else _precision(loaded, where)
    hf, why = _hf_sizes(loaded) if loaded.model.kind == "hf" else (None, "")
    setting = Setting(loaded, ranks, where, precision, facts, done, hf, why)
    prepare_command = shlex.join(["windlass", "prepare", name, *overrides]) if measured else ""
    return setting, _speeds(setting, live, past, prepare_command, mfu, bool(device)), horizon, live


def _refuse_foreign(name: str) -> None:
    """A UserError for a directory that is no run and a file that is no recipe, with what it is as far as that shows."""
    from windlass.errors import UserError
    from windlass.recipe import presets

    path = Path(name)
    known = name in presets() or not path.exists() or (path / "recipe.toml").is_file()
    if known or (path.is_file() and path.suffix in ("", ".toml")):
        return
    if (path / "config.json").is_file() or path.name == "config.json":
        model = path if path.is_dir() else path.parent
        raise UserError(
            f"{name} is of a model and no recipe; a recipe names it: "
            f"`windlass plan bloom-560m-squad model.name={model} data.tokenizer=hf:{model}`"
        )
    if path.is_dir():
        raise UserError(f"{name} is no run: it has no recipe.toml; `windlass runs` lists the runs")
    raise UserError(f"{name} is no recipe: recipes are .toml files; `windlass recipe --list` shows the presets")


def _hf_sizes(recipe: Recipe) -> tuple[HfSizes | None, str]:
    """The sizes of a Hugging Face model; or why they are not known: the rest of the plan comes all the same."""
    from windlass.errors import UserError

    try:
        from windlass.model.hf_size import read_sizes

        return read_sizes(recipe), ""
    except ImportError as error:
        return None, f"A Hugging Face model is counted with the package {error.name}: install windlass[hf]."
    except UserError as error:
        return None, f"Parameters, FLOPs and memory are not known. {error}."


def _facts(recipe: Recipe) -> Facts:
    """What the prepared data know, where there are any, or what is known of a public corpus."""
    from windlass.data.prepare import find_prepared
    from windlass.estimate.known import known_facts
    from windlass.estimate.plan import Facts

    prepared = find_prepared(recipe)
    if prepared is None:
        return known_facts(recipe)
    from windlass.data.dataset import open_samples

    samples: Any = open_samples(recipe, prepared)[0]
    return Facts(prepared.vocab, len(samples), samples.sample_tokens())


def _device(recipe: Recipe, name: str, room: int | None, ranks: int, of_run: str) -> Device:
    """The device that was named, that of a run, or this machine's; ranks on a CPU share its memory."""
    from windlass.estimate.devices import Device, find_device

    name = name or of_run
    if name and name.lower() != "cpu":
        return find_device(name, room)
    if not name and recipe.parallel.device != "cpu":
        here = _gpu()
        if here is not None:
            return Device(here[0], "cuda", room or here[1])
    import psutil

    return Device("CPU", "cpu", room or psutil.virtual_memory().total // ranks)


def _gpu() -> tuple[str, int] | None:
    """Name and memory of this machine's first NVIDIA device, without torch; None where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = pynvml.nvmlDeviceGetName(handle)
        return (name if isinstance(name, str) else name.decode()), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except Exception:  # no driver, no device, or a driver that does not answer: then there is none to plan for
        return None


def _precision(recipe: Recipe, device: Device) -> str:
    """`auto` as training would resolve it: bf16 on GPUs that have it, else fp16; fp32 on a CPU."""
    from windlass.estimate.devices import low_precision

    wanted = recipe.train.precision
    return wanted if wanted != "auto" else low_precision(device) or "fp32"


def _speeds(
    setting: Setting,
    live: Run | None,
    past: list[tuple[str, list[tuple[Run, Speed]]]],
    measure_for: str,
    mfu: float,
    device_named: bool,
) -> list[Speed]:
    """Measured speeds, or else one assumed from the device's peak, or none.

    `measure_for`: the command that prepares the data, where a few real steps are to be made here; empty: none are.
    """
    from windlass.estimate.speeds import assumed, on_device, own_speed, scaled

    found: list[Speed] = []
    for place, runs in past:
        here = on_device(runs, setting.device, f"--from {place}")
        found += [scaled(setting, run, speed) for run, speed in here]
    if measure_for:
        found.append(_measure(setting, measure_for))
    if live is not None and not found:
        found = own_speed(setting, live.path)
    if not found and not device_named:
        found = own_speed(setting, setting.recipe.run_dir)
    return found or assumed(setting, mfu)


def _past(places: list[str]) -> list[tuple[str, list[tuple[Run, Speed]]]]:
    """The runs behind each `--from`, with their speeds."""
    from windlass.errors import UserError
    from windlass.estimate.speeds import past_speeds

    found = [(place, past_speeds(_runs_in(place))) for place in places]
    for place, runs in found:
        if not runs:
            raise UserError(f"--from {place}: there is no run with logged steps in it")
    return found


def _runs_in(place: str) -> list[Run]:
    """The run at a path, or those of a study."""
    from windlass.errors import UserError
    from windlass.run import Run
    from windlass.study.study import Study

    if Study.is_study(place):
        return Study.open(place).runs()
    if (Path(place) / "recipe.toml").is_file():
        return [Run(Path(place))]
    found = [Run(path.parent) for path in sorted(Path(place).glob("*/recipe.toml"))] if Path(place).is_dir() else []
    if not found:
        raise UserError(f"{place} is neither a run nor a directory of runs")
    return found


def _measure(setting: Setting, prepare_command: str) -> Speed:
    """A few real steps on this machine, if it is what the plan is for; data that are missing are prepared, and it is said."""
    from windlass.data.prepare import prepare
    from windlass.errors import UserError
    from windlass.estimate.speeds import same_device
    from windlass.study.measure import STEPS, measure

    recipe, wanted = setting.recipe, setting.device
    gpu = _gpu() if wanted.kind != "cpu" else None
    here = gpu[0] if gpu else "CPU"
    if not same_device(here, wanted.name):
        raise UserError(
            f"--measure makes its steps here, on {here}, and the plan is for {wanted.name}: leave --device out, or take the "
            "speed of a run that was made there, with --from RUN"
        )
    if not _prepared(recipe):
        source = recipe.data.source
        if source == "squad" or source.startswith(("hf:", "http://", "https://")):
            raise UserError(
                f"--measure makes real steps, and the data of {source} are not here yet. Prepare them first:\n"
                f"  {prepare_command}"
            )
        typer.echo(f"--measure needs the data: {source} is prepared first, the whole of it, as for training", err=True)
        prepare(recipe)
    typer.echo(f"measuring: {STEPS} steps, {setting.world} x {here}", err=True)
    return measure(recipe.with_overrides(**{"parallel.device": wanted.kind}), setting.world, wanted.kind)


def _prepared(recipe: Recipe) -> bool:
    from windlass.data.prepare import find_prepared

    return find_prepared(recipe) is not None


def _plan(
    setting: Setting,
    speeds: list[Speed],
    horizon: Horizon | None,
    live: Run | None,
    prepare_command: str,
    out: dict[str, Any],
    shown: list[Any],
) -> None:
    from windlass.estimate.partial import known_horizon, partial_plan, vocabulary_known
    from windlass.estimate.plan import plan as make_plan
    from windlass.estimate.predict import predicted_beside_measured
    from windlass.reports.plan import sections

    sized = setting.recipe.model.kind == "hf" or vocabulary_known(setting)
    if horizon is None and not (sized and known_horizon(setting)):
        from windlass.reports.partial_plan import partial_sections

        made = partial_plan(setting, speeds)
        out |= made
        shown += partial_sections(made, prepare_command)
        return
    made = make_plan(setting, speeds, horizon)
    if live is not None:
        beside = predicted_beside_measured(live)
        made |= {"state": live.state, "run_dir": str(live.path), "predicted_and_measured": beside}
    out |= made
    shown += sections(made)


def _compute(flops: float, out: dict[str, Any], shown: list[Any]) -> None:
    from dataclasses import asdict

    from windlass.estimate.optimum import for_compute
    from windlass.reports.plan import optimum_section

    found = for_compute(flops)
    out["compute"] = {"flops": flops, "optima": [asdict(o) for o in found]}
    shown.append(optimum_section(flops, found))


def _fit(study: str, setting: Setting | None, out: dict[str, Any], shown: list[Any]) -> None:
    """The law of a study, and what it says: at the recipe's size, or at 2, 4 and 10 times the largest."""
    from dataclasses import asdict

    from windlass.errors import UserError
    from windlass.estimate.plan import horizon_of
    from windlass.estimate.scaling import back_test, fit_scaling, points_of
    from windlass.reports.plan import scaling_section

    points, left_out = points_of(_runs_in(study))
    fit = fit_scaling(points)
    if setting is not None:
        steps = horizon_of(setting).steps
        tokens = steps * setting.recipe.train.global_batch * setting.tokens_per_sample
        if setting.parameters is None:
            raise UserError(f"--fit-scaling with a recipe needs its number of parameters. {setting.note}")
        sizes = [(float(setting.parameters), float(tokens))]
    else:
        largest = max(points, key=lambda p: (p.parameters, p.tokens))
        grows = fit.grows()
        sizes = [(largest.parameters * f, largest.tokens * f**grows) for f in (2, 4, 10)]
    predictions, tested = [fit.predict(n, d) for n, d in sizes], back_test(points)
    section = scaling_section(fit, predictions, tested)
    section.notes.extend(f"left out: {reason}" for reason in left_out)
    shown.append(section)
    out["scaling"] = {
        "law": asdict(fit.law), "along": fit.along, "noise": fit.noise, "determined": fit.determined,
        "points": [asdict(p) for p in points], "left_out": left_out, "predictions": [asdict(p) for p in predictions],
        "back_test": {"predicted": asdict(tested[0]), "measured": tested[1]} if tested else None,
    }  # fmt: skip


def _draw(setting: Setting, horizon: Horizon | None, file: str) -> None:
    from windlass.errors import UserError
    from windlass.estimate.plan import horizon_of
    from windlass.reports.plots import schedule_plot

    try:
        drawn = schedule_plot(setting.recipe, Path(file), horizon or horizon_of(setting))
    except OSError as error:
        raise UserError(f"--schedule-plot {file}: {error.strerror}; name another file") from None
    typer.echo(f"schedule: {drawn}", err=True)
