"""Real ranks for tests: forked processes over gloo, whose results or first traceback come back to
pytest.
"""

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
    """What a test's function gets: its rank, and `join(recipe)`, which starts the ranks (as often
    as one likes in turn).
    """

    def __init__(self, env: DistEnv, store: dist.Store | None):
        self.env, self.store, self.rank, self.world = env, store, env.rank, env.world

    def __call__(self, recipe: Recipe) -> Ranks:
        """The ranks as `train` has them; call `.stop()` on the result, or use it in a `with`."""
        ranks = init_ranks(self.env, recipe, self.store)
        self.env = dataclasses.replace(self.env, attempt=self.env.attempt + 1)
        return ranks


def recipe(**overrides: Any) -> Recipe:
    """A recipe for tests, quick to give up; dotted keys as `parallel__strategy="ddp"`."""
    quick = {
        "parallel__timeout_seconds": 30,
        "parallel__startup_timeout_seconds": 30,
        "parallel__device": "cpu",
    }
    return Recipe().replace(
        **{key.replace("__", "."): value for key, value in (quick | overrides).items()}
    )


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """`fn(join, *args)` on `world` forked ranks; the results in order of the ranks.

    The first rank to fail fails the test with its traceback, and takes the others with it; so does
    the time limit.
    """
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    os.set_inheritable(listening.fileno(), True)
    receivers, senders = zip(*(FORK.Pipe(duplex=False) for _ in range(world)), strict=True)
    ranks = [
        FORK.Process(
            target=_rank, args=(fn, rank, world, listening, senders[rank], args), daemon=True
        )
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    for mine in (listening, *senders):
        mine.close()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while missing := {
            receiver: rank for rank, receiver in enumerate(receivers) if rank not in results
        }:
            ready = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {list(missing.values())} gave no result in time")
            for receiver in ready:
                rank = missing[receiver]
                try:
                    good, value = pickle.loads(receiver.recv_bytes())
                except EOFError:
                    ranks[rank].join(5)
                    raise AssertionError(
                        f"rank {rank} ended with exit code {ranks[rank].exitcode}"
                    ) from None
                assert good, f"rank {rank} failed:\n{value}"
                results[rank] = value
        return [results[rank] for rank in range(world)]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _rank(
    fn: Callable[..., Any],
    rank: int,
    world: int,
    listening: socket.socket,
    sender: Connection,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    code, store = 1, None
    try:
        host, port = listening.getsockname()
        env = DistEnv(rank, world, rank, world, launcher="none", addr=host, port=port)
        if world > 1:
            fd = listening.detach() if rank == 0 else None
            store = dist.TCPStore(
                host, port, world, rank == 0, wait_for_workers=False, master_listen_fd=fd
            )
        sender.send_bytes(pickle.dumps((True, fn(Join(env, store), *args))))  # tensors by value
        code = 0
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        sender.close()
        if code and world > 1:
            time.sleep(
                0.5
            )  # the first traceback is the cause: it arrives before those of the others
        elif store is not None:
            with contextlib.suppress(
                Exception
            ):  # the store lives in rank 0, which therefore leaves last
                store.set(f"left/{rank}", "1")
                if rank == 0:
                    store.wait([f"left/{other}" for other in range(world)])
        os._exit(code)  # no tear-down of what the parent owns
