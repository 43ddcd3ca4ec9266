"""Real ranks for tests: forked processes that meet over gloo, and whose results or first traceback come back to pytest."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # DDP imports it: once here, before the forks, instead of 4 s in each of them
import torch.distributed as dist

from windlass.parallel.dist import Ranks, init_ranks
from windlass.parallel.env import DistEnv
from windlass.recipe import Recipe

FORK = multiprocessing.get_context("fork")


class Join:
    """What a test's function gets: its rank, and `join(recipe)`, which starts the ranks (as often as one likes in turn)."""

    def __init__(self, place: DistEnv, store: dist.Store | None):
        self.place, self.store, self.rank, self.world = place, store, place.rank, place.world

    def __call__(self, recipe: Recipe) -> Ranks:
        """Join the others as `train` would; call `.stop()` on the result, or use it in a `with`."""
        ranks = init_ranks(self.place, recipe, self.store)
        self.place = dataclasses.replace(self.place, attempt=self.place.attempt + 1)
        return ranks


def recipe(**overrides: Any) -> Recipe:
    """A recipe for tests, quick to give up; dotted keys as `parallel__strategy="ddp"`."""
    quick = {"parallel__timeout_seconds": 30, "parallel__startup_timeout_seconds": 30, "parallel__device": "cpu"}
    tree: dict[str, Any] = {}
    for key, value in (quick | overrides).items():
        *path, last = key.split("__")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return Recipe.model_validate(tree)


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """`fn(join, *args)` on `world` forked ranks; the results in order of the ranks.

    The first rank to fail fails the test with its traceback, and takes the others with it; so does the time limit.
    """
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    os.set_inheritable(listening.fileno(), True)
    pipes = [FORK.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        FORK.Process(target=_rank, args=(fn, rank, world, listening, pipes[rank][1], args), daemon=True)
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    listening.close()
    for _, sender in pipes:
        sender.close()
    try:
        return _collect([receiver for receiver, _ in pipes], ranks, time.monotonic() + timeout)
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()


def _rank(
    fn: Callable[..., Any], rank: int, world: int, listening: socket.socket, sender: Connection, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    code, store = 1, None
    try:
        host, port = listening.getsockname()
        place = DistEnv(rank, world, rank, world, launcher="none", addr=host, port=port)
        if world > 1:
            fd = listening.detach() if rank == 0 else None
            store = dist.TCPStore(host, port, world, rank == 0, wait_for_workers=False, master_listen_fd=fd)
        sender.send_bytes(pickle.dumps((True, fn(Join(place, store), *args))))  # tensors by value
        code = 0
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        sender.close()
        if code and world > 1:
            time.sleep(0.5)  # the first traceback is the cause: it arrives before those of the others
        elif store is not None:
            with contextlib.suppress(Exception):  # the store lives in rank 0, which therefore leaves last
                store.set(f"left/{rank}", "1")
                if rank == 0:
                    store.wait([f"left/{other}" for other in range(world)])
        os._exit(code)  # no tear-down of what the parent owns


def _collect(receivers: list[Connection], ranks: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = [r for i, r in enumerate(receivers) if i not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = [i for i in range(len(ranks)) if i not in results]
            raise TimeoutError(f"ranks {silent} gave no result in time")
        for receiver in ready:
            rank = receivers.index(receiver)  # type: ignore[arg-type]
            try:
                good, value = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                ranks[rank].join(5)
                raise AssertionError(f"rank {rank} ended without a result, exit code {ranks[rank].exitcode}") from None
            if not good:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ranks))]
