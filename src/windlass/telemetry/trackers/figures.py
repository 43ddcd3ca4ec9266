"""Pictures of a finished run for its trackers: those of its report, or where there is none, its loss curve."""

from __future__ import annotations

from pathlib import Path

from windlass.run import Run


def figures(run: Run) -> dict[str, Path]:
    """PNG files by name; none where nothing was reported and matplotlib or the curve is missing."""
    found = {path.stem: path for path in sorted(run.report_dir.rglob("*.png"))}
    if not found and (path := _loss_curve(run)) is not None:
        found["loss"] = path
    return found


def _loss_curve(run: Run) -> Path | None:
    """Training and validation loss over steps, drawn into the run's `trackers` directory."""
    lines = run.ledger()
    train = [(line["step"], float(line["loss"])) for line in lines if line["kind"] == "train" and "loss" in line]
    evals = [x for x in lines if x["kind"] == "eval" and x.get("suite", "loss") == "loss" and "loss" in x]
    if not train:
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*train, strict=True), label="training", linewidth=1)
    if evals:
        axes.plot([x["step"] for x in evals], [float(x["loss"]) for x in evals], "o-", label="validation", markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=run.name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = run.path / "trackers" / "loss.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path
