"""Real ranks for tests: forked processes over gloo, which return results or the first traceback."""

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # DDP imports it: once here, before the forks, instead of 4 s in each of them
import torch.distributed as dist

from windlass.parallel.collectives import norm_and_loss
from windlass.parallel.env import DistEnv
from windlass.parallel.ranks import Ranks, init_ranks
from windlass.recipe import Recipe

FORK = multiprocessing.get_context("fork")


class Join:
    """The argument of a test's function: its rank, and `join(recipe)`, which starts the ranks."""

    def __init__(self, env: DistEnv, store: dist.Store | None):
        self.env, self.store, self.rank, self.world = env, store, env.rank, env.world

    def __call__(self, recipe: Recipe) -> Ranks:
        """The ranks as `train` has them; call `.stop()` on the result, or use it in a `with`."""
        ranks = init_ranks(self.env, recipe, self.store)
        self.env = dataclasses.replace(self.env, attempt=self.env.attempt + 1)
        return ranks


def recipe(**overrides: Any) -> Recipe:
    """A recipe for tests, quick to give up; dotted keys as `parallel__strategy="ddp"`."""
    limits = {"parallel__timeout_seconds": 30, "parallel__startup_timeout_seconds": 30}
    settings = {"parallel__device": "cpu", **limits, **overrides}
    return Recipe().replace({key.replace("__", "."): value for key, value in settings.items()})


def grad_norm(parameters: Iterable[torch.nn.Parameter], ranks: Ranks) -> torch.Tensor:
    """The 2-norm of the whole gradient."""
    return norm_and_loss(parameters, torch.zeros(()), ranks.mesh)[0]


def tcp_store(env: DistEnv, listening: socket.socket) -> dist.TCPStore:
    """The ranks' store, which rank 0 serves on the listening socket."""
    fd, options = listening.detach() if env.rank == 0 else None, {"wait_for_workers": False}
    return dist.TCPStore(
        env.addr, env.port, env.world, env.rank == 0, master_listen_fd=fd, **options
    )


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """`fn(join, *args)` on `world` forked ranks; the results in order of the ranks.

    The first rank to fail fails the test with its traceback, and takes the others with it; so does
    the time limit.
    """
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    os.set_inheritable(listening.fileno(), True)
    receivers, senders = zip(*(FORK.Pipe(duplex=False) for _ in range(world)), strict=True)
    host, port = listening.getsockname()
    ranks = []
    for rank, sender in enumerate(senders):
        env = DistEnv(rank, world, rank, world, launcher="none", addr=host, port=port)
        arguments = (fn, env, listening, sender, args)
        ranks.append(FORK.Process(target=_rank, args=arguments, daemon=True))
        ranks[-1].start()
    for mine in (listening, *senders):
        mine.close()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(results) < world:
            missing = {receivers[rank]: rank for rank in range(world) if rank not in results}
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
    env: DistEnv,
    listening: socket.socket,
    sender: Connection,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    code, store = 1, None
    try:
        store = tcp_store(env, listening) if env.world > 1 else None
        sender.send_bytes(pickle.dumps((True, fn(Join(env, store), *args))))  # tensors by value
        code = 0
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        sender.close()
        if code and env.world > 1:
            time.sleep(0.5)  # the first traceback, which is the cause, arrives before the others
        elif store is not None:
            with contextlib.suppress(Exception):  # rank 0 holds the store, so it leaves last
                store.set(f"left/{env.rank}", "1")
                if env.rank == 0:
                    store.wait([f"left/{other}" for other in range(env.world)])
        os._exit(code)  # no tear-down of what the parent owns
