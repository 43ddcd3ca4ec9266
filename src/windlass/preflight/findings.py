"""What the facts of a check mean: for each a finding, with advice if it is bad. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.errors import plural

OK, WARNING, PROBLEM = "ok", "warning", "problem"
FULL_DISK_GB, SMALL_SHM_GB, FEW_FILES = 10, 1, 4096  # less than this is a warning


@dataclass(frozen=True)
class Finding:
    """One result of a check: `ok`, `warning`, or `problem` (training would fail)."""

    name: str
    text: str
    status: str = OK
    advice: str = ""


def warn_if(bad: bool, name: str, text: str, advice: str) -> Finding:
    return Finding(name, text, WARNING, advice) if bad else Finding(name, text)


def findings_of(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """The findings from the facts of all ranks (`facts_of_rank`), in the order to show."""
    hosts = {one["rank"]: one["host"] for one in ranks}
    nodes = {one["node"]: one for one in reversed(ranks)}  # the first rank of each host
    code = {one["rank"]: f"{one['windlass']} ({one['code']})" for one in ranks}
    versions = {one["rank"]: f"{one['python']}, {one['torch']}" for one in ranks}
    yield same_on_all("Windlass", code, hosts)
    yield same_on_all("Python and torch", versions, hosts)
    for one in ranks:
        where = f" (rank {one['rank']}, {one['host']})" if len(ranks) > 1 else ""
        yield from (replace(x, name=f"{x.name}{where}") for x in gpu_findings(one))
    if "driver" in ranks[0]:
        yield Finding("driver", f"{ranks[0]['driver']}, torch's CUDA {ranks[0]['cuda']}")
    for name in ranks[0]["disks"]:
        yield disk_finding(name, [(one["host"], one["disks"][name]) for one in ranks], len(nodes))
    for one in nodes.values():
        where = f" ({one['host']})" if len(nodes) > 1 else ""
        yield from (replace(x, name=f"{x.name}{where}") for x in host_findings(one))


def same_on_all(name: str, values: Mapping[int, str], hosts: Mapping[int, str]) -> Finding:
    """Whether all ranks have the same value; else the hosts of each value."""
    places: dict[str, set[str]] = {}
    for rank, value in values.items():
        places.setdefault(value, set()).add(hosts[rank])
    if len(places) == 1:
        return Finding(name, f"{next(iter(places))} on every rank")
    groups = [f"{value} on {', '.join(sorted(names))}" for value, names in places.items()]
    advice = "all ranks must run the same: install it once, on a file system that they share"
    return Finding(name, "; ".join(groups), PROBLEM, advice)


def disk_finding(name: str, disks: Sequence[tuple[str, Mapping[str, Any]]], nodes: int) -> Finding:
    """Whether ranks can write to a directory, how fast the slowest does, and if all hosts see it.

    `disks`: each rank's host and facts; only the first rank of a host has a `write_mb_s`.
    """
    first = disks[0][1]
    errors = {f"{disk['error']} on {host}" for host, disk in disks if disk["error"]}
    if errors:
        text = f"{first['path']}: {'; '.join(sorted(errors))}"
        advice = "make it writable, or set another run.dir or data.dir"
        return Finding(name, text, PROBLEM, advice)
    slowest = min(disk["write_mb_s"] for _, disk in disks if disk["write_mb_s"])
    shared = all(disk["shared"] for _, disk in disks)
    text = f"{first['path']}: {first['free_gb']:,.0f} GB free, writes {slowest:,.0f} MB/s"
    if nodes > 1 and not shared:
        status, advice = PROBLEM, "put it on a file system that all hosts share"
        if name == "data directory":
            status, advice = WARNING, f"{advice}, or `windlass prepare` the data on each host"
        return Finding(name, f"{text}; some hosts do not see it", status, advice)
    text += ", shared by all hosts" if nodes > 1 else ""
    advice = "`windlass plan` says how much a run writes"
    return warn_if(first["free_gb"] < FULL_DISK_GB, name, text, advice)


def host_findings(one: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether torch can use CUDA on a rank's host, the size of /dev/shm, and its open files."""
    version, shm_gb, files = one["cuda"], one["shm_gb"], one["files"]
    text = "not available: torch was built without it"
    if version:
        text = f"not available: torch's CUDA {version} finds no GPU, or no driver new enough"
    if one["cuda_available"]:
        text = f"CUDA {version} is available: {plural(one['gpus'], 'GPU')}"
        if not one["device"].startswith("cuda"):
            text += "; by this recipe the check uses the CPU"
    yield Finding("CUDA", text)
    if shm_gb is not None:
        advice = "NCCL keeps its buffers there: start the container with --shm-size=8g"
        yield warn_if(shm_gb < SMALL_SHM_GB, "/dev/shm", f"{shm_gb:,.1f} GB", advice)
    text, advice = f"{files:,} a process", f"ulimit -n {16 * FEW_FILES}"
    yield warn_if(files < FEW_FILES, "open files", text, advice)


def gpu_findings(one: Mapping[str, Any]) -> Iterator[Finding]:
    """Architecture and memory of a rank's GPU; none for a CPU."""
    if "capability" not in one:
        return
    capability, wheel = tuple(one["capability"]), f"torch {one['torch']} for CUDA {one['cuda']}"
    own, runs = f"sm_{capability[0]}{capability[1]}", False
    # A device runs code for an earlier minor number of its generation, and compiles PTX
    # (`compute_`) of any earlier one.
    for architecture in one["built_for"]:
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", architecture):
            version = int(match[2]), int(match[3])
            compiles = match[1] == "compute" or version[0] == capability[0]
            runs = runs or (compiles and version <= capability)
    if runs:
        yield Finding("device", f"{one['name']} ({own}); {wheel} has code for it")
    else:
        remedy = f"install a torch whose wheel was built for {own}"
        if (5, 0) <= capability <= (7, 0):
            index = "install torch from the index whose name ends in cu126"
            remedy = f"the wheels of the same torch for CUDA 12.6 have it: {index}"
        built = f"{wheel} was built for {', '.join(one['built_for'])} only"
        yield Finding("device", f"{one['name']} is {own}, and {built}", PROBLEM, remedy)
    yield Finding("memory", f"{one['free_gb']:,.1f} of {one['total_gb']:,.1f} GB free")
