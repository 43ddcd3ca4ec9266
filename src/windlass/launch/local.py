"""N ranks on this machine: start them, pass signals on, end all when one fails, say why, start again. No torch.

The first rank to fail ends the run: the others have SETTLE_SECONDS to fail by themselves and to report what they saw, then
get SIGTERM, and after TERM_SECONDS SIGKILL; all is over within END_SECONDS. Rank 0 has the terminal; what the others write is
kept, and shown only when they are the cause. Ranks never outlive the launcher.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass import errors, processes
from windlass.errors import UserError

POLL_SECONDS = 0.05
SETTLE_SECONDS = 2.0
TERM_SECONDS = 5.0
KILL_SECONDS = 2.0
"""How long a rank may take to end after SIGKILL; the kernel keeps one that waits for a disk or a device longer."""
END_SECONDS = 10.0
"""Stated: so long after a rank ended, or was seen to be suspended, the launcher has ended at the latest."""
STOP_SECONDS = 60.0
"""How long the other ranks have to end after the first one stopped: rank 0 may let its trackers finish."""
STOPPED_SECONDS = 15.0
"""A rank that has been suspended (SIGSTOP) for this long counts as lost."""
TAIL_LINES = 30
KEPT_CODES = (errors.BAD_INPUT, errors.NOT_MEASURED, errors.TOO_SLOW)
"""Exit codes of a rank that mean something to the caller, and that no restart would change."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTSTP)


def worker_command(arguments: Sequence[str]) -> list[str]:
    """The command of a rank that does what `windlass ARGUMENTS` does."""
    return [sys.executable, "-m", "windlass", *arguments]


def parse_worlds(text: str) -> list[int]:
    """The numbers of ranks that `--world` allows, largest first: `4` or `2..4`; raises UserError for anything else."""
    low, dots, high = text.partition("..")
    if low.isdigit() and (high.isdigit() if dots else not high):
        first, last = int(low), int(high or low)
        if 1 <= first <= last:
            return list(range(last, first - 1, -1))
    raise UserError(f"--world {text!r} is neither a number of ranks (4) nor a range (2..4)")


def next_world(worlds: Sequence[int], current: int, lost: bool) -> int:
    """How many ranks to start again: the next smaller number allowed after a rank was lost, else as many as before."""
    smaller = [world for world in worlds if world < current]
    return max(smaller) if lost and smaller else current


def launch(
    command: Sequence[str],
    worlds: int | Sequence[int],
    max_restarts: int = 0,
    environ: Mapping[str, str] | None = None,
    log: Callable[[str], None] | None = None,
    stopped_seconds: float = STOPPED_SECONDS,
) -> int:
    """Run `command` as so many ranks on this machine, and return the exit code for all of them.

    Args:
        command: what each rank runs; it reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
            WINDLASS_LAUNCHED and WINDLASS_ATTEMPT.
        worlds: the number of ranks, or the numbers allowed: the largest first, a smaller one after a rank was lost.
        max_restarts: how often a failed run is started again (bad input is not, nor a stop by a signal).
        environ: variables instead of this process's.
        log: where messages go, a line or several at a time; stderr by default.
        stopped_seconds: how long a rank may be suspended.

    Returns:
        0: all done. 75: stopped by a signal, everything saved. 2, 44, 46: what the first rank to end said. 1: a failure.
    """
    allowed = [worlds] if isinstance(worlds, int) else sorted(worlds, reverse=True)
    log, world = log or _to_stderr, allowed[0]
    with received_signals() as received:
        for attempt in range(max_restarts + 1):
            watch_dir = Path(tempfile.mkdtemp(prefix="windlass-"))
            group = Group(command, world, attempt, dict(environ or os.environ), watch_dir, log, received)
            try:
                code = group.run(stopped_seconds)
            except BaseException:
                group.kill()
                raise
            finally:
                shutil.rmtree(watch_dir, ignore_errors=True)
            final = code in (errors.DONE, errors.STOPPED, *KEPT_CODES) or group.forwarded
            if final or attempt == max_restarts:
                return code
            world = next_world(allowed, world, group.lost)
            log(f"windlass: restart {attempt + 1} of {max_restarts}, with {world} rank{'s' * (world > 1)}")
    raise AssertionError("the loop returns")


@contextlib.contextmanager
def received_signals() -> Iterator[list[int]]:
    """The signals to pass on, as they come; outside the main thread no handler can be set, and none come."""
    received: list[int] = []
    old = {number: signal.getsignal(number) for number in SIGNALS}
    if threading.current_thread() is not threading.main_thread():
        old = {}
    try:
        for number, handler in old.items():
            if handler != signal.SIG_IGN:  # nohup's choice stands
                signal.signal(number, lambda number, _: received.append(number))
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@dataclass
class Worker:
    """One rank's process. `code` is None while it lives; negative: the signal that ended it."""

    rank: int
    process: subprocess.Popen[bytes]
    output: Path | None
    code: int | None = None
    ended: float = 0.0
    suspended: float | None = None
    """Since when the kernel has it stopped (monotonic; Linux only)."""

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.code is None and (code := self.process.poll()) is not None:
            self.code, self.ended = code, time.time()
        return self.code is not None

    def send(self, number: int) -> None:
        """A signal to the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def tail(self) -> str:
        """The last lines it wrote; empty for rank 0, whose lines are on the terminal."""
        if self.output is None:
            return ""
        return "\n".join(self.output.read_text(errors="replace").rstrip().splitlines()[-TAIL_LINES:])


@dataclass
class Group:
    """The ranks of one attempt. `lost`: a rank was killed or suspended, so that fewer may be left for the next one."""

    command: Sequence[str]
    world: int
    attempt: int
    environ: dict[str, str]
    watch_dir: Path
    log: Callable[[str], None]
    received: list[int]
    workers: list[Worker] = field(default_factory=list)
    forwarded: set[int] = field(default_factory=set)
    lost: bool = False

    def run(self, stopped_seconds: float) -> int:
        """From the start to the end of the last rank; the exit code."""
        self._start()
        while True:
            time.sleep(POLL_SECONDS)
            while self.received:
                if not self._forward(self.received.pop(0)):
                    self.kill()
                    return errors.FAILED
            ended = [worker for worker in self.workers if worker.poll()]
            hung = [worker for worker in self.workers if self._suspended(worker) >= stopped_seconds]
            if ended and (first := min(ended, key=lambda worker: worker.ended)).code == errors.STOPPED:
                if self._rest_stopped(time.time() - first.ended):
                    return errors.STOPPED
                continue
            if hung or any(worker.code not in (errors.DONE, errors.STOPPED) for worker in ended):
                return self._end(hung)
            if len(ended) == self.world:
                return max(worker.code or 0 for worker in ended)

    def _rest_stopped(self, seconds: float) -> bool:
        """Whether all ranks have ended, so long after the first one stopped, or have been made to end.

        In training all ranks stop together. One that is signalled alone before step 1 ends at once: the others may wait for it,
        and are signalled, too (in training a second SIGTERM changes nothing).
        """
        alive = [worker for worker in self.workers if worker.code is None]
        if seconds > STOP_SECONDS:
            self.kill()
        elif seconds > SETTLE_SECONDS and signal.SIGTERM not in self.forwarded:
            self.forwarded.add(signal.SIGTERM)
            for worker in alive:
                worker.process.send_signal(signal.SIGTERM)
        return not alive or seconds > STOP_SECONDS

    def _start(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with socket.create_server(("127.0.0.1", 0), backlog=max(64, self.world)) as listening:
            environ = {"OMP_NUM_THREADS": str(max(1, cores // self.world))} | self.environ
            environ |= {
                "WORLD_SIZE": str(self.world),
                "LOCAL_WORLD_SIZE": str(self.world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listening.getsockname()[1]),
                "WINDLASS_LAUNCHED": "1",
                "WINDLASS_ATTEMPT": str(self.attempt),
                "PYTHONFAULTHANDLER": "1",
                processes.WATCH_DIR: str(self.watch_dir),
                processes.PARENT: str(os.getpid()),
            }
            for rank in range(self.world):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                if rank == 0:  # is given MASTER_PORT open, so that nobody else takes it
                    own[processes.STORE_FD] = str(listening.fileno())
                try:
                    self.workers.append(self._spawn(rank, environ | own, listening.fileno()))
                except OSError as error:
                    raise UserError(f"rank {rank} cannot be started: {self.command[0]}: {error}") from None

    def _spawn(self, rank: int, environ: dict[str, str], store_fd: int) -> Worker:
        output = self.watch_dir / f"rank-{rank}.log" if rank else None
        # The kernel's signal follows the thread that forks: from another one only the rank itself watches its parent.
        main = threading.current_thread() is threading.main_thread()
        with output.open("wb") if output else contextlib.nullcontext() as out:
            process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT if out else None,
                env=environ,
                pass_fds=() if rank else (store_fd,),
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on once
                preexec_fn=processes.kill_with_parent if main else None,  # noqa: PLW1509 - a launcher has no threads
            )
        return Worker(rank, process, output)

    def _forward(self, number: int) -> bool:
        """Pass a signal on; False where everything is to end at once (a second Ctrl-C)."""
        if number == signal.SIGTSTP:  # Ctrl-Z: the ranks, then the launcher; and all continue together
            for worker in self.workers:
                worker.send(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            for worker in self.workers:
                worker.send(signal.SIGCONT)
            return True
        if number == signal.SIGINT and number in self.forwarded:
            self.log("windlass: interrupted twice: ended at once, without saving")
            return False
        number = signal.SIGTERM if number == signal.SIGHUP else number
        self.forwarded.add(number)
        for worker in self.workers:
            if worker.code is None:
                worker.process.send_signal(number)
        return True

    def _suspended(self, worker: Worker) -> float:
        """For how many seconds the kernel has had it stopped."""
        try:
            state = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            state = ""
        if state != "T":
            worker.suspended = None
            return 0.0
        worker.suspended = worker.suspended or time.monotonic()
        return time.monotonic() - worker.suspended

    def _end(self, hung: Sequence[Worker]) -> int:
        """One rank failed: end the rest, say which one and why; the exit code."""
        if not hung:
            self._settle(SETTLE_SECONDS)
        alive = [worker for worker in self.workers if worker.code is None]
        for worker in alive:
            worker.send(
                signal.SIGKILL if worker.suspended else signal.SIGTERM
            )  # one that is suspended acts on no other
        self._settle(TERM_SECONDS)
        self.kill()
        if not hung and self._stopped(alive):
            return errors.STOPPED
        first = hung[0] if hung else self._first_to_fail(alive)
        code = first.code or errors.FAILED
        if code in KEPT_CODES:
            if first.rank and self.workers[0].code != code:  # else rank 0 has said it on the terminal
                self.log(first.tail())
            return code
        self.lost = bool(hung) or (first not in alive and code < 0)
        self.log(self._summary(first, "failed" if first in alive and not hung else _how(first)))
        return errors.FAILED

    def _settle(self, seconds: float) -> None:
        """Wait at most so long for all ranks to end by themselves."""
        until = time.monotonic() + seconds
        while sum(worker.poll() for worker in self.workers) < len(self.workers) and time.monotonic() < until:
            time.sleep(0.02)

    def kill(self) -> None:
        """End what is left of the ranks and of their children; one that the kernel keeps, for a dead disk, is left behind."""
        for worker in self.workers:
            worker.send(signal.SIGKILL)
        self._settle(KILL_SECONDS)

    def _stopped(self, alive: Sequence[Worker]) -> bool:
        """Whether the ranks ended by a signal that was passed on.

        Before step 1 there is nothing to save: a rank exits with 75 at once, or the signal kills it before it has a handler,
        and others that wait for it fail by that. After it 75 means that everything is saved.
        """
        codes = [worker.code or 0 for worker in self.workers if worker not in alive]
        killed = [-code for code in codes if -code in self.forwarded]
        if killed and self.workers[0].code != errors.STOPPED:  # else rank 0 has said so
            self.log(f"windlass: {errors.before_training(signal.Signals(killed[0]).name)}")
        return bool(self.forwarded) and (bool(killed) or errors.STOPPED in codes)

    def _first_to_fail(self, ended_by_us: Sequence[Worker]) -> Worker:
        """The rank that failed first: by time, those that only lost contact with another rank last.

        Also one that had reported a failure, and was slow to end when the others had ended because of it.
        """
        failures = {w.rank: processes.read_failure(self.watch_dir, w.rank) for w in self.workers}
        failed = [w for w in self.workers if w not in ended_by_us and w.code not in (errors.DONE, errors.STOPPED)]
        if not any(w.code in KEPT_CODES for w in failed):
            failed += [w for w in ended_by_us if (f := failures[w.rank]) and not f.secondary and f.rank == w.rank]

        def order(worker: Worker) -> tuple[bool, float]:
            failure = failures[worker.rank]
            secondary = failure is not None and (failure.secondary or failure.rank != worker.rank)
            return (secondary, min(failure.time, worker.ended) if failure else worker.ended)

        return min(failed, key=order)

    def _summary(self, worker: Worker, how: str) -> str:
        status = processes.read_status(self.watch_dir, worker.rank)
        where = f" at step {status['step']}, phase {status['phase']}" if status else ""
        lines = [
            f"windlass: rank {worker.rank} of {self.world} on {socket.gethostname()} {how}{where}; the run has ended"
        ]
        if failure := processes.read_failure(self.watch_dir, worker.rank):
            accused = f"{failure}" if failure.rank != worker.rank else failure.error
            lines.append(f"  last error: {accused}")
        if tail := worker.tail():
            lines.append(f"  its last lines:\n{tail}".replace("\n", f"\n  [rank {worker.rank}] "))
        return "\n".join(lines)


def _how(worker: Worker) -> str:
    if worker.suspended:
        return "was suspended"
    code = worker.code or 0
    if code >= 0:
        return f"failed with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    return f"was killed by {name}{' (often the kernel, for want of memory)' if -code == signal.SIGKILL else ''}"


def _to_stderr(text: str) -> None:
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
