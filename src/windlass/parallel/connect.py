"""How the ranks of a training meet: a store, the device of each, and their process groups."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from windlass import processes
from windlass.errors import RunFailed, UserError, first_line
from windlass.parallel.env import DistEnv
from windlass.parallel.ranks import GLOO_INTERFACE, Ranks
from windlass.recipe import Recipe


def init_ranks(env: DistEnv, recipe: Recipe, store: dist.Store | None = None) -> Ranks:
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(init_store(env, recipe, store))
        init_process_group(ranks, recipe)
        stack.pop_all()
    return ranks


def init_store(env: DistEnv, recipe: Recipe, store: dist.Store | None = None) -> Ranks:
    """Connect by a store, in which a failed rank writes its failure; start the heartbeat."""
    strategy, settings = recipe.strategy(env.world), recipe.parallel
    if env.launcher not in ("none", "environment"):
        processes.exit_with_parent(default=os.getppid())
    ranks = Ranks(env, torch.device("cpu"), strategy)
    if not strategy.distributed:
        return ranks
    try:
        ranks.join(store or open_store(env, settings.startup_timeout_seconds), settings)
    except (dist.DistError, RuntimeError) as error:
        first = ranks.fail(error)
        is_ours = first.rank == env.rank
        why = first_line(error) if is_ours else f"the first failure was {first}"
        where = f"rank {env.rank} of {env.world} did not meet the others at {env.addr}:{env.port}"
        raise RunFailed(f"{where}: {why}") from error
    return ranks


def open_store(env: DistEnv, seconds: float) -> dist.Store:
    """The store of all ranks, which rank 0 serves (under torchrun the agent may)."""
    if env.world == 1:
        return dist.HashStore()
    serves = env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    fd = os.environ.get(processes.STORE_FD) if serves and env.launcher == "windlass" else None
    store = dist.TCPStore(
        env.addr,
        env.port,
        env.world,
        serves,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,  # a later training of this process has the server that is there
        master_listen_fd=int(fd) if fd else None,
    )
    if serves:
        # The server outlasts the training: a rank that is ahead may begin the next one before rank
        # 0 has ended this one, and the launcher's socket serves only once. `id` does nothing.
        atexit.register(id, store)
    return store


def init_process_group(ranks: Ranks, recipe: Recipe) -> None:
    """Choose the device; create the process group (NCCL on CUDA, gloo on CPU) and the mesh."""
    env = ranks.env
    device = choose_device(recipe.parallel.device, env)
    on_host = device.type == "cpu" or recipe.parallel.offload
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    elif env.local_world > 1 and on_host and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(processes.thread_share(env.local_world))
    if device.type == "cpu":
        processes.keep_freed_memory()
    tf32 = recipe.train.tf32 and device.type == "cuda"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if ranks.strategy.distributed and (interface := gloo_interface(ranks)):
        # gloo takes the host name's interface, which may be missing, slow, or a foreign network.
        os.environ.setdefault(GLOO_INTERFACE, interface)
    ranks.connect(device, recipe)


def choose_device(wanted: str, env: DistEnv) -> torch.device:
    """This rank's GPU if there are GPUs, else the CPU; UserError if a wanted GPU is missing."""
    visible = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if not visible and wanted == "cuda":
        problem = 'parallel.device = "cuda", but torch finds no CUDA device here'
        raise UserError(f'{problem}; use "auto" or "cpu"')
    if not visible:
        return torch.device("cpu")
    # A single visible device may be this rank's own; if it is not, NCCL says so.
    if env.local_world > visible > 1:
        here = f"{env.local_world} ranks on this host and {visible} CUDA devices"
        raise UserError(f'{here}: start one rank for each device, or set parallel.device = "cpu"')
    device = torch.device("cuda", env.local_rank if visible > 1 else 0)
    torch.cuda.set_device(device)
    return device


def gloo_interface(ranks: Ranks) -> str:
    """The network interface by which this rank reaches the others; empty: gloo's own choice."""
    env = ranks.env
    if env.nodes == 1:
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    # On the first host the route to its own name may be the loopback.
    places = ranks.all_gather_object("address", [env.node, address_to(env.addr)])
    others = (address for node, address in places if node and address)
    return interface_to(env.addr if env.node else next(others, env.addr))


def interface_to(host: str) -> str:
    import psutil

    address, interfaces = address_to(host), psutil.net_if_addrs().items()
    return next((name for name, every in interfaces if address in {a.address for a in every}), "")


def address_to(host: str) -> str:
    """This machine's address on the route to a host; empty for the loopback."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it only asks the kernel for the route
        own = str(probe.getsockname()[0])
        return "" if own.startswith("127.") else own
    return ""
