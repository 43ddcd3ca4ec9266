"""`check`: what every rank finds on its host, compared over all ranks, then matrix products and
collectives."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import resource
import shutil
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from windlass import __version__
from windlass.errors import DONE, FAILED, NOT_MEASURED, TOO_SLOW
from windlass.parallel.dist import Ranks, init_ranks
from windlass.parallel.env import detect_env
from windlass.preflight import findings
from windlass.preflight.bandwidth import (
    BUFFERS,
    CPU_SIZES,
    GATE_SIZE,
    GPU_SIZES,
    collectives,
    matrix_products,
)
from windlass.preflight.findings import OK, PROBLEM, WARNING, Finding
from windlass.processes import nvml_handle
from windlass.recipe import Recipe

PROBE_BYTES = 64_000_000  # written and synchronised to measure a disk
CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class Check:
    """What a check came to.

    `ranks` are the facts of each rank, `rates` one row for each group, collective and size (`algbw`
    and `busbw` in GB/s), and `busbw` the bus bandwidth of the largest all-reduce over all ranks;
    None where there is one rank, or it failed.
    """

    findings: list[Finding]
    ranks: list[dict[str, Any]]
    rates: list[dict[str, Any]]
    busbw: float | None

    def exit_code(self, min_busbw: float = 0.0) -> int:
        """1 with a problem; else by the bandwidth asked for: 44 where it was not measured, 46 where
        it is lower."""
        if any(finding.status == PROBLEM for finding in self.findings):
            return FAILED
        if min_busbw and self.busbw is None:
            return NOT_MEASURED
        return TOO_SLOW if min_busbw and self.busbw is not None and self.busbw < min_busbw else DONE


def check(
    recipe: Recipe,
    *,
    max_bytes: int = 0,
    gate: bool = False,
    show: Callable[[str], None] = lambda text: None,
) -> Check:
    """Check machine, packages, disks and interconnect as one rank among those of the launcher;
    every rank gets the result.

    `recipe` gives device, directories and trackers; `max_bytes` is the largest message (0: 16 MiB
    on a CPU, 512 MiB on a GPU, and 4 GiB there with `gate`: a bandwidth is asked for). Takes
    seconds on one host, and minutes at most.
    """
    env = detect_env()
    with init_ranks(env, recipe.replace("parallel.strategy=auto")) as ranks:
        show("machine and packages")
        ranks.all_gather_object("ready", None)
        now = time.time()  # all ranks came out of the exchange within some hundredths of a second
        facts = {"time": now, **facts_of_rank(ranks, recipe)}
        _probe_disks(ranks, recipe, facts)
        show("matrix products")
        facts["tflops"] = matrix_products(ranks.device)
        rates = (
            measure_groups(ranks, message_sizes(ranks, max_bytes, gate), show)
            if env.world > 1
            else []
        )
        everyone = ranks.all_gather_object("facts", {**facts, "rates": rates})
    rates = _merge([one.pop("rates") for one in everyone])
    all_reduce = [r for r in rates if r["group"] == "all ranks" and r["collective"] == "all_reduce"]
    busbw = max(all_reduce, key=lambda r: r["size"])["busbw"] if all_reduce else None
    return Check(findings_of(everyone, rates, recipe, os.environ), everyone, rates, busbw)


def facts_of_rank(ranks: Ranks, recipe: Recipe) -> dict[str, Any]:
    """What this rank is and runs on: JSON values only."""
    package = Path(__file__).parents[1]
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(path.read_bytes())
    facts: dict[str, Any] = {
        "rank": ranks.rank,
        "node": ranks.env.node,
        "host": socket.gethostname(),
        "device": str(ranks.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "windlass": __version__,
        "code": code.hexdigest()[:12],
        "config": recipe.config_hash[:12],
        "cuda": torch.version.cuda or "",
        "platform": platform.platform(),
        "cuda_available": torch.cuda.is_available(),
        "gpus": torch.cuda.device_count(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shm_gb": None,
        "precisions": ["fp32"],
    }
    with contextlib.suppress(OSError):
        facts["shm_gb"] = shutil.disk_usage("/dev/shm").total / 1e9
    if ranks.device.type == "cuda":
        properties = torch.cuda.get_device_properties(ranks.device)
        facts |= {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "built_for": torch.cuda.get_arch_list(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "free_gb": torch.cuda.mem_get_info(ranks.device)[0] / 1e9,
            "total_gb": properties.total_memory / 1e9,
            "precisions": [
                "fp32",
                "fp16",
                *(["bf16"] if torch.cuda.is_bf16_supported(including_emulation=False) else []),
            ],
            **_nvml(ranks.device),
        }
    return facts


def _nvml(device: torch.device) -> dict[str, Any]:
    """The driver, uncorrected memory errors and the reasons why the clock is low, where NVML
    says."""
    facts: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # no library, or a driver that does not say
        import pynvml

        pynvml.nvmlInit()
        facts["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        handle = nvml_handle(pynvml, str(torch.cuda.get_device_properties(device).uuid))
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        slow = {"power brake": 0x80, "hardware slowdown": 0x08, "too hot": 0x20 | 0x40}
        facts["throttled"] = [name for name, bits in slow.items() if reasons & bits]
        kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        facts["ecc_errors"] = pynvml.nvmlDeviceGetTotalEccErrors(
            handle, kind, pynvml.NVML_VOLATILE_ECC
        )
    return facts


def _probe_disks(ranks: Ranks, recipe: Recipe, facts: dict[str, Any]) -> None:
    """Space and write speed of the run's and the data's directory, and whether a file of rank 0 is
    seen by this rank."""
    places = {"run directory": recipe.run_dir, "data directory": Path(recipe.data.dir or "data")}
    facts["disks"] = {}
    check = ranks.broadcast_object(
        "check", uuid.uuid4().hex
    )  # several jobs may check one directory at the same time
    for name, place in places.items():
        there = next(
            path for path in (place.absolute(), *place.absolute().parents) if path.is_dir()
        )
        mark, probe = (
            there / f".windlass-check-{check}",
            there / f".windlass-check-{check}-{ranks.rank}",
        )
        seconds = 0.0
        try:
            if ranks.main:
                mark.write_text(socket.gethostname())
            began = time.perf_counter()
            with probe.open("wb") as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
            seconds = time.perf_counter() - began
            error = ""
        except OSError as failure:
            error = failure.strerror or str(failure)
        ranks.all_gather_object("written", None)
        facts["disks"][name] = {
            "path": str(there),
            "free_gb": shutil.disk_usage(there).free / 1e9,
            "error": error,
            "shared": mark.exists(),
            "write_mb_s": PROBE_BYTES / 1e6 / seconds if seconds else 0.0,
        }
        ranks.all_gather_object("seen", None)
        for path in (probe, *([mark] if ranks.main else [])):
            path.unlink(missing_ok=True)


def message_sizes(ranks: Ranks, max_bytes: int, gate: bool) -> tuple[int, ...]:
    """The sizes to measure, in bytes: up to `max_bytes`, or up to what the ranks' memory holds of
    the default."""
    if ranks.device.type == "cpu":
        default: tuple[int, ...] = CPU_SIZES
        free = math.inf
    else:
        default = (*GPU_SIZES, GATE_SIZE) if gate else GPU_SIZES
        free = min(ranks.all_gather_object("free memory", torch.cuda.mem_get_info(ranks.device)[0]))
    if max_bytes:
        return (*(size for size in default if size < max_bytes), max_bytes)
    return tuple(size for size in default if BUFFERS * size <= free) or default[:1]


def measure_groups(
    ranks: Ranks, sizes: tuple[int, ...], show: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The collectives over all ranks; on several hosts also inside this host, and between hosts
    (one rank of each)."""
    places = ranks.all_gather_object("place", [ranks.env.node, ranks.env.local_rank])
    members: dict[str, dict[int, list[int]]] = {
        "one host": defaultdict(list),
        "between hosts": defaultdict(list),
    }
    for rank, (node, local_rank) in enumerate(places):
        members["one host"][node].append(rank)
        members["between hosts"][local_rank].append(rank)
    assert dist.group.WORLD is not None
    rates = [
        {"group": "all ranks", **row}
        for row in collectives(ranks.device, dist.group.WORLD, sizes, show)
    ]
    if ranks.env.nodes == 1:
        return rates
    for name, by_key in members.items():
        mine = None
        for group_ranks in by_key.values():  # every rank makes every group
            if len(group_ranks) > 1:
                group = dist.new_group(group_ranks)
                mine = group if ranks.rank in group_ranks else mine
        if mine is not None:
            rates += [
                {"group": name, **row} for row in collectives(ranks.device, mine, sizes, show)
            ]
        ranks.all_gather_object(name, None)
    return rates


def _merge(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each group, collective and size: the slowest rank's, with the bus bandwidth of
    each rank."""
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for rank, rates in enumerate(by_rank):
        for rate in rates:
            row = rows.setdefault(
                (rate["group"], rate["collective"], rate["size"]), {**rate, "ranks": {}}
            )
            row["ranks"][rank] = rate["busbw"]
            if rate["busbw"] < row["busbw"]:
                row |= {name: rate[name] for name in ("seconds", "algbw", "busbw")}
    return list(rows.values())


def findings_of(
    ranks: list[dict[str, Any]],
    rates: list[dict[str, Any]],
    recipe: Recipe,
    environ: Mapping[str, str],
) -> list[Finding]:
    """The findings from the facts of all ranks."""
    hosts = {one["rank"]: one["host"] for one in ranks}
    nodes = {one["node"]: one for one in reversed(ranks)}  # the first rank of each host
    results = same_everywhere(ranks, hosts)
    for one in ranks:
        where = f" (rank {one['rank']}, {one['host']})" if len(ranks) > 1 else ""
        results += [replace(x, name=f"{x.name}{where}") for x in gpu_findings(one)]
    if "cuda" in ranks[0]["device"] and "driver" in ranks[0]:
        results.append(findings.driver(ranks[0]["driver"], ranks[0]["cuda"]))
    precisions = set.intersection(*(set(one["precisions"]) for one in ranks))
    results.append(Finding("precisions", ", ".join(sorted(precisions))))
    results += disk_findings(ranks, hosts, len(nodes))
    for one in nodes.values():
        where = f" ({one['host']})" if len(nodes) > 1 else ""
        cuda = findings.cuda(one["cuda"], one["cuda_available"], one["gpus"], one["device"])
        limits = findings.limits(one["shm_gb"], one["files"])
        results += [replace(x, name=f"{x.name}{where}") for x in (cuda, *limits)]
    if len(nodes) > 1:
        times = [one["time"] for one in ranks]
        results.append(findings.clock(max(times) - min(times)))
    results += findings.nccl_variables(environ, len(nodes)) + services(recipe, environ)
    return results + slow_ranks(ranks, rates, hosts)


def same_everywhere(ranks: list[dict[str, Any]], hosts: dict[int, str]) -> list[Finding]:
    """Whether all ranks have the same code, recipe, platform (which may differ), Python and
    torch."""
    facts = {
        "Windlass": {r["rank"]: f"{r['windlass']} ({r['code']})" for r in ranks},
        "recipe": {r["rank"]: r["config"] for r in ranks},
        "platform": {r["rank"]: r["platform"] for r in ranks},
        "Python and torch": {r["rank"]: f"{r['python']}, {r['torch']}" for r in ranks},
    }
    same = [findings.same(name, by_rank, hosts) for name, by_rank in facts.items()]
    return [replace(x, status=OK, advice="") if x.name == "platform" else x for x in same]


def gpu_findings(one: dict[str, Any]) -> list[Finding]:
    """Architecture, memory, memory errors and clock rate of a rank's GPU; none on a CPU."""
    if "capability" not in one:
        return []
    major, minor, *_ = one["capability"]
    built = (one["built_for"], one["torch"], one["cuda"])
    memory = f"{one['free_gb']:,.1f} of {one['total_gb']:,.1f} GB free"
    new = [findings.architecture(one["name"], (major, minor), *built), Finding("memory", memory)]
    if errors := one.get("ecc_errors"):
        text = f"{errors} uncorrected errors"
        new.append(Finding("ECC", text, PROBLEM, "take this GPU out of use"))
    if reasons := one.get("throttled"):
        text = f"throttled: {', '.join(reasons)}"
        new.append(Finding("clock rate", text, WARNING, "the GPU is slowed down"))
    return new


def disk_findings(
    ranks: list[dict[str, Any]], hosts: dict[int, str], nodes: int
) -> Iterator[Finding]:
    """Whether the ranks can write to run and data directory, and how fast the slowest can."""
    for name, first in ranks[0]["disks"].items():
        disks = [one["disks"][name] for one in ranks]
        errors = {f"{d['error']} on {hosts[r]}" for r, d in enumerate(disks) if d["error"]}
        if errors:
            text = f"{first['path']}: {'; '.join(sorted(errors))}"
            advice = "make it writable, or give another run.dir or data.dir"
            yield Finding(name, text, PROBLEM, advice)
            continue
        slowest = min(d["write_mb_s"] for d in disks)
        shared = all(d["shared"] for d in disks)
        yield findings.disk(name, first["path"], first["free_gb"], slowest, shared, nodes)


def slow_ranks(
    ranks: list[dict[str, Any]], rates: list[dict[str, Any]], hosts: dict[int, str]
) -> list[Finding]:
    """A warning for each measurement in which a rank is much slower than the mean."""
    precisions = ranks[0]["tflops"]
    measured = {
        f"{name} matrix products": {r["rank"]: r["tflops"][name] for r in ranks}
        for name in precisions
    }
    for rate in rates:
        name = f"{rate['group']}, {rate['collective']} of {rate['size']:,} bytes"
        measured[name] = rate["ranks"]
    slow = []
    for name, by_rank in measured.items():
        if numbers := findings.outliers(by_rank):
            text = ", ".join(f"rank {n} on {hosts[n]}: {by_rank[n]:.3g}" for n in numbers)
            text += f"; mean {sum(by_rank.values()) / len(by_rank):.3g}"
            slow.append(Finding(f"slow: {name}", text, WARNING, "look at this host, or drop it"))
    return slow


def services(recipe: Recipe, environ: Mapping[str, str]) -> list[Finding]:
    """Whether the trackers and the Hub that the recipe needs can be reached from here."""
    wanted = {}
    if "wandb" in recipe.telemetry.trackers and environ.get("WANDB_MODE", "online") == "online":
        advice = "set WANDB_MODE=offline; `windlass track` sends it later"
        wanted["W&B"] = environ.get("WANDB_BASE_URL") or "https://api.wandb.ai", advice
    uri = environ.get("MLFLOW_TRACKING_URI", "")
    if "mlflow" in recipe.telemetry.trackers and uri.startswith("http"):
        wanted["MLflow"] = uri, "unset MLFLOW_TRACKING_URI to write to a local file"
    names = [recipe.model.name] if recipe.model.kind == "hf" else []
    names += (
        [recipe.data.tokenizer.removeprefix("hf:")]
        if recipe.data.tokenizer.startswith("hf:")
        else []
    )
    if any(name and not Path(name).exists() for name in names) and environ.get(
        "HF_HUB_OFFLINE", "0"
    ) in ("", "0"):
        advice = "download first, then set HF_HUB_OFFLINE=1"
        wanted["Hugging Face Hub"] = environ.get("HF_ENDPOINT") or "https://huggingface.co", advice
    results = []
    for name, (url, advice) in wanted.items():
        parts = urlsplit(url)
        try:
            address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection(address, CONNECT_SECONDS).close()
            results.append(Finding(name, f"{parts.hostname} can be reached"))
        except OSError as error:
            results.append(
                Finding(name, f"{parts.hostname} cannot be reached: {error}", WARNING, advice)
            )
    return results
