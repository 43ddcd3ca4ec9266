"""Steps of presets on this machine's CPU, measured and by the plan's model at measured rates.

    python benchmarks/cpu_steps.py [--text input.txt]

`windlass scale` shows no prediction on CPUs because these errors exceed LIMIT. The table has one row
for each preset and number of ranks; `windlass check` measures the rates of the same ranks just
before. `--text` is a copy of tiny Shakespeare, which is downloaded otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from windlass.estimate.step import step_of_run
from windlass.estimate.work import Work
from windlass.run import Run, last_start
from windlass.study.probe import store_rates
from windlass.study.results import step_medians, windows

LIMIT, STEPS = 0.15, 30
SETTINGS = ["parallel.device=cpu", f"train.steps={STEPS}", "telemetry.every=5", "eval.every=0"]
SETTINGS += ["eval.sample_every=0", "checkpoint.every=0", "train.threads=1"]
CASES = [(name, ranks) for name in ("quickstart", "shakespeare-char-cpu") for ranks in (1, 2)]


def windlass(*words: str) -> str:
    command = [sys.executable, "-m", "windlass", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path)
    text = parser.parse_args().text
    source = [f"data.source={text.resolve()}", "data.sha256=''"] if text else []
    print("| preset | ranks | measured ms | predicted ms | off by |\n|---|---:|---:|---:|---:|")
    for name, ranks in CASES:
        with tempfile.TemporaryDirectory() as folder:
            world = ["--world", str(ranks)]
            own = [*SETTINGS, *(source if "shakespeare" in name else [])]
            check = ["check", *own, "--json", "--max-size", "16MB", *world]
            shown = windlass(check[0], name, *check[1:])
            rates, _ = json.JSONDecoder().raw_decode(shown, shown.index("{"))
            store_rates(Path(folder), rates["ranks"], rates["rates"])
            machine = json.loads((Path(folder) / "machine.json").read_text())[f"1x{ranks}"]
            windlass("train", name, *own, f"run.dir={folder}/run", *world)
            run = Run(Path(folder) / "run")
            measured = step_medians(windows(run.ledger(), 5))["step_ms"]
            start = last_start(run.ledger())
            step = step_of_run(run.recipe, start, Work.of_run(run.recipe, start), machine)
            off = f"{100 * (1e3 * step.total / measured - 1):+.0f} %"
            print(
                f"| {name} | {ranks} | {measured:,.0f} | {1e3 * step.total:,.0f} | {off} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
