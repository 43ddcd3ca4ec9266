"""Lock the run directory of a start, choose its checkpoint, write the new lineage; check that all
hosts see the directory.

Rank 0 writes the lineage before `recipe.toml`, so a kill between the two leaves a run that resumes.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from windlass.checkpoint import choose
from windlass.checkpoint.commit import recover
from windlass.checkpoint.format import Checkpoint
from windlass.errors import UserError, argument
from windlass.fileio import Files, LockHeld, acquire_lock, lock_held
from windlass.ledger import read_lines
from windlass.parallel.ranks import Ranks
from windlass.recipe import Horizon, typed
from windlass.run import LOCK, OCCUPIED, Run
from windlass.telemetry.console import Console
from windlass.training.start import Start, candidate_checkpoints, job_id

LOCK_WAIT_SECONDS = 10.0  # a process that was just killed may still hold the lock
# By a key of a checkpoint's `meta`: the setting, and what its change does. A branch may change the
# first two.
EFFECTS = {
    "optimizer": ("optim.kind", "the saved optimizer state is not used"),
    "average": ("train.average", "the average changes"),
    "precision": ("train.precision", "the losses differ"),
    "compiles": ("train.compile", "the losses differ by rounding"),
    "micro_batch": ("train.micro_batch", "rounding differs, and dropout draws other masks"),
}


class RunDirectory:
    """The run directory of this start, locked until the end of `stack`: its checkpoint to start
    from (None: step 0), the number of this start, and a name that no other start has."""

    def __init__(
        self, start: Start, ranks: Ranks, horizon: Horizon, console: Console, stack: ExitStack
    ):
        self.start, self.ranks, self.run = start, ranks, start.run
        ranks.mark(0, "load")
        console.begin("looking for a checkpoint, and verifying it")
        # The checkpoint of a new run (a branch) is verified before anything changes, the
        # checkpoint of a resumed run under the lock.
        self.checkpoint = None if start.resuming else self._choose(horizon)
        locked = ranks.decide("lock", lambda: self._lock(stack))
        self.attempt, self.attempt_name, self.warnings = locked
        console.open_log(start.run.log_path)
        if start.resuming:
            self.checkpoint = self._choose(horizon)
        if self.checkpoint is not None:
            self.warnings += self.checkpoint.notes

    def _choose(self, horizon: Horizon) -> Checkpoint | None:
        """The first undamaged checkpoint to start from; the ranks share the hashing."""
        paths = self.ranks.decide(
            "candidates", lambda: list(map(str, candidate_checkpoints(self.start, horizon)))
        )
        return choose.first_undamaged(list(map(Path, paths)), self.ranks)

    def _lock(self, stack: ExitStack) -> tuple[int, str, list[str]]:
        """Lock the directory; returns the attempt, its name and warnings."""
        run, start = self.run, self.start
        if start.fresh:
            rename_old_run(run.path)
        Files().make_dirs(run.path)
        if (lock := acquire_run_lock(run.path)) is not None:
            stack.enter_context(lock)
        if not start.resuming and run.exists:
            text = f"another process has just begun a run in {run.path}; give another run.dir"
            raise UserError(text)
        run.heartbeat_path.touch()
        attempts = [int(line.get("attempt", 0)) for line in read_lines(run.metrics_path)]
        attempt = max(attempts, default=-1) + 1
        return attempt, f"{attempt}_{secrets.token_hex(4)}", recover(run.checkpoints_dir)

    def begin(self, save_tokenizer: Callable[[Path], None]) -> None:
        """Write the start, and the tokenizer; every rank calls it."""

        def write() -> None:
            path = self.run.path
            write_start(self.start, self.checkpoint)
            save_tokenizer(path)
            if (path / "tokenizer").is_dir():
                Files().sync_tree(path / "tokenizer")
                Files().sync_dir(path)

        self.ranks.decide("write", write)


def write_start(start: Start, checkpoint: Checkpoint | None, files: Files | None = None) -> None:
    """Write the start durably: a new run's directory, a new lineage, a changed recipe."""
    files, run, recipe = files or Files(), start.run, start.recipe
    goes_back = not start.restarted and recipe.checkpoint.resume != "latest"
    if not start.resuming or start.extends_from or goes_back:
        files.make_dirs(run.path)
        path, step = (checkpoint.path, checkpoint.step) if checkpoint else (None, 0)
        lineage = choose.lineage_at(run.path, path, step, job_id())
    elif start.changes:
        lineage = choose.read_lineage(run.path) or choose.Lineage()
    else:
        return
    if start.resuming and not start.changes:  # some settings of a start are not recorded
        recipe = run.recipe.replace({"train.steps": recipe.train.steps})
    choose.record(run.path, lineage, recipe, files)


def compare(checkpoint: Checkpoint, meta: Mapping[str, Any]) -> list[str]:
    """A warning for each difference between a checkpoint and this start, whose checkpoints will
    have `meta`. UserError if the data has changed."""
    saved = {**meta, **checkpoint.manifest.meta}
    if saved["data"] != meta["data"]:
        raise UserError(
            f"the data is not what {checkpoint.path} was trained on (fingerprint {saved['data']}, "
            f"here {meta['data']}): bring the old data back (data.dir), or start over with "
            f"{argument('fresh')}"
        )
    return [
        f"{setting} was {typed(saved[key])} and is {typed(meta[key])}: {effect} from step "
        f"{checkpoint.step} on"
        for key, (setting, effect) in EFFECTS.items()
        if saved[key] != meta[key]
    ]


def rename_old_run(path: Path) -> None:
    """Rename a run directory to `….old-N` (`--fresh`); UserError if a process may train in it."""
    if not path.exists():
        return
    run = Run(path)
    if lock_held(run.lock_path) is None and run.state == "running":
        problem = f"{path} has a fresh heartbeat: another host may train in it"
        raise UserError(f"{problem}; try again in a minute")
    lock = acquire_run_lock(path)
    names = (path.with_name(f"{path.name}.old-{number}") for number in itertools.count(1))
    path.rename(next(name for name in names if not name.exists()))
    if lock is not None:
        lock.close()


def acquire_run_lock(run: Path) -> IO[str] | None:
    """Hold the lock of a run directory until the returned file is closed or this process ends; None
    if the file system lacks locks. UserError, with the holder, after LOCK_WAIT_SECONDS."""
    try:
        return acquire_lock(run / LOCK, LOCK_WAIT_SECONDS)
    except LockHeld as held:
        raise UserError(f"{OCCUPIED} {run} already ({held}); wait for it, or stop it") from None


def check_shared(ranks: Ranks, run: Path) -> None:
    """Raise UserError if a rank does not see the run directory of rank 0, which creates a file in
    it."""
    place = run.absolute()

    def create() -> str:
        parent = next(path for path in (place, *place.parents) if path.is_dir())
        # A new name, which is in no cache of NFS
        descriptor, mark = tempfile.mkstemp(prefix=".windlass-", dir=parent)
        os.close(descriptor)
        return mark

    mark = Path(ranks.decide("shared", create))
    hosts = ranks.all_gather_object("shared", [socket.gethostname(), mark.exists()])
    if ranks.main:
        mark.unlink(missing_ok=True)
    ranks.broadcast_object("removed")  # nobody continues while the file exists
    blind = {f"{host} (rank {rank})" for rank, (host, sees) in enumerate(hosts) if not sees}
    if blind:
        raise UserError(
            f"run.dir: {place} of {hosts[0][0]} (rank 0) is not seen by {', '.join(sorted(blind))}: "
            "put it on a file system that all hosts share (run.dir=PATH)"
        )


def check_same_data(ranks: Ranks, fingerprint: str) -> None:
    """Raise UserError if a rank has other data than rank 0: each host may have a copy."""
    prints = ranks.all_gather_object("data", fingerprint)
    if others := [rank for rank, other in enumerate(prints) if other != prints[0]]:
        problem = f"rank {others[0]} has other data than rank 0"
        raise UserError(f"{problem}: share data.dir among all hosts, or give each the same copy")
