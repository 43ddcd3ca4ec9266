"""Makes the pictures of the README and the docs from today's code.

    python docs/pictures.py [NAME ...] [--text input.txt]

The names are those of the functions in `PICTURES`; without one, all pictures are made. Run it on an
idle machine with Chromium and tmux; `make pictures` does. `--text` is a copy of tiny Shakespeare,
which is downloaded otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import record

IMAGES = Path(__file__).parent / "images"
FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
HERO = "train quickstart train.steps=240 telemetry.every=1 eval.every=0 eval.sample_every=0"
HERO += " checkpoint.every=40 train.threads=1"
PAGE = "train quickstart --world 2 train.steps=240 telemetry.every=2 run.dir=run"
STUDY = (
    "sweep shakespeare-char-cpu optim.lr=1e-3,3e-3,1e-2 optim.schedule.kind=cosine,wsd run.seed=1,2"
)
STUDY += " --set train.steps=600 --set eval.every=100 --set checkpoint.every=50"
STUDY += " --set train.threads=1 --workers 2 --dir shakespeare"
CURVE = "train shakespeare-char-fast run.dir=curve"


def windlass(command: str, folder: Path, kill_when: Callable[[], bool] | None = None) -> None:
    """Run a command; kill -9 it with all its processes once `kill_when` is true."""
    print(f"windlass {command}", flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "windlass", *command.split()],
        cwd=folder,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    while kill_when is not None and process.poll() is None:
        if kill_when():
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.1)
    if process.wait() and kill_when is None:
        sys.exit(f"windlass {command} failed")


def lines(run: Path, kind: str) -> list[dict]:
    """The lines of one kind of a run's ledger; none before it exists."""
    ledger = run / "metrics.jsonl"
    text = ledger.read_text() if ledger.exists() else ""
    parsed = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in parsed if line["kind"] == kind]


def after(run: Path, step: int) -> Callable[[], bool]:
    """Whether a run has logged a step."""
    return lambda: any(line["step"] >= step for line in lines(run, "train"))


def losses(run: Path) -> list[float]:
    """The loss of each step; a step that was made again after a kill counts once, the last time."""
    return list({line["step"]: line["loss"] for line in lines(run, "train")}.values())


def hero(folder: Path, text: str) -> None:
    """The loss on 1, 2 and 4 ranks and of a run killed twice, and how far they are apart."""
    curves: dict[str, list[float]] = {}
    for precision in ("fp32", "fp64"):
        for world in (1, 2, 4):
            name = f"{precision}-{world}"
            ranks = f"--world {world} train.micro_batch={8 // world}"
            windlass(f"{HERO} train.precision={precision} {ranks} run.dir={name}", folder)
            curves[name] = losses(folder / name)
    killed = f"{HERO} train.precision=fp32 train.micro_batch=8 run.dir=killed"
    kills = (70, 150)
    for step in kills:
        windlass(killed, folder, after(folder / "killed", step))
    windlass(killed, folder)
    curves["killed"] = losses(folder / "killed")
    draw_hero(curves, kills)


def draw_hero(curves: Mapping[str, Sequence[float]], kills: Sequence[int]) -> None:
    """`hero.svg`: the curves above, their differences from one rank below."""
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    from windlass.reports.plots import PALETTE, STYLE

    blue, orange, green = PALETTE[:3]
    single, steps = curves["fp32-1"], range(1, len(curves["fp32-1"]) + 1)
    svg = {"svg.hashsalt": "windlass", "svg.fonttype": "none", "font.family": "sans-serif"}
    with style.context([STYLE, svg], after_reset=True):
        figure = Figure(figsize=(8.8, 5.4), layout="constrained")
        FigureCanvasSVG(figure)
        above, below = figure.subplots(2, sharex=True, height_ratios=[3, 2])
        above.plot(steps, single, color="#c3c8d0", lw=6, label="1 process, never stopped")
        above.plot(steps, curves["fp32-2"], color=blue, lw=1.8, label="2 processes")
        above.plot(
            steps, curves["fp32-4"], color=orange, lw=1.8, ls=(0, (4, 3)), label="4 processes"
        )
        above.plot(
            steps,
            curves["killed"],
            color=green,
            lw=1.4,
            ls=":",
            label="1 process, killed twice and resumed",
        )
        for step in kills:
            above.plot(step, single[step - 1], "X", ms=10, color="#b3352f", zorder=9)
        above.annotate(
            "kill -9",
            (kills[0], single[kills[0] - 1]),
            (14, 16),
            textcoords="offset points",
            color="#b3352f",
        )
        above.set_title("Training loss of four runs")
        above.legend()
        for name, color, dash in (("2", blue, "-"), ("4", orange, (0, (4, 3)))):
            for precision in ("fp32", "fp64"):
                apart = [
                    abs(a - b) or math.nan
                    for a, b in zip(
                        curves[f"{precision}-{name}"], curves[f"{precision}-1"], strict=True
                    )
                ]
                below.plot(steps, apart, color=color, lw=1.2, ls=dash)
                furthest = max(a for a in apart if a > 0)
                print(f"{name} ranks, {precision}: at most {furthest:.1e} from 1 rank")
        for precision, words in (("fp32", "float32"), ("fp64", "float64")):
            last = abs(curves[f"{precision}-4"][-1] - curves[f"{precision}-1"][-1])
            below.annotate(
                words, (len(steps), last), (6, 0), textcoords="offset points", va="center"
            )
        below.set_yscale("log")
        below.set_ylim(1e-18, 1)
        below.set_yticks(
            [1e-15, 1e-12, 1e-9, 1e-6, 1e-3], ["1e-15", "1e-12", "1e-9", "1e-6", "1e-3"]
        )
        below.set_title("Difference of the loss from 1 process")
        below.set_xlabel("step")
        equal = curves["killed"] == single
        print(f"killed twice and resumed: equal in every bit: {equal}")
        if equal:
            below.text(
                0.008,
                0.04,
                "killed twice and resumed: 0 at every step",
                transform=below.transAxes,
                color=green,
            )
        figure.savefig(IMAGES / "hero.svg", metadata={"Date": None, "Creator": None})


def photograph(page: Path, name: str, width: int, height: int, theme: str = "light") -> None:
    """A screenshot of a report's page."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    with sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, names)))
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme
        )
        tab = context.new_page()
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-ready]", state="attached")
        tab.screenshot(path=IMAGES / f"{name}.png")
        browser.close()


def page(folder: Path, text: str) -> None:
    """The report of a run that was killed after step 102 and resumed."""
    run = folder / "run"
    windlass(PAGE, folder, after(run, 102))
    windlass(PAGE, folder)
    index = run / "report" / "index.html"
    photograph(index, "report-page", 1280, 1000)
    photograph(index, "report-page-dark", 1280, 1000, "dark")
    photograph(index, "report-page-narrow", 390, 844)


def study(folder: Path, text: str) -> None:
    """The report of a sweep on tiny Shakespeare that is killed twice on the way."""
    command = STUDY + (f" --set data.source={text}" if text else "")

    def finished(cells: int) -> Callable[[], bool]:
        runs = folder / "shakespeare" / "runs"
        return lambda: (
            cells
            <= sum(
                line["event"] == "finished"
                for run in runs.glob("*")
                for line in lines(run, "event")
            )
        )

    for cells in (3, 8):
        windlass(command, folder, finished(cells))
    windlass(command, folder)
    windlass("report shakespeare", folder)
    report = folder / "shakespeare" / "report"
    photograph(report / "index.html", "report-study", 1280, 1000)
    shutil.copy(report / "plots" / "loss-against-lr.png", IMAGES / "sweep-loss-against-lr.png")
    print((report / "report.md").read_text())


def curve(folder: Path, text: str) -> None:
    """The loss of the small character model of tiny Shakespeare."""
    windlass(CURVE + (f" data.source={text}" if text else ""), folder)
    windlass("report curve", folder)
    shutil.copy(folder / "curve" / "report" / "plots" / "loss.png", IMAGES / "shakespeare-loss.png")


def recording(folder: Path, text: str) -> None:
    """The terminal in which a run is killed and resumed."""
    (IMAGES / "killed-and-resumed.svg").write_text(record.draw(record.record()))


PICTURES = (hero, page, study, curve, recording)


def main() -> None:
    """Make the pictures that the arguments name."""
    names = {picture.__name__: picture for picture in PICTURES}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *names], metavar="NAME")
    parser.add_argument("--text", default="", help="a copy of tiny Shakespeare")
    arguments = parser.parse_args()
    for name in arguments.names or names:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.text:  # a picture may show the path
                shutil.copy(arguments.text, Path(folder, "input.txt"))
            names[name](Path(folder), "input.txt" if arguments.text else "")


if __name__ == "__main__":
    main()
