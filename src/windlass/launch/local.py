"""N ranks on this machine: start them, pass signals on, end all when one fails, say why, start again. No torch.

The first rank to fail ends the run: the others have SETTLE_SECONDS to fail by themselves (and to say what they saw), then
show their stacks, get SIGTERM, and after TERM_SECONDS SIGKILL; all is over within END_SECONDS. Rank 0 has the terminal; what
the others write is kept, and shown only when they are the cause. Workers never outlive the launcher.
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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass import errors, processes
from windlass.errors import UserError
from windlass.launch.signals import Signals, caught_signals

SETTLE_SECONDS = 2.0
TERM_SECONDS = 5.0
STACKS_SECONDS = 0.4
KILL_SECONDS = 2.0
"""How long a rank may take to go after SIGKILL; the kernel keeps one that waits for a disk or a device longer."""
END_SECONDS = 10.0
"""Stated: so long after a rank ended, or was found suspended, the launcher has ended at the latest."""
STOPPED_SECONDS = 15.0
"""A rank that has been suspended (SIGSTOP) for this long counts as lost."""
TAIL_LINES = 30
KEPT_CODES = (errors.BAD_INPUT, errors.NOT_MEASURED, errors.TOO_SLOW)
"""Exit codes of a rank that mean something to the caller, and that no restart would change."""


def worker_command(arguments: Sequence[str]) -> list[str]:
    """The command of a worker that does what `windlass ARGUMENTS` does."""
    return [sys.executable, "-m", "windlass", *arguments]


def parse_worlds(text: str) -> list[int]:
    """The numbers of ranks that `--world` allows, largest first: `4` or `2..4`.

    Raises:
        UserError: it is neither.
    """
    low, dots, high = text.partition("..")
    if low.isdigit() and (high.isdigit() if dots else not high):
        first, last = int(low), int(high or low)
        if 1 <= first <= last:
            return list(range(last, first - 1, -1))
    raise UserError(f"--world {text!r} is neither a number of ranks (4) nor a range (2..4)")


def next_world(worlds: Sequence[int], current: int, lost: bool) -> int:
    """With how many ranks to start again: the next smaller number allowed after a rank was lost, else as many as before."""
    smaller = [world for world in worlds if world < current]
    return max(smaller) if lost and smaller else current


@dataclass
class Outcome:
    """How an attempt ended. `lost`: a rank was killed or suspended, so that fewer may be left."""

    code: int
    lost: bool = False


@dataclass
class Worker:
    """One rank's process. `code` is None while it lives; negative: the signal that ended it."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None
    code: int | None = None
    ended: float = 0.0
    stopped: float | None = None

    def poll(self, now: float) -> bool:
        """Whether it has ended."""
        if self.code is None and (code := self.process.poll()) is not None:
            self.code, self.ended = code, now
        return self.code is not None

    def send(self, number: int) -> None:
        """A signal to the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def suspended(self) -> bool:
        """Whether the kernel has it stopped (Linux only)."""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except (OSError, IndexError):
            return False


def launch(
    command: Sequence[str],
    worlds: int | Sequence[int],
    max_restarts: int = 0,
    environ: Mapping[str, str] | None = None,
    hold_port: bool = True,
    say: Callable[[str], None] | None = None,
    stopped_seconds: float = STOPPED_SECONDS,
) -> int:
    """Run `command` as so many ranks on this machine, and give the exit code for all of them.

    Args:
        command: what each rank runs; its place is in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
            WINDLASS_LAUNCHED and WINDLASS_ATTEMPT.
        worlds: the number of ranks, or the numbers allowed: the largest first, a smaller one after a rank was lost.
        max_restarts: how often a failed run is started again (bad input is not, nor a stop by a signal).
        environ: variables instead of this process's.
        hold_port: keep MASTER_PORT open for rank 0, so that nobody takes it: for our own command, which knows of it.
        say: where messages go, a line or several at a time; stderr by default.
        stopped_seconds: how long a rank may be suspended.

    Returns:
        0: all done. 75: stopped by a signal, everything saved. 2, 44, 46: what the first rank to end said. 1: a failure.
    """
    allowed = [worlds] if isinstance(worlds, int) else sorted(worlds, reverse=True)
    say, world = say or _to_stderr, allowed[0]
    with caught_signals() as signals:
        for attempt in range(max_restarts + 1):
            watch_dir = Path(tempfile.mkdtemp(prefix="windlass-"))
            try:
                group = Group(command, world, attempt, dict(environ or os.environ), watch_dir, say)
                outcome = group.run(signals, hold_port, stopped_seconds)
            finally:
                shutil.rmtree(watch_dir, ignore_errors=True)
            final = outcome.code in (errors.DONE, errors.STOPPED, *KEPT_CODES) or signals.asked
            if final or attempt == max_restarts:
                return outcome.code
            world = next_world(allowed, world, outcome.lost)
            say(f"windlass: restart {attempt + 1} of {max_restarts}, with {world} rank{'s' * (world > 1)}")
    raise AssertionError("the loop returns")


@dataclass
class Group:
    """The ranks of one attempt."""

    command: Sequence[str]
    world: int
    attempt: int
    environ: dict[str, str]
    watch_dir: Path
    say: Callable[[str], None]
    workers: list[Worker] = field(default_factory=list)
    forwarded: set[int] = field(default_factory=set)

    def run(self, signals: Signals, hold_port: bool, stopped_seconds: float) -> Outcome:
        """From the start to the end of the last rank."""
        try:
            self._start(hold_port)
            while True:
                for number in signals.wait(0.5 if self.workers else 0.0):
                    if self._forward(number, signals):
                        return Outcome(errors.FAILED)
                ended = self._ended()
                if any(w.code not in (errors.DONE, errors.STOPPED) for w in ended) or self._hung(stopped_seconds):
                    return self._end()
                if len(ended) == self.world:
                    stopped = any(w.code == errors.STOPPED for w in ended)
                    return Outcome(errors.STOPPED if stopped else errors.DONE)
        except BaseException:
            self._kill()
            raise

    def _start(self, hold_port: bool) -> None:
        listening = socket.create_server(("127.0.0.1", 0), backlog=max(64, self.world))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        common = {
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listening.getsockname()[1]),
            "WINDLASS_LAUNCHED": "1",
            "WINDLASS_ATTEMPT": str(self.attempt),
            "PYTHONFAULTHANDLER": "1",
            processes.WATCH_DIR: str(self.watch_dir),
        }
        threads = {"OMP_NUM_THREADS": str(max(1, cores // self.world))}
        if not hold_port:
            listening.close()
        try:
            for rank in range(self.world):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                held = (listening.fileno(),) if hold_port and rank == 0 else ()
                own |= {processes.STORE_FD: str(held[0])} if held else {}
                self.workers.append(self._spawn(rank, threads | self.environ | common | own, held))
        except OSError as error:
            self._kill()
            raise UserError(f"rank {len(self.workers)} cannot be started: {self.command[0]}: {error}") from None
        finally:
            listening.close()

    def _spawn(self, rank: int, environ: dict[str, str], held: tuple[int, ...]) -> Worker:
        log = self.watch_dir / f"rank-{rank}.log" if rank else None
        parent = os.getpid()
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(log.open("wb")) if log else None
            process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT if out else None,
                env=environ,
                pass_fds=held,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on once
                preexec_fn=lambda: processes.die_with_parent(parent),  # noqa: PLW1509 - the launcher has no threads
            )
        return Worker(rank, process, log)

    def _forward(self, number: int, signals: Signals) -> bool:
        """Pass a signal on; True where everything is to end at once (a second Ctrl-C)."""
        if number == getattr(signal, "SIGTSTP", None):
            self._suspend()
            return False
        if signals.interrupts > 1:
            self.say("windlass: interrupted twice: ended at once, without saving")
            self._kill()
            return True
        number = signal.SIGTERM if number == getattr(signal, "SIGHUP", None) else number
        self.forwarded.add(number)
        for worker in self.workers:
            if worker.code is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.send_signal(number)
        return False

    def _suspend(self) -> None:
        """Ctrl-Z: the ranks, then the launcher; and all go on together."""
        for worker in self.workers:
            worker.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for worker in self.workers:
            worker.send(signal.SIGCONT)

    def _hung(self, seconds: float) -> bool:
        now, hung = time.monotonic(), False
        for worker in self.workers:
            if worker.code is None and worker.suspended():
                worker.stopped = worker.stopped or now
                hung = hung or now - worker.stopped >= seconds
            else:
                worker.stopped = None
        return hung

    def _end(self) -> Outcome:
        """One rank failed: end the rest, say why, and judge."""
        hung = [w for w in self.workers if w.code is None and w.stopped]
        if not hung:
            self._settle(SETTLE_SECONDS)
        stacks = self._stacks()
        for worker in self.workers:
            if worker.code is None:
                worker.send(signal.SIGKILL if worker.stopped else signal.SIGTERM)  # what is suspended acts on no other
        alive = [w for w in self.workers if w.code is None]
        self._settle(TERM_SECONDS)
        self._kill()
        first = hung[0] if hung else self._first(alive)
        if (
            first not in alive
            and first.code is not None
            and -first.code in self.forwarded
            and self._before_training(first)
        ):
            if self.workers[0].code != errors.STOPPED:  # else it has said so itself
                self.say(f"windlass: {errors.before_training(signal.Signals(-first.code).name)}")
            return Outcome(errors.STOPPED)  # the signal came before there was anything to save
        if first.code in KEPT_CODES:
            if all(w.code != first.code for w in self.workers if w.rank == 0):
                self.say(_tail(first, TAIL_LINES))  # else rank 0 has said it
            return Outcome(first.code or errors.FAILED)
        self.say(self._obituary(first, stacks, [] if hung else alive))
        return Outcome(errors.FAILED, lost=bool(hung) or (first not in alive and (first.code or 0) < 0))

    def _settle(self, seconds: float) -> None:
        """Wait so long for all to end by themselves."""
        until = time.monotonic() + seconds
        while len(self._ended()) < len(self.workers) and time.monotonic() < until:
            time.sleep(0.02)

    def _ended(self) -> list[Worker]:
        now = time.time()
        return [worker for worker in self.workers if worker.poll(now)]

    def _stacks(self) -> dict[int, str]:
        """The stacks of the ranks that still answer."""
        number, asked = processes.STACKS_SIGNAL, []
        for worker in self.workers:
            ready = (self.watch_dir / f"stacks-{worker.rank}.txt").exists()  # else the signal would end it
            if number is not None and worker.code is None and not worker.stopped and ready:
                worker.process.send_signal(number)
                asked.append(worker.rank)
        if asked:
            time.sleep(STACKS_SECONDS)
        return {rank: text for rank in asked if (text := processes.read_stacks(self.watch_dir, rank))}

    def _kill(self) -> None:
        for worker in self.workers:
            worker.send(signal.SIGKILL)
        self._settle(KILL_SECONDS)
        stuck = [worker for worker in self.workers if worker.code is None]
        for worker in stuck:
            self.say(
                f"windlass: rank {worker.rank} (process {worker.process.pid}) does not end even by SIGKILL: the kernel holds it, "
                "for a disk or a device that does not answer; it is left behind"
            )

    def _first(self, ended_by_us: Sequence[Worker]) -> Worker:
        """The rank that failed first: killed ranks and reported failures by time, echoes of other ranks' failures last.

        Also one that had reported a failure of its own, and was slow to end when the others had ended by that.
        """
        words = {w.rank: processes.read_failure(self.watch_dir, w.rank) for w in self.workers}
        failed = [w for w in self.workers if w not in ended_by_us and w.code not in (errors.DONE, errors.STOPPED)]
        if not any(w.code in KEPT_CODES for w in failed):
            failed += [w for w in ended_by_us if (word := words[w.rank]) and word.first and word.rank == w.rank]

        def order(worker: Worker) -> tuple[bool, float]:
            word = words[worker.rank]
            echo = word is not None and not (word.first and word.rank == worker.rank)
            return (echo, min(word.time, worker.ended) if word else worker.ended)

        return min(failed, key=order)

    def _before_training(self, worker: Worker) -> bool:
        place = processes.read_place(self.watch_dir, worker.rank)
        return place.get("step", 0) == 0 and place.get("phase", "start") == "start"

    def _obituary(self, worker: Worker, stacks: Mapping[int, str], ended: Sequence[Worker]) -> str:
        place = processes.read_place(self.watch_dir, worker.rank)
        word = processes.read_failure(self.watch_dir, worker.rank)
        where = f" at step {place['step']}, phase {place['phase']}" if place else ""
        how = "failed" if worker in ended else _cause(worker)
        lines = [
            f"windlass: rank {worker.rank} of {self.world} on {socket.gethostname()} {how}{where}; the run has ended"
        ]
        if word:
            accused = f"rank {word.rank}: " if word.rank != worker.rank else ""
            lines.append(f"  last error: {accused}{word.error}")
            lines += [f"  last collective: {word.collective}"] if word.collective else []
        if worker.log and (tail := _tail(worker, TAIL_LINES)):
            lines += [f"  what rank {worker.rank} said last:", _prefixed(tail, worker.rank)]
        for rank, text in stacks.items():
            lines += [f"  the stacks of rank {rank}, which still answered:", _prefixed(text, rank)]
        return "\n".join(lines)


def _cause(worker: Worker) -> str:
    if worker.stopped:
        return "was suspended"
    code = worker.code or 0
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (often the kernel, for want of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _tail(worker: Worker, lines: int) -> str:
    if worker.log is None:
        return ""
    try:
        return "\n".join(worker.log.read_text(errors="replace").rstrip().splitlines()[-lines:])
    except OSError:
        return ""


def _prefixed(text: str, rank: int) -> str:
    return "\n".join(f"  [rank {rank}] {line}" for line in text.splitlines())


def _to_stderr(text: str) -> None:
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
