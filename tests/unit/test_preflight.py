"""What a check finds: pure functions of facts, and the verb on two real ranks."""

import json
import os
import platform
import pty
import socket
import subprocess

import pytest
import torch

from helpers import command, windlass
from windlass.parallel.dist import Ranks
from windlass.parallel.env import DistEnv
from windlass.preflight import check as preflight
from windlass.preflight import findings
from windlass.preflight.check import Check, _probe_disks, services
from windlass.preflight.findings import Finding
from windlass.recipe import Recipe

V100, H200, ARCHS = (7, 0), (9, 0), ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 1.75),
        ("all_gather", 0.875),
        ("reduce_scatter", 0.875),
        ("all_to_all", 0.875),
        ("send_recv", 1.0),
    ],
)
def test_bus_bandwidth_as_nccl_tests_has_it(collective, factor):
    """1 GB in half a second over 8 ranks."""
    assert findings.bus_bandwidth(collective, 10**9, 0.5, 8) == (2.0, 2.0 * factor)


def test_a_v100_gets_the_very_sentence():
    found = findings.architecture("Tesla V100", V100, ARCHS, "2.13.0", "12.8")
    assert found.status == "problem" and all(
        w in found.text for w in ("Tesla V100", "sm_70", "sm_75", "12.8")
    )
    assert "CUDA 12.6" in found.advice and "cu126" in found.advice
    assert (
        findings.architecture("Tesla V100", V100, ["sm_70", *ARCHS], "2.13.0", "12.6").status
        == "ok"
    )


@pytest.mark.parametrize(
    ("capability", "archs", "status"),
    [
        (H200, ARCHS, "ok"),
        ((8, 9), ARCHS, "ok"),
        ((8, 0), ["sm_86"], "problem"),
        ((12, 1), ["sm_90", "compute_90"], "ok"),
        ((3, 7), ARCHS, "problem"),
        (H200, ["sm_90a"], "ok"),
    ],
)
def test_other_devices(capability, archs, status):
    """Code for an earlier minor number runs, PTX of any earlier one is compiled; a K80 is not told of CUDA 12.6."""
    found = findings.architecture("X", capability, archs, "2.13.0", "12.8")
    assert found.status == status and ("12.6" in found.advice) == (
        status == "problem" and capability == V100
    )


def test_the_driver():
    """Its version is compared part by part: 105 is more than 60."""
    assert findings.driver("535.104.05", "12.6").status == "ok"
    assert findings.driver("525.105.17", "12.1").status == "ok"
    assert [findings.driver(v, "12.1").status for v in ("525.60.13", "525.60", "525.59.99")] == [
        "ok",
        "ok",
        "problem",
    ]
    assert (
        findings.driver("450.9", "11.8").status == "problem"
        and findings.driver("600.1", "14.0").status == "ok"
    )
    found = findings.driver("535.104.05", "13.0")
    assert found.status == "problem" and "580" in found.advice


def test_whether_cuda_is_available():
    text = findings.cuda("12.8", True, 2, "cuda:0").text
    assert text.startswith("CUDA 12.8 is available") and "2 GPUs" in text
    assert "uses the CPU" in findings.cuda("12.8", True, 1, "cpu").text
    assert all(
        "not available" in found.text and word in found.text and found.status == "ok"
        for found, word in (
            (findings.cuda("", False, 0, "cpu"), "built"),
            (findings.cuda("12.8", False, 0, "cpu"), "driver"),
        )
    )


def test_hosts_with_different_kernels_are_shown_and_are_no_problem():
    recipe, ranks = Recipe.load("quickstart"), Ranks(DistEnv(), torch.device("cpu"))
    facts = {**preflight.facts_of_rank(ranks, recipe), "time": 0.0, "disks": {}, "tflops": {}}
    two = [
        facts | {"rank": n, "node": n, "host": f"n{n}", "platform": f"Linux-6.{n}"} for n in (0, 1)
    ]
    found = {one.name: one for one in preflight.findings_of(two, [], recipe, {})}
    assert "Linux-6.1 on n1" in found["platform"].text and found["platform"].status == "ok"
    assert {"CUDA (n0)", "CUDA (n1)"} <= found.keys()


@pytest.mark.parametrize(
    ("device", "asked", "gate", "free", "largest"),
    [
        ("cuda", 0, False, 70e9, 2**29),
        ("cuda", 0, True, 70e9, 2**32),
        ("cuda", 0, True, 8e9, 2**29),
        ("cuda", 2**20, True, 70e9, 2**20),
        ("cpu", 0, True, 0, 2**24),
        ("cpu", 2**26, False, 0, 2**26),
    ],
)
def test_the_largest_message(monkeypatch, device, asked, gate, free, largest):
    """4 GiB on GPUs where a bandwidth is asked for, as published rates are; less where the memory does not hold that."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), 80e9))
    sizes = preflight.message_sizes(Ranks(DistEnv(), torch.device(device)), asked, gate)
    assert sizes[-1] == largest and list(sizes) == sorted(set(sizes))


def test_a_rank_that_is_off_is_named():
    even = {rank: 100.0 + rank for rank in range(8)}
    assert findings.outliers(even) == [] and findings.outliers({0: 1.0, 1: 9.0}) == []
    assert findings.outliers(even | {3: 60.0}) == [3]
    assert findings.outliers(even | {3: 93.0}) == [], "one standard deviation alone is not enough"
    assert findings.outliers({0: 100.0, 1: 100.0, 2: 200.0, 3: 50.0, 4: 80.0}) == [3], (
        "a tenth alone is not enough"
    )


def test_disks_limits_and_clocks():
    assert findings.disk("run directory", "/x", 500, 900, False, 1).status == "ok"
    assert findings.disk("run directory", "/x", 500, 900, False, 2).status == "problem"
    data = findings.disk("data directory", "/x", 500, 900, False, 2)
    assert data.status == "warning" and "windlass prepare" in data.advice, (
        "a copy on each host will do"
    )
    assert findings.disk("run directory", "/x", 5, 900, True, 2).status == "warning"
    assert [f.status for f in findings.limits(0.06, 1024)] == ["warning", "warning"]
    assert [f.status for f in findings.limits(None, 65536)] == ["ok"]
    assert findings.clock(0.1).status == "ok" and findings.clock(5.0).status == "warning"
    differ = findings.same("torch", {0: "2.13", 1: "2.13", 2: "2.11"}, {0: "a", 1: "a", 2: "b"})
    assert differ.status == "problem" and "2.13 on a" in differ.text and "2.11 on b" in differ.text


def test_variables_that_slow_a_run_down():
    environ = {
        "NCCL_IB_DISABLE": "1",
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "PATH": "/bin",
    }
    found = {f.name: f.status for f in findings.nccl_variables(environ, 2)}
    assert found == {
        "NCCL_DEBUG": "ok",
        "NCCL_IB_DISABLE": "warning",
        "TORCH_NCCL_BLOCKING_WAIT": "warning",
    }
    assert findings.nccl_variables({"NCCL_IB_DISABLE": "1"}, 1)[0].status == "ok"


def test_services_that_the_recipe_needs(tmp_path):
    recipe = Recipe.load("quickstart", ['telemetry.trackers=["wandb"]'])
    closed = {"WANDB_BASE_URL": "http://127.0.0.1:9"}
    assert [(f.name, f.status) for f in services(recipe, closed)] == [("W&B", "warning")]
    assert services(recipe, closed | {"WANDB_MODE": "offline"}) == []
    assert services(Recipe.load("quickstart"), {}) == []


def test_exit_codes():
    bad = Finding("x", "y", "problem")
    assert Check([bad], [], [], 9.0).exit_code() == 1 and Check([], [], [], None).exit_code() == 0
    assert [Check([], [], [], busbw).exit_code(5.0) for busbw in (None, 4.9, 5.0)] == [44, 46, 0]
    assert [findings.size_of(text) for text in ("4G", "64M", "1000", "4X")] == [
        4 * 2**30,
        64 * 2**20,
        1000,
        0,
    ]


@pytest.mark.dist
def test_check_on_two_ranks(tmp_path):
    done = windlass("check", "--world", "2", "--max-size", "1M", "--json", cwd=tmp_path)
    result = json.loads(done.stdout)
    assert {row["collective"] for row in result["rates"]} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "send_recv",
    }
    largest = max(
        (r for r in result["rates"] if r["collective"] == "all_reduce"), key=lambda r: r["size"]
    )
    assert (
        result["busbw"]
        == largest["busbw"]
        == pytest.approx(largest["size"] / largest["seconds"] / 1e9)
    )
    shown = {finding["name"]: finding["text"] for finding in result["findings"]}
    assert platform.system() in shown["platform"] and "available" in shown["CUDA"]
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1] and all(
        rank["tflops"]["float32"] > 0 for rank in result["ranks"]
    )
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    terminal, inner = pty.openpty()
    done = subprocess.run(
        command("check", "--min-busbw", "1"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=inner
    )
    assert done.returncode == 44 and b"NOT MEASURED" in done.stdout
    shown = os.read(terminal, 65536)
    assert b"matrix products" in shown and shown.endswith(b"\r\x1b[K"), (
        "the line of progress stands before the table"
    )


@pytest.mark.dist
def test_ranks_that_do_not_meet_measure_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = ("check", "quickstart", "parallel.startup_timeout_seconds=1", "--min-busbw", "1")
    assert "waited 1 s for rank 1" in windlass(*words, cwd=tmp_path, env=env, code=44).stderr


def test_two_checks_of_one_directory_do_not_meet(tmp_path, monkeypatch):
    """As of two jobs of an array: one begins and ends between the writing and the looking of the other."""
    recipe, exchange, facts = (
        Recipe.load("quickstart", [f"run.dir={tmp_path}", f"data.dir={tmp_path}"]),
        Ranks._exchange,
        {},
    )

    def another_check(ranks, name, value, senders):
        monkeypatch.setattr(Ranks, "_exchange", exchange)
        _probe_disks(Ranks(DistEnv(), torch.device("cpu")), recipe, {})
        return exchange(ranks, name, value, senders)

    def from_written_on(ranks, name, value, senders):
        return (
            another_check(ranks, name, value, senders)
            if "written" in name
            else exchange(ranks, name, value, senders)
        )

    monkeypatch.setattr(Ranks, "_exchange", from_written_on)
    _probe_disks(Ranks(DistEnv(), torch.device("cpu")), recipe, facts)
    assert [disk["shared"] for disk in facts["disks"].values()] == [True, True] and not list(
        tmp_path.iterdir()
    )
