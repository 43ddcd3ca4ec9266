"""What a check finds: pure functions of facts, and the verb on two real ranks."""

import json
import os
import pty
import socket
import subprocess

import pytest
import torch

import forked
from helpers import command, windlass
from windlass.estimate.step import Collective
from windlass.parallel.env import DistEnv
from windlass.parallel.ranks import Ranks
from windlass.preflight import check as preflight
from windlass.preflight import findings
from windlass.preflight.check import PROBE_BYTES, Check, probe_disks, slowest
from windlass.preflight.findings import Finding, findings_of
from windlass.recipe import Recipe

V100, H200, ARCHS = (7, 0), (9, 0), ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


def test_bytes_on_the_bus_as_nccl_tests_has_them():
    """1 GB over 8 ranks."""
    factors = {"all_reduce": 1.75, "send_recv": 1.0}
    factors |= dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), 0.875)
    for collective, factor in factors.items():
        assert Collective(collective, 10**9, 1, 8).bus_bytes == factor * 10**9


def gpu(capability, archs, cuda="12.8"):
    facts = {"name": "X", "capability": capability, "built_for": archs, "torch": "2.13.0"}
    return next(findings.gpu_findings(facts | {"cuda": cuda, "free_gb": 1, "total_gb": 2}))


def test_which_devices_torch_has_code_for():
    """A V100 needs another wheel. A device runs code for an earlier minor number and compiles
    earlier PTX; CUDA 12.6 does not help a K80."""
    found = gpu(V100, ARCHS)
    assert found.status == "problem"
    assert all(word in found.text for word in ("sm_70", "sm_75", "12.8"))
    assert "CUDA 12.6" in found.advice and "cu126" in found.advice
    assert gpu(V100, ["sm_70", *ARCHS], "12.6").status == "ok"
    for capability, archs, status in (
        (H200, ARCHS, "ok"),
        ((8, 9), ARCHS, "ok"),
        ((8, 0), ["sm_86"], "problem"),
        ((12, 1), ["sm_90", "compute_90"], "ok"),
        ((3, 7), ARCHS, "problem"),
        (H200, ["sm_90a"], "ok"),
    ):
        found = gpu(capability, archs)
        assert found.status == status and "12.6" not in found.advice


@pytest.mark.parametrize(
    ("device", "gate", "free", "largest"),
    [
        ("cuda", False, 70e9, 2**29),
        ("cuda", True, 70e9, 2**32),
        ("cuda", True, 8e9, 2**29),
        ("cpu", True, 0, 2**24),
    ],
)
def test_the_largest_message(monkeypatch, device, gate, free, largest):
    """4 GiB on GPUs for a required bandwidth, like published rates; less if memory is short."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), 80e9))
    sizes = preflight.message_sizes(Ranks(DistEnv(), torch.device(device)), gate)
    assert sizes[-1] == largest and list(sizes) == sorted(set(sizes))


@pytest.mark.parametrize(
    ("name", "free_gb", "shared", "nodes", "status"),
    [
        ("run directory", 500, False, 1, "ok"),
        ("run directory", 500, False, 2, "problem"),
        ("data directory", 500, False, 2, "warning"),  # a copy on each host will do
        ("run directory", 5, True, 2, "warning"),
    ],
)
def test_disks(name, free_gb, shared, nodes, status):
    disk = {"path": "/x", "free_gb": free_gb, "write_mb_s": 900, "shared": True, "error": ""}
    found = findings.disk_finding(name, [("a", disk), ("b", disk | {"shared": shared})], nodes)
    assert found.status == status
    assert ("windlass prepare" in found.advice) == (name == "data directory")
    broken = findings.disk_finding(name, [("a", disk), ("b", disk | {"error": "read-only"})], nodes)
    assert broken.status == "problem" and "read-only on b" in broken.text


def test_limits_and_what_must_be_the_same():
    facts = {"cuda": "", "cuda_available": False, "shm_gb": 0.06, "files": 1024}
    assert [f.status for f in findings.host_findings(facts)] == ["ok", "warning", "warning"]
    ample = facts | {"shm_gb": None, "files": 65536}
    assert [f.status for f in findings.host_findings(ample)] == ["ok", "ok"]
    ranks = Ranks(DistEnv(), torch.device("cpu"))
    facts = {**preflight.facts_of_rank(ranks), "disks": {}, "tflops": {}}
    hosts = [{"rank": n, "node": n, "host": f"n{n}"} for n in (0, 1)]
    assert {"CUDA (n0)", "CUDA (n1)"} <= {f.name for f in findings_of([facts | h for h in hosts])}
    differ = findings.same_on_all(
        "torch", {0: "2.13", 1: "2.13", 2: "2.11"}, {0: "a", 1: "a", 2: "b"}
    )
    assert differ.status == "problem" and "2.13 on a" in differ.text and "2.11 on b" in differ.text


def test_the_slowest_rank_counts_and_the_exit_codes():
    row = {"group": "all ranks", "collective": "all_reduce", "size": 4}
    rates = [row | {"busbw": bus, "seconds": 1 / bus} for bus in (9.0, 3.0, 5.0)]
    other = row | {"size": 8, "busbw": 7.0}
    assert slowest([*rates, other]) == [rates[1], other]
    assert Check([Finding("x", "y", "problem")], [], [], 9.0).exit_code() == 1
    assert Check([], [], [], None).exit_code() == 0
    assert [Check([], [], [], busbw).exit_code(5.0) for busbw in (None, 4.9, 5.0)] == [44, 46, 0]


@pytest.mark.dist
def test_check_on_two_ranks(tmp_path):
    words = ["--world", "2", "--json"]
    done = windlass("check", "quickstart", "parallel.tensor=4", *words, cwd=tmp_path)
    result = json.loads(done.stdout)
    collectives = {"all_reduce", "all_gather", "reduce_scatter"}
    assert {row["collective"] for row in result["rates"]} == collectives
    reduces = [row for row in result["rates"] if row["collective"] == "all_reduce"]
    largest = max(reduces, key=lambda row: row["size"])
    rate = pytest.approx(largest["size"] / largest["seconds"] / 1e9)
    assert result["busbw"] == largest["busbw"] == rate
    shown = {finding["name"]: finding["text"] for finding in result["findings"]}
    assert "available" in shown["CUDA"]
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert all(rank["tflops"]["float32"] > 0 for rank in result["ranks"])
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    terminal, inner = pty.openpty()
    words = command("check", "--min-busbw", "1")
    done = forked.run(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=inner)
    assert done.returncode == 44 and b"NOT MEASURED" in done.stdout
    shown = os.read(terminal, 65536)  # the line of progress, which goes before the table
    assert b"matrix products" in shown and shown.endswith(b"\r\x1b[K")


@pytest.mark.dist
def test_ranks_that_do_not_meet_measure_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = ("check", "quickstart", "parallel.startup_timeout_seconds=1", "--min-busbw", "1")
    assert "waited 1 s for rank 1" in windlass(*words, cwd=tmp_path, env=env, code=44).stderr


def test_one_rank_of_each_host_measures_the_disk(tmp_path, monkeypatch):
    recipe = Recipe.load("quickstart", [f"run.dir={tmp_path}", f"data.dir={tmp_path}"])
    written = list[int]()
    monkeypatch.setattr(os, "fsync", lambda file: written.append(os.fstat(file).st_size))
    disks = list[dict]()
    for local_rank in range(3):
        ranks = Ranks(DistEnv(local_rank=local_rank), torch.device("cpu"))
        disks.append(probe_disks(ranks, recipe)["run directory"])
    assert written == [PROBE_BYTES] * 2, "rank 0, in both directories"
    found = findings.disk_finding("run directory", [("a", disk) for disk in disks], 1)
    assert f"{disks[0]['write_mb_s']:,.0f} MB/s" in found.text and disks[0]["shared"]


def test_two_checks_of_one_directory_do_not_meet(tmp_path, monkeypatch):
    """One task of an array begins and ends between the write and the look of another."""
    recipe = Recipe.load("quickstart", [f"run.dir={tmp_path}", f"data.dir={tmp_path}"])
    exchange, alone = Ranks._exchange, Ranks(DistEnv(), torch.device("cpu"))

    def another_check_when_written(ranks, name, *rest):
        if "written" in name:
            monkeypatch.setattr(Ranks, "_exchange", exchange)
            probe_disks(alone, recipe)
        return exchange(ranks, name, *rest)

    monkeypatch.setattr(Ranks, "_exchange", another_check_when_written)
    disks = probe_disks(alone, recipe)
    assert [disk["shared"] for disk in disks.values()] == [True, True]
    assert not list(tmp_path.iterdir())
