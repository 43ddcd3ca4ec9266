"""Fit the law to the smaller half of published runs, and predict the larger half.

    python examples/published_runs.py scaling-law-runs.csv

The file has a line for each run of Gadre et al. (arXiv 2403.08540): `data`, `params`,
`params_no_embed`, `tokens`, `tokens_per_param` and `c4_val_loss`, from mlfoundations/scaling.
"""

from __future__ import annotations

import csv
import itertools
import sys

from windlass.study.law import FORMS, Law, Observation, fit_law

SETS = {"c4_original": "C4", "rpj": "RedPajama"}


def error(law: Law, run: Observation) -> float:
    """Predicted ÷ measured loss - 1, in percent."""
    return 100 * (law.of_run(run) / run.loss - 1)


def halves(rows: list[dict[str, str]], least: float) -> tuple[list[Observation], list[Observation]]:
    """The runs with at least `least` tokens a parameter, divided at the median of N times D."""
    numbers = ("params", "params_no_embed", "tokens")
    runs = [
        Observation(row["id"], *(int(row[key]) for key in numbers), float(row["c4_val_loss"]))
        for row in rows
        if float(row["tokens_per_param"]) >= least
    ]
    runs.sort(key=lambda run: run.parameters * run.tokens)
    middle = (len(runs) + 1) // 2
    return runs[:middle], runs[middle:]


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = [f"{name}, {which}" for which in ("all", "≥ 10") for name in (*SETS.values(), "both")]
    print(f"| Form | N counts | {' | '.join(columns)} |")
    print(f"| --- | --- |{' ---: |' * len(columns)}")
    by_run = list[str]()
    for form, embeddings in itertools.product(FORMS, (True, False)):
        cells = list[str]()
        for least in (0, 10):
            errors = list[tuple[float, float]]()  # predicted, and of the law that saw the run
            for data, name in SETS.items():
                small, large = halves([row for row in rows if row["data"] == data], least)
                half = fit_law(small, form, embeddings=embeddings, samples=0)
                whole = fit_law([*small, *large], form, embeddings=embeddings, samples=0)
                new = [(abs(error(half, run)), abs(error(whole, run))) for run in large]
                cells.append(means(new))
                errors += new
                if (form, embeddings, least) == ("chinchilla", False, 10):
                    by_run += [
                        f"| {name} | {run.parameters:,} | {run.tokens / 1e9:.2f} | {run.loss:.3f} "
                        f"| {half.of_run(run):.3f} | {error(half, run):+.1f} |"
                        for run in large
                    ]
            cells.append(means(errors))
        counted = "all" if embeddings else "without embeddings"
        print(f"| {FORMS[form].formula} | {counted} | {' | '.join(cells)} |", flush=True)
    print("\n| Training data | Parameters | Tokens (10⁹) | Measured | Predicted | Error (%) |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    print("\n".join(by_run))


def means(errors: list[tuple[float, float]]) -> str:
    predicted, seen = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    return f"{predicted:.2f} ({seen:.2f})"


if __name__ == "__main__":
    main()
