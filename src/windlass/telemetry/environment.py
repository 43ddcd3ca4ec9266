"""The environment of a run: versions, commit, hosts, devices, command. These are chosen facts, from
which `scrub` and `scrub_command` remove secrets before anything is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.errors import EXTRAS, plural
from windlass.fileio import write_atomic
from windlass.launch.schedulers import SCHEDULERS, find_job
from windlass.ledger import now
from windlass.variables import HIDDEN, SECRET_NAME, scrub

PACKAGES = (
    *("torch", "numpy", "pydantic", "tokenizers", "safetensors", "psutil", "nvidia-ml-py"),
    *(name for extra in EXTRAS.values() for name in extra),
)
# names of the variables that Windlass reports, beside the scheduler's
VARIABLE = re.compile(
    r"CUDA_VISIBLE_DEVICES|HF_HUB_OFFLINE|(CUBLAS|GLOO|MKL|NCCL|OMP|PYTORCH|TORCH_NCCL)_\w+"
)


def write_environment(run: Path, ranks: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Write environment.json for this start; `ranks`: of `describe_rank` on each rank."""
    packages = {"windlass": __version__}
    for name in PACKAGES:  # without importing them
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    logged = {name for scheduler in SCHEDULERS.values() for name in scheduler.LOGGED}
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
        "variables": {k: v for k, v in os.environ.items() if k in logged or VARIABLE.fullmatch(k)},
    }
    with contextlib.suppress(OSError):  # a full disk does not stop the run
        write_atomic(run / "environment.json", json.dumps(scrub(environment), indent=2) + "\n")


def scrub_command(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """A command line without secrets: also the values of `--api-key X`, `--token=X`,
    `some.password=X`."""
    shown = []
    hides_next = False  # whether the argument before is an option for a secret
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_option = argument.startswith("-")
        is_secret = bool(SECRET_NAME.search(name.lstrip("-")))
        if hides_next and not is_option:
            shown.append(HIDDEN)
        elif equals and is_secret:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(scrub(argument, environ))
        hides_next = is_secret and is_option and not equals
    return shown


def describe_rank(
    rank: int, device: Any = "cpu", local_rank: int = 0, node: int = 0, coordinates: str = ""
) -> dict[str, Any]:
    """The place of this rank, with the device's name and memory, or the CPU's name and threads.

    `coordinates`: in the mesh, as `pp 1, dp 0, tp 1`, if there are more than data ranks.
    """
    import torch

    place: dict[str, Any] = {"rank": rank, "local_rank": local_rank, "node": node}
    place |= {"host": socket.gethostname(), "device": str(device)}
    if coordinates:
        place["coordinates"] = coordinates
    if not str(device).startswith("cuda"):
        return place | {"name": machine()["cpu"], "threads": torch.get_num_threads()}
    gpu, nccl = torch.cuda.get_device_properties(device), torch.cuda.nccl.version()
    place |= {"name": gpu.name, "memory_mb": round(gpu.total_memory / 1e6)}
    return place | {"cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl))}


def describe_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The scheduler, the job's id and the machine's name; empty outside a job."""
    name, job = find_job(environ)
    if not job:
        return {}
    facts = {"scheduler": SCHEDULERS[name].TITLE, "job": job}
    if machine := environ.get(SCHEDULERS[name].MACHINE):
        facts["machine"] = machine
    return facts


def describe_launch(
    launch: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """The header's facts about several ranks or a job, with a line for each host, as `n1: ranks
    0-3, 4 x NVIDIA H200`. `launch`: from environment.json."""
    facts = dict[str, str]()
    if "job" in launch:
        machine = f" on {launch['machine']}" if "machine" in launch else ""
        facts["job"] = f"{launch['scheduler']} job {launch['job']}{machine}"
    counts = f"{plural(launch['world'], 'rank')} on {plural(launch['nodes'], 'host')}"
    by = "as one process" if launch["launcher"] == "none" else f"by {launch['launcher']}"
    backend = f"{launch['backend']} between ranks" if launch["backend"] else "no process group"
    facts["launch"] = f"{counts}, started {by}; {backend}"
    hosts: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for rank in ranks:
        hosts.setdefault((rank["node"], rank["host"]), []).append(rank)
    lines = []
    for (_, host), here in hosts.items():
        first, last, count = here[0]["rank"], here[-1]["rank"], len(here)
        numbers = f"rank {first}" if count == 1 else f"ranks {first}-{last}"
        lines.append(f"{host}: {numbers}, {count} x {here[0]['name']}")
    facts["hosts"] = "\n".join(lines)
    return facts


def describe_places(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each rank's device and numbers, with the last number of each:
    `[cuda:1][rank=5/7][local_rank=1/3][node=1/1] n2`; with its coordinates in the mesh, if any."""
    nodes = [rank["node"] for rank in ranks]
    lines = []
    for rank in ranks:
        coordinates = f" ({rank['coordinates']})" if "coordinates" in rank else ""
        lines.append(
            f"[{rank['device']}][rank={rank['rank']}/{len(ranks) - 1}]"
            f"[local_rank={rank['local_rank']}/{nodes.count(rank['node']) - 1}]"
            f"[node={rank['node']}/{max(nodes)}] {rank['host']}{coordinates}"
        )
    return lines


def machine() -> dict[str, Any]:
    import psutil

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if found := re.search(r"^model name\s*: *(.*)", info, re.MULTILINE):
            cpu = found[1].strip()
    memory_mb = round(psutil.virtual_memory().total / 1e6)
    cores = psutil.cpu_count()
    return {"host": socket.gethostname(), "cpu": cpu, "cores": cores, "memory_mb": memory_mb}


def commit(directory: Path) -> dict[str, Any] | None:
    """The git commit that holds `directory`, and whether its tracked files were changed; None
    outside a checkout."""
    git = ["git", "--no-optional-locks", "-C", str(directory)]
    options: dict[str, Any] = {"stderr": subprocess.DEVNULL, "text": True, "timeout": 5}
    try:
        # fails if the checkout around an installed package is another project's
        subprocess.check_output([*git, "ls-files", "--error-unmatch", "."], **options)
        describe = [*git, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
        described = subprocess.check_output(describe, **options).strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"hash": described.removesuffix("-dirty"), "changed": described.endswith("-dirty")}
