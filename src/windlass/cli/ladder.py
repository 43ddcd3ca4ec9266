"""`windlass ladder`: sizes times tokens as a study, the law of its losses, and its answers."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Option

from windlass.cli import Json, Overrides, print_json
from windlass.cli.sweep import RetryFailed, StudyName, exit_code, show_created
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.study.ladder import Ladder
    from windlass.study.progress import Progress


def ladder(
    recipe: StudyName,
    overrides: Overrides,
    sizes: str = Option("", metavar="N,N,...", help="Parameters, as 1M,3M,10M; or 4x128 shapes."),
    tokens: str = Option("", metavar="N,N,...", help="Per parameter; default 5,10,20,40."),
    dir_: Path | None = Option(None, "--dir", help="Default: studies/PRESET-ladder-HASH."),
    world: int = Option(0, min=0, help="Ranks of each cell; 0: 1."),
    workers: int = Option(1, min=1, help="Cells side by side, which share threads or devices."),
    retry_failed: RetryFailed = False,
    create: bool = Option(False, "--create", help="Create the study for `windlass submit STUDY`."),
    add: list[str] = Option([], "--add", metavar="RUN", help="A run that joins the law."),
    flops: float = Option(0.0, min=0, metavar="C", help="Budget: the best size and tokens for it."),
    hours: float = Option(0.0, min=0, metavar="H", help="Budget in hours of a --device."),
    money: float = Option(0.0, min=0, metavar="M", help="Budget in money; needs --price."),
    price: float = Option(0.0, min=0, metavar="P", help="Price of an hour of the --device."),
    device: str = Option("", metavar="NAME", help="Kind of device, as A100-80GB."),
    json_: Json = False,
) -> int:
    """Train several sizes, fit the law of scaling, predict the next.

    Each size has the recipe's proportions. Its learning rate is the recipe's times (N / N of the
    recipe)^(-1/3), unless the recipe has muP, and its batch the recipe's times that ratio^(2/3).
    If you kill the ladder, give the same command again. Without --sizes a STUDY is continued. The
    law is the form that best predicts the largest size from the smaller ones.

    Exit codes: 0 all cells done, 1 some failed, 2 bad input, 75 stopped by a signal, all is saved.

    Example: `windlass ladder quickstart --sizes 100k,300k,1M --tokens 5,10,20`
    """
    from windlass.run import Run
    from windlass.study import ladder as ladders
    from windlass.study.progress import Progress
    from windlass.study.runner import sweep

    if sum(map(bool, (flops, hours, money))) > 1:
        raise UserError("give one budget: --flops, --hours or --money")
    if bool(money) != bool(price):
        raise UserError("--money and --price, of an hour of the device, belong together")
    added = [Run.open(path) for path in add]
    ratios = list[float]()
    with contextlib.suppress(ValueError):
        ratios = [float(word) for word in tokens.split(",") if word.strip()]
    if tokens and min(ratios, default=0) <= 0:
        raise UserError(f"--tokens {tokens}: write tokens per parameter with commas, as 5,10,20")
    names = [name.strip() for name in sizes.split(",") if name.strip()]
    study = ladders.create_ladder(recipe, names, ratios, overrides, dir_)
    if create:
        return show_created(study)
    if hours or money:
        flops = (hours or money / price) * ladders.flops_per_hour(study.recipe, device)
    progress = Progress(sys.stderr if json_ else sys.stdout)
    sweep(study, world=world, workers=workers, retry_failed=retry_failed, progress=progress)
    seen = ladders.open_ladder(study, added)
    if json_:
        print_json(_as_json(seen, flops))
    else:
        _show(seen, flops, progress)
    if added:
        ladders.join(study, added)
    return exit_code(study)


def _show(seen: Ladder, flops: float, progress: Progress) -> None:
    from windlass.reports.law import error_table, law_table, predicted_table
    from windlass.telemetry.measures import short

    tables = [law_table(seen), error_table(seen)]
    tables += [predicted_table(seen)] if seen.further else []
    for table in tables:
        progress.console.print(table.terminal(progress.console.width, table.title))
        for note in table.notes:
            progress.console.print(note)
    if flops:
        size, tokens = seen.law.optimum(flops)
        best = f"{short(size)} {seen.law.counted}, {short(tokens)} tokens"
        loss = seen.law.predict(size, tokens)
        progress.notify(f"best for {flops:.3g} FLOPs: {best}, loss {loss}")
    progress.notify(f"report: windlass report {shlex.quote(str(seen.study.path))}")


def _as_json(seen: Ladder, flops: float) -> dict[str, Any]:
    """The law, and the best size for `flops`, if there is a budget."""
    law, best = seen.law, seen.forms[0]
    values: dict[str, Any] = {
        "form": law.form,
        "embeddings": law.embeddings,
        "constants": {name: list(values) for name, values in law.constants().items()},
        "measure": seen.measure,
        "mean_error": best.mean,
        "errors": best.errors,
        "left_out": seen.left_out,
    }
    if flops:
        size, tokens = law.optimum(flops)
        optimum = {"flops": flops, "parameters": size, "tokens": tokens}
        values["optimum"] = optimum | law.predict(size, tokens)._asdict()
    return values
