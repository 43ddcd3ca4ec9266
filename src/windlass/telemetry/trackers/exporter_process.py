"""The process that feeds one tracker: `python -m windlass.telemetry.trackers.exporter_process RUN --to NAME`.

It lives beside the training process, reads what that one writes, and is all that a hanging import, a dead address or a
full disk can hurt. Its standard input is its lifeline: when that closes, the run is over, or its process is dead, and the
rest is sent within a bounded time. One process a tracker, so that none holds up another.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from windlass.run import Run
from windlass.telemetry.environment import scrub
from windlass.telemetry.trackers import remedy
from windlass.telemetry.trackers.exporter import Exporter, Sink

POLL_SECONDS = 1.0
RETRY_SECONDS = (5.0, 10.0, 20.0, 40.0, 60.0)
"""How long to wait after each trouble in a row before trying again."""

WATCH_SECONDS = 5.0
"""How often to look whether the training process still lives; its end is noticed at once anyway."""

LOCK_SECONDS = 60.0
"""How long to wait for another process that feeds the same tracker: one that sends the rest of a run that was killed."""


def main(arguments: list[str] | None = None) -> int:
    """Feed until the lifeline closes and all is sent; 0 where the tracker has everything."""
    parser = argparse.ArgumentParser(prog="python -m windlass.telemetry.trackers.exporter_process")
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", required=True, choices=("tensorboard", "mlflow", "wandb"))
    parser.add_argument("--attempt", type=int, default=-1, help="-1: a replay of what is there")
    parser.add_argument("--flush-seconds", type=float, default=30.0)
    parser.add_argument("--nice", type=int, default=0, help="how far to stand behind the training")
    parser.add_argument("--messages", type=int, default=1, help="file descriptor to speak through")
    given = parser.parse_args(arguments)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # meant for the run; its end reaches us through the lifeline
    with contextlib.suppress(OSError):
        os.nice(given.nice)
    ending = threading.Event()
    lifeline = threading.Thread(target=_hold_lifeline, args=(ending, given.flush_seconds, os.getppid()), daemon=True)
    lifeline.start()

    say = _Voice(given.messages)
    with _only_feeder(given.run, given.to) as alone:
        if not alone:
            say("trouble", "another process is feeding it from this run; try again when that one is done")
            return 1
        feeder = Exporter(Run(given.run), lambda: _sink(given.to), live=given.attempt >= 0, attempt=given.attempt)
        return 0 if feed(feeder, ending, say, remedy(given.run, given.to)) else 1


def feed(feeder: Exporter, ending: threading.Event, say: Callable[[str, str], None], cure: str) -> bool:
    """Send lines as they come until `ending`, through any trouble; returns whether everything was delivered."""
    troubles, up = 0, False
    while True:
        last = ending.is_set()  # asked before reading: what was written before the end is read
        try:
            if last:
                say("complete", feeder.finish())
                return True
            connected = feeder.pump()
            troubles = 0
        except Exception as error:  # whatever a tracker's library raises, the run is not concerned
            troubles += 1
            feeder.again()
            say("trouble", f"{_reason(error)}; {cure}")
            print(f"{time.ctime()}: {type(error).__name__}: {scrub(str(error))}", file=sys.stderr, flush=True)
            if last:
                return False
            ending.wait(RETRY_SECONDS[min(troubles, len(RETRY_SECONDS)) - 1])
            continue
        if connected and not up:
            up = True
            say("up", feeder.hint)
        ending.wait(POLL_SECONDS)


def _reason(error: Exception) -> str:
    """An error in one line, without secrets."""
    text = " ".join(scrub(str(error)).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


class _Voice:
    """Messages to the training process, as JSON lines; nobody listening is no reason to stop."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)

    def __call__(self, kind: str, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._descriptor, json.dumps({"kind": kind, "text": text}).encode() + b"\n")


def _hold_lifeline(ending: threading.Event, flush_seconds: float, parent: int) -> None:
    """Wait for the end of the run, then let this process live for a bounded time.

    While a library holds the interpreter (a hung import of compiled code), this thread does not run either: the C timer
    of `faulthandler`, wound up again as long as all is well, ends the process then.
    """
    told = b""
    bound = min(flush_seconds, 1e6)
    while True:
        faulthandler.dump_traceback_later(bound + 4 * WATCH_SECONDS, exit=True, file=sys.__stderr__ or 2)
        ready, _, _ = select.select([0], [], [], WATCH_SECONDS)
        if ready:
            chunk = os.read(0, 64)
            told += chunk
            if not chunk:
                break
        elif os.getppid() != parent:
            break
    with contextlib.suppress(ValueError):
        bound = min(float(told), 1e6)
    faulthandler.dump_traceback_later(bound + WATCH_SECONDS, exit=True, file=sys.__stderr__ or 2)
    ending.set()
    time.sleep(bound)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # with whatever the tracker's library started


@contextlib.contextmanager
def _only_feeder(run: Path, name: str) -> Iterator[bool]:
    """Whether this is the only process that feeds the tracker from this run; waits for one that is about to end."""
    try:
        import fcntl

        (run / "trackers").mkdir(parents=True, exist_ok=True)
        file = open(run / "trackers" / f"{name}.lock", "ab")  # noqa: SIM115 - held until the end of the with block
    except (ImportError, OSError):
        yield True  # no locks, or a full disk: go on without
        return
    with file:
        patience = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= patience:
                    yield False
                    return
                time.sleep(0.5)
                continue
            except OSError:  # a file system without locks
                pass
            yield True
            return


def _sink(name: str) -> Sink:
    if name == "tensorboard":
        from windlass.telemetry.trackers.tensorboard import TensorBoard

        return TensorBoard()
    if name == "mlflow":
        from windlass.telemetry.trackers.mlflow import MLflow

        return MLflow()
    from windlass.telemetry.trackers.wandb import WandB

    return WandB()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a library's thread or exit handler that hangs does not hold us up
