"""What a run ran on and with: versions, commit, hosts, devices, command; from lists of what is
reported, never a dump.

`scrub` and `scrub_command` remove secrets before anything is written or sent to a tracker.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.fileio import write_atomic
from windlass.launch.schedulers import SCHEDULERS, find_job
from windlass.telemetry.ledger import now
from windlass.variables import HIDDEN, SECRET_NAME, scrub

PACKAGES = (
    "torch",
    "numpy",
    "pydantic",
    "tokenizers",
    "tiktoken",
    "safetensors",
    "transformers",
    "datasets",
    "peft",
    "tensorboard",
    "mlflow",
    "wandb",
    "psutil",
    "nvidia-ml-py",
)
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_TIMEOUT",
    "NCCL_NET",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_CROSS_NIC",
    "NCCL_COLLNET_ENABLE",
    "NCCL_BUFFSIZE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_ENABLE_MONITORING",
    "HF_HUB_OFFLINE",
    *(name for one in SCHEDULERS.values() for name in one.LOGGED),
)


def scrub_command(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """A command line without secrets: also the values of `--api-key X`, `--token=X`,
    `some.password=X`."""
    shown, hidden = [], False  # hidden: the argument is the value of an option before it
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret, option = bool(SECRET_NAME.search(name.lstrip("-"))), argument.startswith("-")
        rest = f"{name}={HIDDEN}" if equals and secret else scrub(argument, environ)
        shown.append(HIDDEN if hidden and not option else rest)
        hidden = secret and option and not equals
    return shown


def write_environment(run: Path, ranks: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Write the environment of this start, with what each rank reports of itself (`describe_rank`),
    as JSON."""
    packages = {"windlass": __version__}
    for name in PACKAGES:  # versions without importing them
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    environment = {
        "time": now(),
        "command": scrub_command(sys.orig_argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "commit": commit(Path(__file__).parent),
        "machine": machine(),
        "ranks": ranks,
        **more,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    with contextlib.suppress(OSError):  # a full disk does not stop the run
        write_atomic(run / "environment.json", json.dumps(scrub(environment), indent=2) + "\n")


def describe_rank(
    rank: int, device: Any = "cpu", local_rank: int = 0, node: int = 0
) -> dict[str, Any]:
    import torch

    about = {
        "rank": rank,
        "local_rank": local_rank,
        "node": node,
        "host": socket.gethostname(),
        "device": str(device),
    }
    if not str(device).startswith("cuda"):
        return about | {"name": machine()["cpu"], "threads": torch.get_num_threads()}
    properties, nccl = (
        torch.cuda.get_device_properties(device),
        ".".join(map(str, torch.cuda.nccl.version())),
    )
    memory_mb = round(properties.total_memory / 1e6)
    return about | {
        "name": properties.name,
        "memory_mb": memory_mb,
        "cuda": torch.version.cuda,
        "nccl": nccl,
    }


def versions(ranks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of Windlass, Python and torch; on GPUs of CUDA and NCCL."""
    import torch

    packages = {
        "windlass": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return packages | {name: str(ranks[0][name]) for name in ("cuda", "nccl") if name in ranks[0]}


def describe_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The scheduler, the job's id and the machine's name; empty outside a job."""
    name, job = find_job(environ)
    if not job:
        return {}
    scheduler = SCHEDULERS[name]
    machine = environ.get(scheduler.MACHINE, "")
    named = {"machine": machine} if machine else {}
    return {"scheduler": scheduler.TITLE, "job": job, **named}


def describe_hosts(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each host: `n1: ranks 0-3, 4 x NVIDIA H200`."""
    hosts: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for rank in ranks:
        hosts.setdefault((rank["node"], rank["host"]), []).append(rank)
    lines = []
    for (_, host), here in hosts.items():
        first, last, count = here[0]["rank"], here[-1]["rank"], len(here)
        is_range = last - first + 1 == count > 1
        numbers = f"{first}-{last}" if is_range else ", ".join(str(rank["rank"]) for rank in here)
        lines.append(f"{host}: rank{'s' * (count > 1)} {numbers}, {count} x {here[0]['name']}")
    return lines


def describe_launch(
    launch: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
) -> dict[str, list[str]]:
    """What is shown where several ranks train, or a job: name and lines; `launch` is that of
    environment.json."""
    hosts = f"{launch['nodes']} host{'s' * (launch['nodes'] != 1)}"
    backend = f"{launch['backend']} between ranks" if launch["backend"] else "no process group"
    by = "as one process" if launch["launcher"] == "none" else f"by {launch['launcher']}"
    words = {"cuda": "CUDA", "nccl": "NCCL"}
    versions = ", ".join(
        f"{words.get(name, name)} {version}" for name, version in launch["versions"].items()
    )
    machine = f" on {launch['machine']}" if "machine" in launch else ""
    return {
        **(
            {"job": [f"{launch['scheduler']} job {launch['job']}{machine}"]}
            if "job" in launch
            else {}
        ),
        "launch": [
            f"{launch['world']} rank{'s' * (launch['world'] != 1)} on {hosts}, started {by}; {backend}"
        ],
        "hosts": describe_hosts(ranks),
        "with": [versions],
    }


def describe_places(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each rank's device and numbers, with the last number of each:
    `[cuda:1][rank=5/7][local_rank=1/3][node=1/1] n2`."""
    nodes = [rank["node"] for rank in ranks]
    place = "[{device}][rank={rank}/{ranks}][local_rank={local_rank}/{here}][node={node}/{nodes}] {host}"
    last = {"ranks": len(ranks) - 1, "nodes": max(nodes)}
    return [place.format(**rank, **last, here=nodes.count(rank["node"]) - 1) for rank in ranks]


def machine() -> dict[str, Any]:
    import psutil

    cpu = platform.processor() or platform.machine()
    with (
        contextlib.suppress(OSError, StopIteration),
        open("/proc/cpuinfo", encoding="utf-8") as file,
    ):
        cpu = next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    memory_mb = round(psutil.virtual_memory().total / 1e6)
    return {
        "host": socket.gethostname(),
        "cpu": cpu,
        "cores": psutil.cpu_count(logical=True),
        "memory_mb": memory_mb,
    }


def commit(directory: Path) -> dict[str, Any] | None:
    """The git commit that holds `directory`, and whether its tracked files were changed; None
    outside of a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(directory), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", "."
        )  # fails in a checkout of something else around an installed package
        return {
            "hash": git("rev-parse", "HEAD"),
            "changed": bool(git("status", "--porcelain", "-uno")),
        }
    except (OSError, subprocess.SubprocessError):
        return None
