"""`windlass average`: one model from the mean of several checkpoints' weights.

The runs of a soup start from the same weights (model soups, arXiv 2203.05482), or the checkpoints
are of one run (arXiv 2306.03241). The result is a run directory without optimizer state, so that
`eval`, `sample`, `export` and `model.init_from` read it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.checkpoint.load import MODEL, Checkpoint
from windlass.checkpoint.save import Writer
from windlass.checkpoint.shard import shard_of
from windlass.data.tokenizer import FOLDER
from windlass.errors import UserError, argument
from windlass.evaluation.source import Source, find_source
from windlass.fileio import new_directory, write_atomic
from windlass.model import hf_files
from windlass.run import SOUP, Run

FREE = ("model.init_from", "model.freeze", "model.dropout", "model.lora.dropout")
"""Settings of `[model]` that do not change what the weights compute."""
SHOWN = 6  # differences in a message


def average(
    runs: Sequence[str | Path | Run],
    to: str | Path,
    coefficients: Sequence[float] = (),
    weights: str = "raw",
) -> Run:
    """Write the mean of several checkpoints' weights as a new run directory.

    Args:
        runs: Each is `RUN` (its newest checkpoint), `RUN@STEP`, `RUN@best` or a checkpoint's path.
        to: The new directory. It appears whole or not at all.
        coefficients: A weight for each checkpoint, with the sum 1; default: equal ones.
        weights: `raw`, or `average` for the averaged weights of the checkpoints (`train.average`);
            then one checkpoint is enough.

    Raises:
        UserError: The checkpoints are fewer than two, or not of one architecture and tokenizer; a
            coefficient is missing; or the directory exists.
    """
    names, directory = [run.path if isinstance(run, Run) else run for run in runs], Path(to)
    count = len(names)
    if count < (2 if weights == "raw" else 1):
        raise UserError("one checkpoint has no mean: name several, as RUN RUN or RUN@100 RUN@200")
    parts = list(coefficients) or [1 / count] * count
    if len(parts) != count or not math.isclose(sum(parts), 1, abs_tol=1e-6):
        problem = f"{count} checkpoints need {count} numbers with the sum 1"
        example = ",".join([f"{1 / count:.3g}"] * count)
        given = argument("coefficients", [*parts])
        raise UserError(f"{given}: {problem}, as {argument('coefficients', example)}")
    sources = [find_source(name, weights=weights) for name in names]
    for source in sources:
        if source.checkpoint is None:
            raise UserError(f"{source.name} is not a run or a checkpoint of Windlass")
    checkpoints = [source.open_checkpoint() for source in sources]
    check_alike(sources, checkpoints)
    of = [
        {"checkpoint": str(checkpoint.path), "coefficient": part}
        for checkpoint, part in zip(checkpoints, parts, strict=True)
    ]
    with new_directory(directory) as partial:
        _copy_run(sources[0], partial)
        write_mean(checkpoints, parts, partial)
        write_atomic(partial / SOUP, json.dumps({"weights": weights, "of": of}, indent=1) + "\n")
    return Run(directory)


def check_alike(sources: Sequence[Source], checkpoints: Sequence[Checkpoint]) -> None:
    """Raise UserError, with the differences, unless the mean of the weights is a model."""

    def facts(source: Source, checkpoint: Checkpoint) -> dict[str, Any]:
        flat = source.recipe.flat()
        model = {k: v for k, v in flat.items() if k.startswith("model.") and k not in FREE}
        tokenizer = source.tokenizer.fingerprint if source.tokenizer is not None else "none"
        own = {"the tokenizer": tokenizer, "the model class": source.own_model or "none"}
        infos = {
            name.removeprefix(MODEL): checkpoint.info(name) for name in checkpoint.names(MODEL)
        }
        shapes = {name: f"{info.dtype} {list(info.shape)}" for name, info in infos.items()}
        return model | own | shapes

    first = facts(sources[0], checkpoints[0])
    for source, checkpoint in zip(sources[1:], checkpoints[1:], strict=True):
        other = facts(source, checkpoint)
        differences = [
            f"{key} is {other.get(key, 'missing')} there and {first.get(key, 'missing')} here"
            for key in first | other
            if first.get(key) != other.get(key)
        ]
        if differences:
            more = "; and more" * (len(differences) > SHOWN)
            problem = f"{checkpoint.path} is of another model than {checkpoints[0].path}"
            raise UserError(f"{problem}: {'; '.join(differences[:SHOWN])}{more}")


def _copy_run(source: Source, directory: Path) -> None:
    """The recipe, tokenizer and origin of a run, without its ledger."""
    assert source.run is not None
    for name in ("recipe.toml", "environment.json"):
        if (file := source.run.path / name).is_file():
            shutil.copyfile(file, directory / name)
    for name in (FOLDER, hf_files.FOLDER):
        if (folder := source.run.path / name).is_dir():
            shutil.copytree(folder, directory / name)


def write_mean(checkpoints: Sequence[Checkpoint], coefficients: Sequence[float], run: Path) -> None:
    """Commit a checkpoint of the highest step with the weighted mean of the models' tensors."""
    first, step = checkpoints[0], max(checkpoint.step for checkpoint in checkpoints)
    tensors = {name: mean_of(checkpoints, coefficients, name) for name in first.names(MODEL)}
    counters, meta = (
        first.counters | {"step": step, "averaged": 0},
        first.meta | {"average": "none"},
    )
    writer = Writer(run / "checkpoints", attempt="mean", background=False)
    writer.write(step, shard_of(tensors, first.manifest.aliases), counters, meta)
    [save] = writer.poll()
    if save.error:
        raise OSError(save.error)


def mean_of(checkpoints: Sequence[Checkpoint], coefficients: Sequence[float], name: str) -> Tensor:
    """The weighted mean of a tensor, summed in float64. UserError if whole numbers differ."""
    tensors = (checkpoint.tensor(name) for checkpoint in checkpoints)
    first = next(tensors)
    if not first.is_floating_point():
        if not all(torch.equal(first, other) for other in tensors):
            problem = "differs between the checkpoints, and whole numbers have no mean"
            raise UserError(f"{name.removeprefix(MODEL)} {problem}")
        return first
    total = first.double() * coefficients[0]
    for coefficient, tensor in zip(coefficients[1:], tensors, strict=True):
        total.add_(tensor, alpha=coefficient)
    return total.to(first.dtype)
