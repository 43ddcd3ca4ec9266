"""From a run to a checkpoint that is whole, and from a checkpoint to tensors. No code in a file is ever run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.checkpoint import catalog
from windlass.checkpoint import format as format_
from windlass.checkpoint.format import Damaged, Manifest, TensorInfo
from windlass.checkpoint.lineage import Lineage, on_lineage
from windlass.checkpoint.retention import LOSS, best
from windlass.errors import UserError
from windlass.fileio import Files
from windlass.run import Run

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 2**26
"""How much is read of a tensor at a time; between two pieces a signal may end the load."""
RESUME_HELP = "latest, best, a step, a checkpoint's path, or never"


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, and what is to be said about it."""

    path: Path
    step: int
    notes: list[str] = field(default_factory=list)
    """Newer or better checkpoints that were passed over, and why."""
    damaged: list[Path] = field(default_factory=list)
    """Where those lie."""


class Checkpoint:
    """A committed checkpoint, read a tensor or some rows at a time."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.manifest = path, manifest
        self.poll: Callable[[], object] = lambda: None
        """Called before each piece that is read of a tensor; may raise, and the tensor is then half read."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step

    @property
    def meta(self) -> dict[str, Any]:
        """What was said of it when it was saved: loss, reason, digests."""
        return self.manifest.meta

    @cached_property
    def counters(self) -> dict[str, Any]:
        """What a resume needs beside tensors."""
        found = json.loads((self.path / format_.STATE).read_bytes())
        if not isinstance(found, dict):
            raise Damaged(f"{format_.STATE} is no object")
        return found

    def names(self, prefix: str = "") -> list[str]:
        """The names of the tensors, without the aliases of tied ones."""
        return [n for n in self.manifest.tensors if n.startswith(prefix)]

    def has(self, name: str) -> bool:
        """Whether there is such a tensor, or an alias of one."""
        return name in self.manifest.tensors or name in self.manifest.aliases

    def info(self, name: str) -> TensorInfo:
        """Type, shape and places of a tensor; KeyError where there is none."""
        return self.manifest.tensors[self.manifest.aliases.get(name, name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a tensor."""
        return self.info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor."""
        from windlass.checkpoint.stage import DTYPES

        return DTYPES[self.info(name).dtype]

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        return self.slice(name, 0, self.info(name).rows)

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor, on the CPU; a scalar is one row and comes as a scalar."""
        import torch

        info = self.info(name)
        shape = (stop - start, *info.shape[1:]) if info.shape else ()
        found = torch.empty(shape, dtype=self.dtype(name))
        self.read_into(name, start, found)
        return found

    def read_into(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fill a tensor, on any device, with the rows from `start` on; raises Damaged where a file is cut off."""
        import torch

        info = self.info(name)
        rows = target.shape[0] if info.shape else 1
        direct = target.device.type == "cpu" and target.is_contiguous()
        host = target.detach() if direct else torch.empty(target.shape, dtype=target.dtype)
        if not host.numel():
            return
        raw = memoryview(host.reshape(-1).view(torch.uint8).numpy())
        for chunk in info.chunks:
            first, last = max(start, chunk.start), min(start + rows, chunk.start + chunk.rows)
            if last > first:
                self._read(
                    chunk.file,
                    chunk.offset + (first - chunk.start) * info.row_bytes,
                    raw[(first - start) * info.row_bytes : (last - start) * info.row_bytes],
                )
        if not direct:
            target.copy_(host)

    def _read(self, file: str, offset: int, target: memoryview) -> None:
        try:
            with open(self.path / file, "rb", buffering=0) as source:
                source.seek(offset)
                done = 0
                while done < len(target):
                    self.poll()
                    count = source.readinto(target[done : done + PIECE_BYTES])
                    if not count:
                        raise Damaged(f"{self.path / file} ends too early")
                    done += count
        except OSError as error:
            raise Damaged(f"{self.path / file} cannot be read: {error.strerror}") from None


def open_checkpoint(path: str | Path, deep: bool = True) -> Checkpoint:
    """The checkpoint in a directory, every byte of it verified (`deep`), or else its manifest and sizes; UserError."""
    path = Path(path)
    try:
        manifest = format_.verify(path) if deep else format_.read(path)
        format_.check_sizes(path, manifest)
    except Damaged as error:
        raise UserError(f"checkpoint {path} cannot be used: {error}") from None
    return Checkpoint(path, manifest)


def choose(run_dir: str | Path, resume: str = "latest") -> Choice | None:
    """The checkpoint that `checkpoint.resume` means, every byte verified; None where there is none to resume from.

    `latest` and `best` pass over damaged checkpoints, and say so; a step or a path that is damaged is refused. Nothing is
    changed. One rank asks, and tells the others, so that all go on from the same one. `latest` is the newest commit, as
    readers want it; a training goes on from `latest_on_lineage`.

    Raises:
        UserError: the checkpoint that was asked for is not there or damaged, all are damaged, or there is one and
            `resume` is `never`.
    """
    directory = Path(run_dir) / "checkpoints"
    if resume in ("latest", "best", "never") or resume.isdigit():
        found = catalog.entries(directory)
        if resume == "never":
            if found:
                raise UserError(
                    f"{run_dir} holds a checkpoint of step {found[0].step}, and checkpoint.resume is never; use --fresh to "
                    "set the run aside, or resume from it"
                )
            return None
        if resume.isdigit():
            return _of_step(run_dir, found, int(resume))
        return _first_good(run_dir, _preferred(found, resume, best_by(run_dir) if resume == "best" else LOSS))
    path = Path(resume)
    if not path.is_dir():
        raise UserError(f"checkpoint.resume is {resume!r}: there is no such checkpoint; write {RESUME_HELP}")
    if (path / "recipe.toml").is_file():
        return choose(path, "latest")
    return Choice(path, open_checkpoint(path).step)


def best_by(run_dir: str | Path) -> str:
    """The measure that the run's best checkpoint is chosen by: as its index says, else its recipe, else `loss`."""
    run = Run(Path(run_dir))
    named = run.checkpoint_index().get("best_by")
    if not named and run.recipe_path.is_file():
        with contextlib.suppress(UserError, ValueError):
            named = run.recipe.checkpoint.best
    return str(named or LOSS)


def _preferred(found: list[catalog.Entry], resume: str, measure: str) -> list[catalog.Entry]:
    """In the order in which they are tried: the newest first, or the best first and then the next best."""
    if resume == "latest":
        return found
    order: list[catalog.Entry] = []
    rest = [e for e in found if e.manifest is not None]
    while (first := best((e.kept for e in rest), measure)) is not None:
        order += [e for e in rest if e.serial == first.serial]
        rest = [e for e in rest if e.serial != first.serial]
    return order + [e for e in found if e not in order]


def _first_good(run_dir: str | Path, order: list[catalog.Entry]) -> Choice | None:
    notes: list[str] = []
    damaged: list[Path] = []
    for one in order:
        checked = one if one.problem else catalog.entry(one.path, deep=True)
        if not checked.problem:
            return Choice(one.path, one.step, notes, damaged)
        notes.append(f"the checkpoint of step {one.step} is damaged and passed over: {checked.problem}")
        damaged.append(one.path)
    if notes:
        raise UserError(
            f"no checkpoint of {run_dir} can be used:\n  " + "\n  ".join(notes) + "\n"
            "use --fresh to set the run aside and begin anew"
        )
    return None


def latest_on_lineage(run_dir: Path, fork: Lineage | None, up_to: int | None = None) -> Choice | None:
    """The newest good checkpoint of the run's present line, else the one that the line began at; None: begin at step 0.

    Args:
        run_dir: the run.
        fork: where its present line began, see `fork.read_lineage`.
        up_to: only checkpoints up to this step.

    Raises:
        UserError: there is nothing of the line that can be used.
    """
    found = [e for e in on_lineage(catalog.entries(run_dir / "checkpoints"), fork) if up_to is None or e.step <= up_to]
    origin = fork.path(run_dir) if fork is not None else None
    if fork is None or origin is None:
        return _first_good(run_dir, found)
    others = [e for e in found if e.path.name != origin.name or not e.path.samefile(origin)]
    try:
        choice = _first_good(run_dir, others)
    except UserError:
        choice = None  # all of them damaged: the line's beginning is still there
    if choice is not None or (up_to is not None and fork.step > up_to):
        return choice
    if not origin.is_dir():
        raise UserError(
            f"{run_dir} has no checkpoint yet since it went on from {origin}, and that one is gone: bring it back, or "
            "name another one to go on from (checkpoint.resume=STEP)"
        )
    notes = [f"the checkpoint of step {e.step} is damaged and passed over" for e in others]
    return Choice(origin, open_checkpoint(origin).step, notes, [e.path for e in others])


def _of_step(run_dir: str | Path, found: list[catalog.Entry], step: int) -> Choice:
    there = [e for e in found if e.step == step]
    if not there:
        steps = ", ".join(str(s) for s in sorted({e.step for e in found})) or "none"
        raise UserError(f"{run_dir} has no checkpoint of step {step}; there are: {steps}")
    choice = _first_good(run_dir, there)
    assert choice is not None
    return choice


def find(source: str | Path) -> Choice:
    """The checkpoint that a user names: `RUN` (its newest), `RUN@STEP`, `RUN@best`, or a checkpoint's path; verified."""
    text, at, which = os.fspath(source).rpartition("@")
    run, which = (text, which) if at and Path(text).is_dir() else (os.fspath(source), "latest")
    if (Path(run) / format_.MANIFEST).is_file():
        return Choice(Path(run), open_checkpoint(run).step)
    if not Path(run).is_dir():
        raise UserError(f"there is no run and no checkpoint at {source}; `windlass runs` lists the runs")
    choice = choose(run, which)
    if choice is None:
        raise UserError(f"{run} has no checkpoint yet")
    return choice


def newest(run_dir: str | Path) -> Checkpoint | None:
    """The newest good checkpoint of a run; None where there is none yet."""
    choice = choose(run_dir, "latest")
    return None if choice is None else open_checkpoint(choice.path, deep=False)


def set_aside(choice: Choice, files: Files | None = None) -> list[Path]:
    """Rename the damaged checkpoints that a choice passed over, so that they are neither counted nor overwritten."""
    return [catalog.set_aside(path, files or Files()) for path in choice.damaged if path.is_dir()]


@dataclass(frozen=True)
class Loaded:
    """What a model was loaded from."""

    run: Run
    checkpoint: Checkpoint
    notes: list[str]
    """Newer checkpoints that were passed over, and why."""


def load_model(source: str | Path, device: str | torch.device = "cpu") -> tuple[torch.nn.Module, Loaded]:
    """The model of a run, in evaluation mode, with the weights of one of its checkpoints.

    Args:
        source: `RUN` (its newest good checkpoint), `RUN@STEP`, `RUN@best`, or the path of a checkpoint inside a run.
        device: where the model is to be.

    Raises:
        UserError: there is no such run or checkpoint, or it is damaged or of another model than the run's recipe says.
    """
    from windlass.checkpoint.reshard import MODEL, restore
    from windlass.model.build import build_model

    choice = find(source)
    run = Run.open(choice.path.absolute().parent.parent)
    checkpoint = open_checkpoint(choice.path, deep=False)
    dtype = next(d for d in map(checkpoint.dtype, checkpoint.names(MODEL)) if d.is_floating_point)
    embedding = f"{MODEL}embedding.weight"
    vocab = checkpoint.shape(embedding)[0] if checkpoint.has(embedding) else 0
    model = build_model(run.recipe, vocab, device, dtype)
    if hasattr(model, "fill_buffers"):  # those that are not saved
        model.fill_buffers()
    restore(checkpoint, model)
    return model.eval(), Loaded(run, checkpoint, choice.notes)
