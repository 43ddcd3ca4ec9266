"""N ranks on this machine: start them, pass signals on, end all when one fails, say why, start again. No torch.

The first rank to fail ends the run: the others have SETTLE_SECONDS to fail by themselves and to report what they saw, then
get SIGTERM, and after TERM_SECONDS SIGKILL; all is over within END_SECONDS. Rank 0 has the terminal; what the others write
goes to a file, and is shown only when they are the cause. Ranks never outlive the launcher.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass import errors, processes

SETTLE_SECONDS = 2.0
TERM_SECONDS = 5.0
KILL_SECONDS = 2.0  # for a rank to end after SIGKILL; the kernel keeps one that waits for a disk or a device longer
END_SECONDS = 10.0  # documented: so long after a rank ended, or was seen to be suspended, the launcher has ended
STOP_SECONDS = 60.0  # for the other ranks to end after the first one stopped: rank 0 may let its trackers finish
SECOND_SECONDS = 0.5  # for rank 0 to end by a first Ctrl-C when a second one comes
STOPPED_SECONDS = 15.0  # a rank that has been suspended (SIGSTOP) for this long counts as lost
TAIL_LINES = 30
MEANT_CODES = (
    errors.BAD_INPUT,
    errors.NOT_MEASURED,
    errors.TOO_SLOW,
)  # no restart would change them
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def parse_worlds(text: str) -> list[int]:
    """The numbers of ranks that `--world` allows, largest first: `4` or `2..4`; raises UserError for anything else."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    if match and 1 <= int(match[1]) <= int(match[2] or match[1]):
        return list(range(int(match[2] or match[1]), int(match[1]) - 1, -1))
    raise errors.UserError(f"--world {text!r} is neither a number of ranks (4) nor a range (2..4)")


def launch(
    command: Sequence[str],
    worlds: int | Sequence[int],
    max_restarts: int = 0,
    log: Callable[[str], None] | None = None,
    stopped_seconds: float = STOPPED_SECONDS,
) -> int:
    """Run `command` as so many ranks on this machine, and return the exit code for all of them.

    Args:
        command: what each rank runs; it reads torchrun's variables, WINDLASS_LAUNCHED and WINDLASS_ATTEMPT.
        worlds: the number of ranks, or the numbers allowed: the largest first, a smaller one after a rank was lost.
        max_restarts: how often a failed run is started again (bad input is not, nor a stop by a signal).
        log: where messages go, a line or several at a time; stderr by default.
        stopped_seconds: how long a rank may be suspended.

    Returns:
        0: all done. 75: stopped by a signal, everything saved. 130: by a second Ctrl-C, without that. 2, 44, 46: the code of
        the first rank to end. 1: a failure.
    """
    allowed = [worlds] if isinstance(worlds, int) else sorted(worlds, reverse=True)
    log, world, attempt = (
        log or functools.partial(print, file=sys.stderr, flush=True),
        allowed[0],
        0,
    )
    received = list[int]()  # the signals to pass on, in the order in which they come
    with processes.catch_signals(SIGNALS, received.append):
        while True:
            with tempfile.TemporaryDirectory(
                prefix="windlass-", ignore_cleanup_errors=True
            ) as watch_dir:
                group = Group(command, world, attempt, Path(watch_dir), log, received)
                try:
                    code = group.run(stopped_seconds)
                except BaseException:
                    group.kill()
                    raise
            final = code in (errors.DONE, errors.STOPPED, *MEANT_CODES) or group.forwarded
            if final or attempt == max_restarts:
                return code
            if group.lost:
                world = max((smaller for smaller in allowed if smaller < world), default=world)
            attempt += 1
            log(
                f"windlass: restart {attempt} of {max_restarts}, with {world} rank{'s' * (world > 1)}"
            )


@dataclass
class Worker:
    """One rank's process. `code` is None while it lives; negative: the signal that ended it."""

    rank: int
    process: subprocess.Popen[bytes]
    output: Path | None  # None for rank 0, whose lines are on the terminal
    code: int | None = None
    ended: float = 0.0
    suspended: float | None = None  # since when the kernel has it stopped (monotonic; Linux only)

    def poll(self) -> bool:
        if self.code is None and (code := self.process.poll()) is not None:
            self.code, self.ended = code, time.time()
        return self.code is not None

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def suspended_seconds(self) -> float:
        state = ""
        with contextlib.suppress(OSError, IndexError):
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        self.suspended = (self.suspended or time.monotonic()) if state == "T" else None
        return time.monotonic() - self.suspended if self.suspended else 0.0

    def tail(self) -> str:
        lines = self.output.read_text(errors="replace").rstrip().splitlines() if self.output else []
        return "\n".join(lines[-TAIL_LINES:])


@dataclass
class Group:
    """The ranks of one attempt. `lost`: a rank was killed or suspended, so that fewer may be left for the next one."""

    command: Sequence[str]
    world: int
    attempt: int
    watch_dir: Path
    log: Callable[[str], None]
    received: list[int]
    workers: list[Worker] = field(default_factory=list)
    forwarded: set[int] = field(default_factory=set)
    lost: bool = False

    def run(self, stopped_seconds: float) -> int:
        self._start()
        while True:
            time.sleep(0.05)
            while self.received:
                number = self.received.pop(0)
                if number == signal.SIGINT and number in self.forwarded:
                    return self._end_at_once()
                self._forward(number)
            ended = [worker for worker in self.workers if worker.poll()]
            hung = [
                worker for worker in self.workers if worker.suspended_seconds() >= stopped_seconds
            ]
            if (
                ended
                and (first := min(ended, key=lambda worker: worker.ended)).code == errors.STOPPED
            ):
                # In training all ranks stop together. One that is signalled alone before step 1 ends at once: the others
                # may wait for it, and are signalled, too (in training a second SIGTERM changes nothing).
                seconds = time.time() - first.ended
                if seconds > STOP_SECONDS:
                    self.kill()
                if len(ended) == self.world or seconds > STOP_SECONDS:
                    return errors.STOPPED
                if seconds > SETTLE_SECONDS and signal.SIGTERM not in self.forwarded:
                    self._forward(signal.SIGTERM)
            elif hung or any(worker.code not in (errors.DONE, errors.STOPPED) for worker in ended):
                return self._end(hung)
            elif len(ended) == self.world:
                return max(worker.code or 0 for worker in ended)

    def _start(self) -> None:
        # A rank of its own chooses by measurement (training/threads.py); several share the cores.
        threads = (
            {"OMP_NUM_THREADS": str(processes.thread_share(self.world))} if self.world > 1 else {}
        )
        # The kernel's signal follows the thread that forks: from another one only the rank itself watches its parent.
        is_main = threading.current_thread() is threading.main_thread()
        with socket.create_server(("127.0.0.1", 0), backlog=max(64, self.world)) as listening:
            for rank in range(self.world):
                environ = {
                    **threads,
                    **os.environ,
                    "WORLD_SIZE": str(self.world),
                    "LOCAL_WORLD_SIZE": str(self.world),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(listening.getsockname()[1]),
                    "WINDLASS_LAUNCHED": "1",
                    "WINDLASS_ATTEMPT": str(self.attempt),
                    "PYTHONFAULTHANDLER": "1",
                    processes.WATCH_DIR: str(self.watch_dir),
                    processes.PARENT: str(os.getpid()),
                    # Rank 0 gets MASTER_PORT as an open socket, so that nobody else takes it.
                    **({} if rank else {processes.STORE_FD: str(listening.fileno())}),
                }
                output = self.watch_dir / f"rank-{rank}.log" if rank else None
                with output.open("wb") if output else contextlib.nullcontext() as out:
                    try:  # in a session of its own: Ctrl-C reaches the launcher alone, which passes it on once
                        process = subprocess.Popen(
                            list(self.command),
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=out,
                            env=environ,
                            pass_fds=() if rank else (listening.fileno(),),
                            start_new_session=True,
                            preexec_fn=processes.kill_with_parent if is_main else None,  # noqa: PLW1509 - no threads here
                        )
                    except OSError as error:
                        raise errors.UserError(
                            f"rank {rank} cannot be started: {self.command[0]}: {error}"
                        ) from None
                self.workers.append(Worker(rank, process, output))

    def _forward(self, number: int) -> None:
        number = signal.SIGTERM if number == signal.SIGHUP else number
        self.forwarded.add(number)
        for worker in self.workers:
            if worker.code is None:
                worker.process.send_signal(number)

    def _end_at_once(self) -> int:
        """After a second Ctrl-C; rank 0 may just have stopped by the first one, and said so."""
        status, begun = dict[str, Any](), time.monotonic()
        while not self.workers[0].poll():
            status = processes.read(self.watch_dir, "status", 0)
            has_saved = status.get("phase") == processes.STOPPED
            if time.monotonic() > begun + (TERM_SECONDS if has_saved else SECOND_SECONDS):
                break
            time.sleep(0.02)
        stopped = self.workers[0].code == errors.STOPPED or status.get("phase") == processes.STOPPED
        self.kill()
        if stopped:
            return errors.STOPPED
        self.log(f"windlass: {errors.interrupted_twice(status.get('step', 0))}")
        return errors.INTERRUPTED

    def _end(self, hung: Sequence[Worker]) -> int:
        """One rank failed: end the rest, say which one and why; the exit code."""
        if not hung:
            self._settle(SETTLE_SECONDS)
        alive = [worker for worker in self.workers if worker.code is None]
        for worker in alive:  # one that is suspended acts on no other signal
            worker.send(signal.SIGKILL if worker.suspended else signal.SIGTERM)
        self._settle(TERM_SECONDS)
        self.kill()
        # Before step 1 there is nothing to save: a rank exits with 75 at once, or the signal kills it before it has a
        # handler, and others that wait for it fail by that. After it 75 means that everything is saved.
        codes = [worker.code or 0 for worker in self.workers if worker not in alive]
        killed = [-code for code in codes if -code in self.forwarded]
        if not hung and self.forwarded and (killed or errors.STOPPED in codes):
            if killed and self.workers[0].code != errors.STOPPED:  # else rank 0 has logged it
                self.log(f"windlass: {errors.before_training(signal.Signals(killed[0]).name)}")
            return errors.STOPPED
        first = hung[0] if hung else self._first_to_fail(alive)
        rank, code = first.rank, first.code or errors.FAILED
        if code in MEANT_CODES:
            if rank and self.workers[0].code != code:  # else rank 0 has written it to the terminal
                self.log(first.tail())
            return code
        self.lost = bool(hung) or (first not in alive and code < 0)
        how = "was suspended" if hung else "failed"
        if not hung and first not in alive:
            how = (
                f"failed with exit code {code}"
                if code > 0
                else f"was killed by {signal.Signals(-code).name}"
            )
            how += " (often the kernel, for want of memory)" if code == -signal.SIGKILL else ""
        status, failure = (
            processes.read(self.watch_dir, what, rank) for what in ("status", "failure")
        )
        where = f" at step {status['step']}, phase {status['phase']}" if status else ""
        self.log(
            f"windlass: rank {rank} of {self.world} on {socket.gethostname()} {how}{where}; the run has ended"
        )
        if failure:
            self.log(
                f"  last error: {processes.Failure(**failure) if failure['rank'] != rank else failure['error']}"
            )
        if tail := first.tail():
            self.log(f"  its last lines:\n{tail}".replace("\n", f"\n  [rank {rank}] "))
        return errors.FAILED

    def _settle(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (
            sum(worker.poll() for worker in self.workers) < len(self.workers)
            and time.monotonic() < until
        ):
            time.sleep(0.02)

    def kill(self) -> None:
        """End what is left of the ranks and of their children; one that the kernel keeps, for a dead disk, stays."""
        for worker in self.workers:
            worker.send(signal.SIGKILL)
        self._settle(KILL_SECONDS)

    def _first_to_fail(self, ended_by_us: Sequence[Worker]) -> Worker:
        """The rank that failed first, by time; also one that reported a failure and was slow to end. Lost contacts last."""
        reports = {
            worker.rank: processes.read(self.watch_dir, "failure", worker.rank)
            for worker in self.workers
        }
        secondary = {
            rank: bool(r) and (r["secondary"] or r["rank"] != rank) for rank, r in reports.items()
        }
        failed = [
            w
            for w in self.workers
            if w not in ended_by_us and w.code not in (errors.DONE, errors.STOPPED)
        ]
        if not any(w.code in MEANT_CODES for w in failed):
            failed += [w for w in ended_by_us if reports[w.rank] and not secondary[w.rank]]
        return min(
            failed,
            key=lambda w: (secondary[w.rank], min(reports[w.rank].get("time", w.ended), w.ended)),
        )
