"""Makes the pictures of docs/guides/report.md and docs/guides/sweep.md from today's code, on an idle machine.

    .venv/bin/python docs/pictures.py page
    .venv/bin/python docs/pictures.py study input.txt

`page` trains the quickstart on two ranks, kills it after step 102 and resumes it. Then it takes
screenshots of the report in headless Chromium. `study` runs a sweep on tiny Shakespeare, kills it
twice, and prints its report, which has the table of docs/guides/sweep.md.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent / "images"
FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
RUN = ["train", "quickstart", "--world", "2", "train.steps=240", "telemetry.every=2", "run.dir=run"]
STUDY = [
    "sweep",
    "shakespeare-char-cpu",
    "optim.lr=1e-3,3e-3,1e-2",
    "optim.schedule.kind=cosine,wsd",
    "run.seed=1,2",
    "--set",
    "data.source=input.txt",
    "--set",
    "train.steps=600",
    "--set",
    "eval.every=100",
    "--set",
    "checkpoint.every=50",
    "--set",
    "train.threads=1",
    "--workers",
    "2",
    "--dir",
    "shakespeare",
]


def windlass(
    arguments: list[str], folder: Path, kill_when: Callable[[], bool] | None = None
) -> None:
    """Run a command; kill -9 it with all its processes once `kill_when` is true."""
    command = subprocess.Popen(
        [sys.executable, "-m", "windlass", *arguments], cwd=folder, start_new_session=True
    )
    while kill_when is not None and command.poll() is None:
        if kill_when():
            os.killpg(command.pid, signal.SIGKILL)
        time.sleep(0.2)
    if command.wait() and kill_when is None:
        sys.exit(f"windlass {' '.join(arguments)} failed")


def lines(ledger: Path, kind: str) -> list[dict]:
    """The lines of one kind of a run's ledger; none before it exists."""
    text = ledger.read_text() if ledger.exists() else ""
    parsed = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in parsed if line["kind"] == kind]


def photograph(page: Path, name: str, width: int, height: int, theme: str = "light") -> None:
    """A screenshot of a report's page."""
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


def page(folder: Path) -> None:
    """The pictures of docs/guides/report.md: a run that was killed and resumed."""
    ledger = folder / "run" / "metrics.jsonl"
    windlass(RUN, folder, lambda: any(line["step"] >= 102 for line in lines(ledger, "train")))
    windlass(RUN, folder)
    windlass(["report", "run"], folder)
    index = folder / "run" / "report" / "index.html"
    photograph(index, "report-page", 1280, 1640)
    photograph(index, "report-page-dark", 1280, 900, "dark")
    photograph(index, "report-page-narrow", 390, 1100)
    shutil.copy(
        folder / "run" / "report" / "plots" / "loss-late.png", IMAGES / "report-loss-late.png"
    )


def study(folder: Path, text: str) -> None:
    """The pictures and table of docs/guides/sweep.md: a study that is killed twice on the way."""
    shutil.copy(text, folder / "input.txt")

    def finished() -> int:
        ledgers = (folder / "shakespeare").glob("**/metrics.jsonl")
        return sum(
            line["event"] == "finished" for ledger in ledgers for line in lines(ledger, "event")
        )

    windlass(STUDY, folder, lambda: finished() >= 3)
    windlass(STUDY, folder, lambda: finished() >= 8)
    windlass(STUDY, folder)
    windlass(["report", "shakespeare"], folder)
    report = folder / "shakespeare" / "report"
    photograph(report / "index.html", "report-study", 1280, 1640)
    for name in ("loss-against-lr", "heat-map"):
        shutil.copy(report / "plots" / f"{name}.png", IMAGES / f"sweep-{name}.png")
    print((report / "report.md").read_text())


def main() -> None:
    """Make the pictures that the arguments name."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1] == "page":
            page(Path(folder))
        else:
            study(Path(folder), sys.argv[2])


if __name__ == "__main__":
    main()
