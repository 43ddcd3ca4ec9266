"""The tables of docs/evidence/scaling.md from the studies of `benchmarks/scaling.sh`, in Markdown.

python benchmarks/scaling_tables.py STUDIES
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

COLUMNS = {
    "Ranks": "{world:.0f}",
    "Step (ms)": "{step_ms:.1f}",
    "Lowest to highest (ms)": "{step_ms_low:.1f} to {step_ms_high:.1f}",
    "Samples/s": "{samples_per_s:.1f}",
    "Speed-up": "{speedup:.2f}",
    "Efficiency": "{efficiency:.0%}",
    "Communication exposed (ms)": "{exposed_ms:.1f}",
}
OWN = {"fixed-data": {"Loss, mean": "{train_loss_mean:.3f}"}}


def read(text: str) -> str | float:
    """A number if it is one."""
    try:
        return float(text)
    except ValueError:
        return text


def main() -> None:
    for name in sys.argv[2:] or ["strong", "fixed-data", "weak"]:
        columns = COLUMNS | OWN.get(name, {})
        print(f"{name}\n\n| {' | '.join(columns)} |\n|---{'|---:' * (len(columns) - 1)}|")
        with (Path(sys.argv[1]) / name / "report" / "scaling.csv").open() as file:
            for row in csv.DictReader(file):
                values = {key: read(value) for key, value in row.items()}
                no_communication = {"Communication exposed (ms)"} if row["world"] == "1" else set()
                cells = [
                    "–" if heading in no_communication else form.format(**values)
                    for heading, form in columns.items()
                ]
                print(f"| {' | '.join(cells)} |")
        print()


if __name__ == "__main__":
    main()
