"""What a rank finds on its host, and how ranks are compared, as pure functions of facts. No torch.

Sources: the formulas of bus bandwidth are those of nccl-tests (doc/PERFORMANCE.md); the rule for
outliers, more than one standard deviation and a tenth off, follows Megatron-LM's GPU sniff test.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from windlass.parallel.architecture import code_for

OK, WARNING, PROBLEM = "ok", "warning", "problem"
OFF = 0.10  # of the mean, besides one standard deviation: from here on a rank is named
FULL_DISK_GB, SMALL_SHM_GB, FEW_FILES, SKEW_SECONDS = 10, 1, 4096, 2.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: `ok`, `warning`, or `problem` (training would fail)."""

    name: str
    text: str
    status: str = OK
    advice: str = ""


def bus_bandwidth(collective: str, size: int, seconds: float, world: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in GB/s of one collective over `size` bytes (nccl-tests' sizes
    and factors).

    `size` is what nccl-tests calls size: the whole buffer of an all-reduce, the gathered result of
    an all-gather, what goes into a reduce-scatter and an all-to-all, one message of a send and
    receive.
    """
    algorithm = size / seconds / 1e9
    part = (world - 1) / world
    return algorithm, algorithm * {"all_reduce": 2 * part, "send_recv": 1.0}.get(collective, part)


def outliers(values: Mapping[int, float]) -> list[int]:
    """The ranks whose value is under the mean by more than one standard deviation and by more than
    a tenth."""
    if len(values) < 3:  # of two, none is the odd one
        return []
    mean, deviation = statistics.mean(values.values()), statistics.pstdev(values.values())
    return sorted(
        rank
        for rank, value in values.items()
        if mean - value > deviation and mean - value > OFF * mean
    )


def architecture(
    name: str, capability: tuple[int, int], built_for: Sequence[str], torch: str, cuda: str
) -> Finding:
    """Whether this torch has code for this device (`built_for` as torch.cuda.get_arch_list gives
    it)."""
    text, advice = code_for(name, capability, built_for, torch, cuda)
    return Finding("device", text, PROBLEM if advice else OK, advice)


def driver(version: str, cuda: str) -> Finding:
    """Whether the NVIDIA driver is new enough for torch's CUDA (minor versions are compatible:
    NVIDIA's CUDA release notes)."""
    needed = {"11": "450.80", "12": "525.60", "13": "580"}.get(cuda.partition(".")[0], "0")
    have, least = (tuple(map(int, re.findall(r"\d+", text))) for text in (version, needed))
    text = f"driver {version}, torch's CUDA {cuda}"
    if have >= least:
        return Finding("driver", text)
    advice = f"CUDA {cuda} needs driver {needed} or newer: ask for it, or install a torch for an older CUDA"
    return Finding("driver", text, PROBLEM, advice)


def cuda(version: str, available: bool, gpus: int, device: str) -> Finding:
    """Whether torch can use CUDA here, and if the check ran on the CPU all the same, why."""
    if available:
        text = f"CUDA {version} is available: {gpus} GPU{'s' * (gpus != 1)}"
        return Finding(
            "CUDA",
            text
            if device.startswith("cuda")
            else f"{text}; the check uses the CPU, as the recipe says",
        )
    reason = (
        "torch was built without it"
        if not version
        else f"torch's CUDA {version} finds no driver or no GPU"
    )
    return Finding("CUDA", f"not available: {reason}")


def size_of(text: str) -> int:
    """Bytes of `4G`, `512M`, `64K` or a plain number; 0 for anything else."""
    match = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text)
    return int(match[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]] if match else 0


def disk(
    name: str, path: str, free_gb: float, write_mb_s: float, shared: bool, hosts: int
) -> Finding:
    """Space and speed of a directory, and whether all hosts see the same one."""
    text = f"{path}: {free_gb:,.0f} GB free, writes {write_mb_s:,.0f} MB/s"
    text += ", shared by all hosts" if hosts > 1 and shared else ""
    if hosts > 1 and not shared:
        status, advice = PROBLEM, "put it on a file system that all hosts share"
        if name == "data directory":
            status, advice = WARNING, f"{advice}, or `windlass prepare` the data on each host"
        return Finding(name, f"{text}; not every host sees it", status, advice)
    if free_gb < FULL_DISK_GB:
        return Finding(name, text, WARNING, "`windlass plan` says how much a run writes")
    return Finding(name, text)


def limits(shm_gb: float | None, files: int) -> list[Finding]:
    """/dev/shm (None: there is none) and the number of files that a process may open."""
    advice = "NCCL keeps its buffers there: start the container with --shm-size=8g"
    shm = (
        []
        if shm_gb is None
        else [_unless(shm_gb < SMALL_SHM_GB, "/dev/shm", f"{shm_gb:,.1f} GB", advice)]
    )
    return [
        *shm,
        _unless(
            files < FEW_FILES, "open files", f"{files:,} a process", f"ulimit -n {16 * FEW_FILES}"
        ),
    ]


def clock(skew: float) -> Finding:
    """The largest difference between the ranks' clocks, in seconds."""
    advice = "times in ledger and logs of different hosts cannot be compared"
    return _unless(
        skew > SKEW_SECONDS, "clock", f"the hosts' clocks differ by {skew:.2f} s at most", advice
    )


def _unless(bad: bool, name: str, text: str, advice: str) -> Finding:
    """`ok`, or a warning with its advice where it is `bad`."""
    return Finding(name, text, WARNING, advice) if bad else Finding(name, text)


def same(name: str, values: Mapping[int, str], hosts: Mapping[int, str]) -> Finding:
    """Whether all ranks have the same value; else the ranks of each, by host."""
    if len(set(values.values())) == 1:
        return Finding(name, f"{next(iter(values.values()))} on every rank")
    places = {
        value: sorted({hosts[r] for r in values if values[r] == value}) for value in values.values()
    }
    groups = [f"{value} on {', '.join(names)}" for value, names in places.items()]
    advice = "all ranks must run the same: install it once, on a file system that they share"
    return Finding(name, "; ".join(groups), PROBLEM, advice)


def nccl_variables(environ: Mapping[str, str], nodes: int) -> list[Finding]:
    """The NCCL variables that are set, with advice on those that slow a run down or hide its
    errors."""
    advice = {
        "NCCL_P2P_DISABLE": (
            "1",
            "turns NVLink and PCIe copies between devices off: for debugging only",
        ),
        "NCCL_IB_DISABLE": ("1", "turns InfiniBand off: between hosts TCP is several times slower"),
        "NCCL_SHM_DISABLE": ("1", "turns shared memory off: for debugging only"),
        "TORCH_NCCL_BLOCKING_WAIT": (
            "1",
            "makes the host wait for each collective: slower, and not needed for time limits",
        ),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
            "0",
            "a rank whose partner is gone would hang: leave it at its default",
        ),
        "NCCL_DEBUG": ("TRACE", "writes a line for each call: use WARN or INFO"),
    }
    findings = []
    for name in sorted(n for n in environ if n.startswith(("NCCL_", "TORCH_NCCL_"))):
        bad, why = advice.get(name, ("", ""))
        wrong = (
            bool(bad) and environ[name].upper() == bad and (name != "NCCL_IB_DISABLE" or nodes > 1)
        )
        findings.append(_unless(wrong, name, environ[name], why))
    return findings
