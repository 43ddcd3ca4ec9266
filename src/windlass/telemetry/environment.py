"""What a run ran on and with: versions, commit, hosts, devices, command; from lists of what may be told, never a dump."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from windlass.telemetry.ledger import now

PACKAGES = (
    "windlass", "torch", "numpy", "pydantic", "tokenizers", "tiktoken", "safetensors", "transformers", "datasets", "peft",
    "tensorboard", "mlflow", "wandb", "psutil", "nvidia-ml-py",
)  # fmt: skip
"""Packages whose versions are told."""

VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION",
    "PBS_JOBID", "HF_HUB_OFFLINE",
)  # fmt: skip
"""Environment variables that are told; none of them ever holds a secret."""

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"(^|[._-])((api|access|secret|private|auth)_?-?key|apikey|token|secret|passw(or)?d|passphrase|pwd|credentials?)$",
    re.IGNORECASE,
)
_SECRET_SHAPE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|sk-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{16}"
    r"|wandb_v\d_\w{16,}|xox[abpr]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
_URL_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_URL_QUERY = re.compile(
    r"([?&](?:[\w-]*(?:token|key|secret|signature|sig|password|credential))=)[^&#\s]+", re.IGNORECASE
)


def scrub(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Text without what looks like a secret: users in URLs, keys of well-known shapes, values of secret variables."""
    for name, value in (os.environ if environ is None else environ).items():
        if len(value) >= 8 and _SECRET_NAME.search(name):
            text = text.replace(value, HIDDEN)
    text = _URL_USER.sub(HIDDEN, text)
    text = _URL_QUERY.sub(rf"\1{HIDDEN}", text)
    return _SECRET_SHAPE.sub(HIDDEN, text)


def scrub_command(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """A command line without secrets: also the values of `--api-key X`, `--token=X`, `some.password=X`."""
    found, hide = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = bool(_SECRET_NAME.search(name.lstrip("-")))
        if hide and not argument.startswith("-"):
            found.append(HIDDEN)
        elif equals and secret:
            found.append(f"{name}={HIDDEN}")
        else:
            found.append(scrub(argument, environ))
        hide = secret and not equals and argument.startswith("-")
    return found


def scrub_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for a tracker: every text in them scrubbed."""
    return {
        key: scrub_settings(value) if isinstance(value, Mapping) else scrub(value) if isinstance(value, str) else value
        for key, value in settings.items()
    }


def describe(ranks: Iterable[Mapping[str, Any]] = (), command: Sequence[str] | None = None) -> dict[str, Any]:
    """The environment of this start of a run, as JSON.

    Args:
        ranks: What each rank says of itself (`describe_rank`), in the order of the ranks.
        command: The command line; None: this process's own.
    """
    return {
        "time": now(),
        "command": scrub_command(sys.orig_argv if command is None else command),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
        "commit": commit(Path(__file__).parent),
        "variables": {name: scrub(os.environ[name]) for name in VARIABLES if name in os.environ},
        "machine": machine(),
        "ranks": [dict(rank) for rank in ranks],
    }


def describe_rank(rank: int, device: Any = "cpu") -> dict[str, Any]:
    """Host and device of one rank."""
    found: dict[str, Any] = {"rank": rank, "host": socket.gethostname(), "device": str(device)}
    torch = sys.modules.get("torch")
    if torch is not None and str(device).startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        found |= {"name": properties.name, "memory_mb": round(properties.total_memory / 1e6)}
        found |= {
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _driver(),
        }
    else:
        found |= {"name": machine()["cpu"], "threads": torch.get_num_threads() if torch is not None else None}
    return found


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of the packages that are installed, without importing them."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def machine() -> dict[str, Any]:
    """Processor, cores and memory of this host."""
    import psutil

    return {
        "host": socket.gethostname(),
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=True),
        "memory_mb": round(psutil.virtual_memory().total / 1e6),
    }


def commit(directory: Path) -> dict[str, Any] | None:
    """The git commit that holds `directory`, and whether its tracked files were changed; None outside of a checkout."""
    head = _git(directory, "rev-parse", "HEAD")
    if head is None or _git(directory, "ls-files", "--error-unmatch", ".") is None:
        return None  # not a checkout, or a checkout of something else around an installed package
    return {"hash": head, "changed": bool(_git(directory, "status", "--porcelain", "--untracked-files=no"))}


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # no driver or library: not known, whatever it raises
        return None


def write_environment(run: Path, environment: Mapping[str, Any]) -> None:
    """Write `environment.json` whole or not at all; a disk that is full is no reason to stop."""
    target = Path(run) / "environment.json"
    temporary = target.with_suffix(".json.tmp")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, target)
