"""N ranks on this machine, which never outlive this process. The first to fail ends the run."""

from __future__ import annotations

import contextlib
import functools
import os
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
from windlass.fileio import read_json
from windlass.launch import rank_status

SETTLE_SECONDS = 2.0  # for the other ranks to fail by themselves, and to report why
TERM_SECONDS = 5.0
KILL_SECONDS = 2.0  # for a rank to end after SIGKILL, unless the kernel waits for a disk or device
STOP_SECONDS = 60.0  # for the other ranks after the first one stopped: trackers of rank 0 finish
TAIL_LINES = 30
FINAL_CODES = (errors.BAD_INPUT, errors.NOT_MEASURED, errors.TOO_SLOW)  # no restart changes them
GOOD_CODES = (errors.DONE, errors.STOPPED)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def launch(
    command: Sequence[str],
    world: int,
    max_restarts: int = 0,
    log: Callable[[str], None] | None = None,
) -> int:
    """Run `command` on local ranks, with torchrun's variables; the exit code of all of them.

    Bad input and a stop by a signal cause no restart. A restart with smaller micro-batches, because
    memory ran out, does not count.
    """
    attempt = 0
    restarts = 0
    log = log or functools.partial(print, file=sys.stderr, flush=True)
    received = list[int]()  # signals to pass on, in their order
    with processes.catch_signals(SIGNALS, received.append):
        while True:
            directory = tempfile.TemporaryDirectory(prefix="windlass-", ignore_cleanup_errors=True)
            with directory as watch_dir:
                group = Group(command, world, attempt, Path(watch_dir), log, received)
                try:
                    code = group.run()
                except BaseException:
                    group.kill()
                    raise
            final = code in (*GOOD_CODES, *FINAL_CODES) or group.forwarded
            if final or (restarts == max_restarts and not group.again):
                return code
            attempt += 1
            if group.again:
                log("windlass: starting the ranks again")
            else:
                restarts += 1
                log(f"windlass: restart {restarts} of {max_restarts}")


@dataclass
class Worker:
    """One rank's process. `code` is None while it lives; negative: the signal that ended it."""

    rank: int
    process: subprocess.Popen[bytes]
    output: Path | None  # None for rank 0, which writes to the terminal
    code: int | None = None
    end_time: float = 0.0

    def poll(self) -> bool:
        if self.code is None and (code := self.process.poll()) is not None:
            self.code, self.end_time = code, time.time()
        return self.code is not None

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def tail(self) -> str:
        lines = self.output.read_text(errors="replace").rstrip().splitlines() if self.output else []
        return "\n".join(lines[-TAIL_LINES:])


@dataclass
class Group:
    """The ranks of one attempt."""

    command: Sequence[str]
    world: int
    attempt: int
    watch_dir: Path
    log: Callable[[str], None]
    received: list[int]
    workers: list[Worker] = field(default_factory=list)
    forwarded: set[int] = field(default_factory=set)
    again: bool = False  # a rank asks for another start

    def run(self) -> int:
        self._start()
        while True:
            time.sleep(0.05)
            while self.received:
                number = self.received.pop(0)
                if number == signal.SIGINT and number in self.forwarded:
                    # A second Ctrl-C ends all ranks, unless rank 0 has just stopped and said so.
                    status = self.report("status", 0)
                    self.workers[0].poll()
                    phase, code = status.get("phase"), self.workers[0].code
                    self.kill()
                    if code == errors.STOPPED or phase == rank_status.STOPPED:
                        return errors.STOPPED
                    self.log(f"windlass: {errors.interrupted_twice(status.get('step', 0))}")
                    return errors.INTERRUPTED
                self._forward(number)
            ended = [worker for worker in self.workers if worker.poll()]
            first = min(ended, key=lambda worker: worker.end_time, default=None)
            if first and first.code == errors.STOPPED:
                # In training all ranks stop together. Before step 1 a rank that gets a signal ends
                # at once, and the others may wait for it, so they get a signal too.
                seconds = time.time() - first.end_time
                if seconds > STOP_SECONDS:
                    self.kill()
                if len(ended) == self.world or seconds > STOP_SECONDS:
                    return errors.STOPPED
                if seconds > SETTLE_SECONDS and signal.SIGTERM not in self.forwarded:
                    self._forward(signal.SIGTERM)
            elif any(worker.code not in GOOD_CODES for worker in ended):
                return self._fail()
            elif len(ended) == self.world:
                return max(worker.code or 0 for worker in ended)

    def _start(self) -> None:
        environ = {
            **os.environ,
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "MASTER_ADDR": "127.0.0.1",
            "WINDLASS_LAUNCHED": "1",
            "WINDLASS_ATTEMPT": str(self.attempt),
            "PYTHONFAULTHANDLER": "1",
            rank_status.WATCH_DIR: str(self.watch_dir),
            processes.PARENT: str(os.getpid()),
        }
        if self.world > 1:  # a single rank has torch's number
            environ.setdefault("OMP_NUM_THREADS", str(processes.thread_share(self.world)))
        # The kernel's signal follows the thread that forks. If that is not the main thread, each
        # rank itself watches its parent.
        is_main = threading.current_thread() is threading.main_thread()
        preexec = processes.kill_with_parent if is_main else None
        with socket.create_server(("127.0.0.1", 0), backlog=max(64, self.world)) as listening:
            environ["MASTER_PORT"] = str(listening.getsockname()[1])
            for rank in range(self.world):
                variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                output = self.watch_dir / f"rank-{rank}.log" if rank else None
                if rank == 0:  # inherits MASTER_PORT as an open socket, so nobody else takes it
                    variables[processes.STORE_FD] = str(listening.fileno())
                with output.open("wb") if output else contextlib.nullcontext() as out:
                    try:
                        process = subprocess.Popen(
                            list(self.command),
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=out,
                            env=environ | variables,
                            pass_fds=() if rank else (listening.fileno(),),
                            # Ctrl-C reaches only the launcher, which passes it on once.
                            start_new_session=True,
                            preexec_fn=preexec,  # noqa: PLW1509
                        )
                    except OSError as error:
                        why = f"{self.command[0]} cannot be started: {error.strerror}"
                        raise errors.UserError(
                            f"rank {rank}: {why}; name another program"
                        ) from None
                self.workers.append(Worker(rank, process, output))

    def _forward(self, number: int) -> None:
        number = signal.SIGTERM if number == signal.SIGHUP else number
        self.forwarded.add(number)
        for worker in self.workers:
            if worker.code is None:
                worker.process.send_signal(number)

    def _fail(self) -> int:
        """End the other ranks after one failed, log which one and why; returns the exit code."""
        self._settle(SETTLE_SECONDS)
        alive = [worker for worker in self.workers if worker.code is None]
        for worker in alive:
            worker.send(signal.SIGTERM)
        self._settle(TERM_SECONDS)
        self.kill()
        # Before step 1 there is nothing to save: a rank exits with 75 at once, or the signal kills
        # it before it has a handler, and ranks that wait for it fail. Later 75 means that
        # everything is saved.
        codes = [worker.code or 0 for worker in self.workers if worker not in alive]
        killed = [-code for code in codes if -code in self.forwarded]
        if self.forwarded and (killed or errors.STOPPED in codes):
            if killed and self.workers[0].code != errors.STOPPED:  # else rank 0 has logged it
                self.log(f"windlass: {errors.before_training(signal.Signals(killed[0]).name)}")
            return errors.STOPPED
        # The rank that failed first, even if the launcher ended it; loss of contact comes last.
        reports = {w.rank: self.report("failure", w.rank) for w in self.workers}
        secondary = {
            rank: bool(r) and (r["secondary"] or r["rank"] != rank) for rank, r in reports.items()
        }
        failed = [w for w in self.workers if w not in alive and w.code not in GOOD_CODES]
        if not any(worker.code in FINAL_CODES for worker in failed):
            failed += [w for w in alive if reports[w.rank] and not secondary[w.rank]]
        times = {w.rank: min(reports[w.rank].get("time", w.end_time), w.end_time) for w in failed}
        first = min(failed, key=lambda w: (secondary[w.rank], times[w.rank]))
        if first.code in FINAL_CODES:
            if self.workers[0].code != first.code:  # else rank 0 has written it to the terminal
                self.log(first.tail())
            return first.code
        ended = "failed"
        if first.code and first not in alive:
            ended = f"failed with exit code {first.code}"
            if first.code < 0:
                ended = f"was killed by {signal.Signals(-first.code).name}"
            if first.code == -signal.SIGKILL:
                ended += " (often by the kernel, out of memory)"
        self.again = any(report.get("again") for report in reports.values())
        status, failure = self.report("status", first.rank), reports[first.rank]
        where = f" at step {status['step']}, phase {status['phase']}" if status else ""
        place = f" ({status['place']})" if status.get("place") else ""
        name = f"rank {first.rank}{place} of {self.world} on {socket.gethostname()}"
        self.log(f"windlass: {name} {ended}{where}; the run has ended")
        if failure:
            is_own = failure["rank"] == first.rank
            cause = failure["error"] if is_own else rank_status.Failure(**failure)
            self.log(f"  last error: {cause}")
        if tail := first.tail():
            self.log(f"  its last lines:\n{tail}".replace("\n", f"\n  [rank {first.rank}] "))
        return errors.FAILED

    def report(self, what: str, rank: int) -> dict[str, Any]:
        """The last `status` of a rank, or the `failure` that ended it; empty if there is none."""
        return read_json(self.watch_dir / f"{what}-{rank}.json")

    def _settle(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and sum(w.poll() for w in self.workers) < len(self.workers):
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill all ranks and their children. The kernel may keep one that waits for a dead disk."""
        for worker in self.workers:
            worker.send(signal.SIGKILL)
        self._settle(KILL_SECONDS)
