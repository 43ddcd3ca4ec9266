"""`check`: gathers facts on every rank, and times matrix products and collectives."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import platform
import resource
import shutil
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from windlass import __version__
from windlass.data.recipe_sources import root_of
from windlass.errors import DONE, FAILED, NOT_MEASURED, TOO_SLOW
from windlass.estimate.step import Collective
from windlass.parallel.env import detect_env
from windlass.parallel.ranks import Ranks, init_ranks
from windlass.preflight.findings import PROBLEM, Finding, findings_of
from windlass.recipe import Recipe
from windlass.recipe.strategies import NO_LAYOUT
from windlass.telemetry.environment import describe_rank

SECONDS, MOST_CALLS = 1.0, 20  # for each collective and size, after the warm-up
BUFFERS = 3  # of the message's size, that `collectives` and the backend hold
CPU_SIZES: tuple[int, ...] = (2**16, 2**20, 2**24)  # of messages, in bytes
# Published rates use 4 GiB, so a required bandwidth is measured with GATE_SIZE.
GPU_SIZES, GATE_SIZE = (2**20, 2**25, 2**29), 2**32
PROBE_BYTES = 64_000_000  # written and synchronised to measure a disk


def collectives(
    device: torch.device,
    group: dist.ProcessGroup,
    sizes: tuple[int, ...],
    show: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Time every collective at every size in bytes; every rank of `group` calls this.

    `size` is as `Collective` has it, `seconds` a median, `algbw` and `busbw` in GB/s.
    """
    world = dist.get_world_size(group)
    # torch 2.13 renamed these two, and warns about the old names
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    rows = []
    for size in sizes:
        count = max(1, size // 4 // world) * world  # float32
        whole, part = torch.ones(count, device=device), torch.ones(count // world, device=device)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, whole, group=group),
            "all_gather": partial(gather, whole, part, group=group),
            "reduce_scatter": partial(scatter, part, whole, group=group),
        }
        for name, call in calls.items():
            show(f"{name} {size:,} bytes")
            seconds = _median_seconds(call, device, group)
            bus_bytes = Collective(name, 4 * count, 1, world).bus_bytes
            row = {"collective": name, "size": 4 * count, "seconds": seconds}
            speeds = {"algbw": 4 * count / seconds / 1e9, "busbw": bus_bytes / seconds / 1e9}
            rows.append(row | speeds)
    return rows


def _median_seconds(
    call: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    def timed() -> float:
        wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        call()
        wait()
        return time.perf_counter() - start

    first = max(timed(), timed())  # warms up
    number = max(3, min(MOST_CALLS, int(SECONDS / max(first, 1e-6))))
    if group is not None:  # the ranks must make the same number of calls
        agreed = torch.tensor([number], device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
        number = int(agreed.item())
    return statistics.median(timed() for _ in range(number))


@dataclass(frozen=True)
class Check:
    """`ranks`: the facts of each rank; `rates`: a row for each group, collective and size; `busbw`:
    GB/s of the largest all-reduce over all ranks, None for one rank.
    """

    findings: list[Finding]
    ranks: list[dict[str, Any]]
    rates: list[dict[str, Any]]
    busbw: float | None

    def exit_code(self, min_busbw: float = 0.0) -> int:
        """1: a problem; 44: the required bandwidth was not measured; 46: it is lower; else 0."""
        if any(finding.status == PROBLEM for finding in self.findings):
            return FAILED
        if not min_busbw:
            return DONE
        if self.busbw is None:
            return NOT_MEASURED
        return TOO_SLOW if self.busbw < min_busbw else DONE


def check(recipe: Recipe, gate: bool, show: Callable[[str], None]) -> Check:
    """Check machine, packages, disks and interconnect; every rank of the launcher calls this and
    gets the result. It takes seconds on one host, minutes at most.

    The largest message has 16 MiB on a CPU and 512 MiB on a GPU, or 4 GiB with `gate`, because
    the caller requires a bandwidth.
    """
    env = detect_env()
    with init_ranks(env, recipe.replace("parallel.strategy=auto", NO_LAYOUT)) as ranks:
        show("machine and packages")
        facts = {**facts_of_rank(ranks), "disks": probe_disks(ranks, recipe)}
        show("matrix products")
        facts["tflops"] = dict[str, float]()
        dtypes, size = [torch.float32], 1024  # and on a GPU bf16 (fp16 if it lacks bf16)
        if ranks.device.type == "cuda":
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            dtypes, size = [*dtypes, torch.bfloat16 if has_bf16 else torch.float16], 8192
        for dtype in dtypes:
            a, b = (torch.randn(size, size, device=ranks.device, dtype=dtype) for _ in range(2))
            seconds = _median_seconds(partial(torch.matmul, a, b), ranks.device)
            name = str(dtype).removeprefix("torch.")
            facts["tflops"][name] = 2 * size**3 / seconds / 1e12
        rates = list[dict[str, Any]]()
        if env.world > 1:
            rates = measure_groups(ranks, message_sizes(ranks, gate), show)
        everyone = ranks.all_gather_object("facts", facts)
        rates = slowest(itertools.chain(*ranks.all_gather_object("rates", rates)))
    all_reduce = [r for r in rates if r["group"] == "all ranks" and r["collective"] == "all_reduce"]
    busbw = max(all_reduce, key=lambda r: r["size"])["busbw"] if all_reduce else None
    return Check(list(findings_of(everyone)), everyone, rates, busbw)


def facts_of_rank(ranks: Ranks) -> dict[str, Any]:
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    facts: dict[str, Any] = {
        **describe_rank(ranks.rank, ranks.device, ranks.env.local_rank, ranks.env.node),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "windlass": __version__,
        "code": code.hexdigest()[:12],
        "cuda": torch.version.cuda or "",
        "cuda_available": torch.cuda.is_available(),
        "gpus": torch.cuda.device_count(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shm_gb": None,
    }
    with contextlib.suppress(OSError):
        facts["shm_gb"] = shutil.disk_usage("/dev/shm").total / 1e9
    if ranks.device.type == "cuda":
        properties = torch.cuda.get_device_properties(ranks.device)
        facts |= {
            "capability": [properties.major, properties.minor],
            "built_for": torch.cuda.get_arch_list(),
            "free_gb": torch.cuda.mem_get_info(ranks.device)[0] / 1e9,
            "total_gb": properties.total_memory / 1e9,
        }
        with contextlib.suppress(Exception):  # no library, or the driver does not answer
            import pynvml as nvml

            nvml.nvmlInit()
            facts["driver"] = str(nvml.nvmlSystemGetDriverVersion())
    return facts


def probe_disks(ranks: Ranks, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Space and write speed of the directories, and whether each rank sees a file of rank 0."""
    places = {"run directory": recipe.run_dir, "data directory": root_of(recipe)}
    # several jobs may check one directory at the same time
    check = ranks.broadcast_object("check", uuid.uuid4().hex)
    disks = dict[str, dict[str, Any]]()
    for name, place in places.items():
        parents = (place.absolute(), *place.absolute().parents)
        directory = next(path for path in parents if path.is_dir())
        mark = directory / f".windlass-check-{check}"
        probe = directory / f".windlass-check-{check}-{ranks.rank}"
        speed, error = None, ""
        try:
            if ranks.main:
                mark.touch()
            if ranks.env.local_rank == 0:
                start = time.perf_counter()
                with probe.open("wb") as file:
                    file.write(bytes(PROBE_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
                speed = PROBE_BYTES / 1e6 / (time.perf_counter() - start)
        except OSError as failure:
            error = failure.strerror or str(failure)
        ranks.all_gather_object("written", None)
        free_gb = shutil.disk_usage(directory).free / 1e9
        disks[name] = {"path": str(directory), "free_gb": free_gb, "error": error}
        disks[name] |= {"shared": mark.exists(), "write_mb_s": speed}
        ranks.all_gather_object("seen", None)
        for path in (probe, *([mark] if ranks.main else [])):
            path.unlink(missing_ok=True)
    return disks


def message_sizes(ranks: Ranks, gate: bool) -> tuple[int, ...]:
    """The sizes to measure in bytes, as far as they fit into all memories."""
    default, free = CPU_SIZES, math.inf
    if ranks.device.type == "cuda":
        default = (*GPU_SIZES, GATE_SIZE) if gate else GPU_SIZES
        free = min(ranks.all_gather_object("free memory", torch.cuda.mem_get_info(ranks.device)[0]))
    return tuple(size for size in default if BUFFERS * size <= free) or default[:1]


def measure_groups(
    ranks: Ranks, sizes: tuple[int, ...], show: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Time the collectives over all ranks, inside each host, and between hosts (a rank of each)."""
    assert dist.group.WORLD is not None
    groups: dict[str, dist.ProcessGroup | None] = {"all ranks": dist.group.WORLD}
    if ranks.env.nodes > 1:
        places = ranks.all_gather_object("place", (ranks.env.node, ranks.env.local_rank))
        for i, name in enumerate(("one host", "between hosts")):
            members = defaultdict[int, list[int]](list)
            for rank, place in enumerate(places):
                members[place[i]].append(rank)
            if several := [group for group in members.values() if len(group) > 1]:
                groups[name], _ = dist.new_subgroups_by_enumeration(several)
    rates = []
    for name, group in groups.items():
        if group is not None:
            rows = collectives(ranks.device, group, sizes, show)
            rates += [{"group": name, **row} for row in rows]
        ranks.all_gather_object(name, None)
    return rates


def slowest(rates: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The slowest rank's row for each group, collective and size."""
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in rates:
        key = row["group"], row["collective"], row["size"]
        rows[key] = min(rows.get(key, row), row, key=lambda row: row["busbw"])
    return list(rows.values())
