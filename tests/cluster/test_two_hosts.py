"""Two hosts with addresses of their own, as network namespaces joined by a cable: torchrun over
both, and the cable is cut.
"""

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launching import DDP, LONG, assert_same

from helpers import wait_for
from windlass.fileio import read_json
from windlass.run import Run

pytestmark = pytest.mark.dist
PORTS = itertools.count(29_600)
TORCHRUN = [sys.executable, *"-m torch.distributed.run --nnodes 2 --nproc-per-node 1".split()]
TORCHRUN += ["--master-addr", "10.77.0.1"]


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip())


@dataclass
class TwoHosts:
    """`names[i]` is a namespace whose only way out is one end of a cable, with the address
    `10.77.0.{i + 1}`.
    """

    names: list[str]
    started: list[subprocess.Popen] = field(default_factory=list)

    def train(
        self, settings: list[str], log: Path, hidden: Path | None = None
    ) -> list[subprocess.Popen]:
        """`torchrun` on both hosts, one rank each; the second host has a disk of its own at
        `hidden`.
        """
        port = str(next(PORTS))
        processes = []
        for number, name in enumerate(self.names):
            words = ["ip", "netns", "exec", name]
            if number and hidden:
                words += [*"unshare -m sh -c".split(), 'mount -t tmpfs none "$0" && exec "$@"']
                words.append(str(hidden))
            words += [*TORCHRUN, "--node-rank", str(number), "--master-port", port]
            words += [*"-m windlass train quickstart".split(), *settings]
            with Path(f"{log}-{number}").open("w") as out:
                environ = os.environ | {"WINDLASS_QUIET_END": "1", "OMP_NUM_THREADS": "1"}
                pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
                processes.append(subprocess.Popen(words, env=environ, **pipes))
        self.started += processes
        return processes

    def cable(self, state: str) -> None:
        ip("-n", self.names[1], "link", "set", "cable", state)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and Debian's package iproute2")
    two = TwoHosts([f"windlass-{os.getpid()}-{end}" for end in "ab"])
    try:
        try:
            for name in two.names:
                ip("netns", "add", name)
            link = "link add cable type veth peer name cable netns".split()
            ip("-n", two.names[0], *link, two.names[1])
            for number, name in enumerate(two.names):
                ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    ip("-n", name, "link", "set", device, "up")
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield two
    finally:
        for process in two.started:
            process.kill()
            process.wait()
        for name in two.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def text(log: Path) -> str:
    return "\n".join(Path(f"{log}-{number}").read_text(errors="replace") for number in (0, 1))


def test_torchrun_over_two_hosts(hosts, settings, tmp_path, two_local_ranks):
    log = tmp_path / "log"
    for process in hosts.train(settings(tmp_path / "run", **DDP), log):
        assert process.wait(150) == 0, text(log)
    assert_same(tmp_path / "run", two_local_ranks)
    assert "2 ranks on 2 hosts, started by torchrun; gloo between ranks" in text(log)
    environment = read_json(tmp_path / "run" / "environment.json")
    launch = environment["launch"]
    assert (launch["world"], launch["nodes"], launch["backend"]) == (2, 2, "gloo")
    assert environment["packages"]["torch"]
    lines = Run(tmp_path / "run").log_path.read_text().splitlines()
    places = [line for line in lines if "[rank=" in line]
    assert "[cpu][rank=0/1][local_rank=0/0][node=0/1]" in places[0]
    assert "[rank=1/1][local_rank=0/0][node=1/1]" in places[1]


@pytest.mark.full  # tests/dist/test_training_directory_ranks.py has two ranks of one host
def test_a_run_directory_that_one_host_does_not_see(hosts, settings, tmp_path):
    """One message, before anything is prepared; nothing hangs, and nothing is left behind."""
    own = tmp_path / "own"
    own.mkdir()
    places = {"run.dir": own / "x", "data.dir": tmp_path / "data"}
    began = time.monotonic()
    words = settings(None, **DDP, **{name: str(path) for name, path in places.items()})
    for process in hosts.train(words, tmp_path / "log", hidden=own):
        assert process.wait(100) == 1, text(tmp_path / "log")  # torchrun's code for any failure
    assert time.monotonic() - began < 60
    output = text(tmp_path / "log")
    for words in (f"windlass: run.dir: {own}/x of", "(rank 1)", "run.dir=PATH"):
        assert words in output, output
    assert list(own.iterdir()) == [] and not any(path.exists() for path in places.values())


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_cut_cable_ends_both_sides_and_a_restart_resumes(hosts, settings, tmp_path):
    """Nothing closes a connection: each side notices by itself, within the time for a collective or
    six heartbeats.
    """
    run, log = Run(tmp_path / "run"), tmp_path / "log"
    quick = {"parallel.heartbeat_seconds": 1, "parallel.timeout_seconds": 20}
    quick |= {"checkpoint.every": 10, "train.steps": 300}
    long = settings(run.path, **(LONG | quick))
    both = hosts.train(long, log)
    wait_for(lambda: list(run.checkpoints_dir.glob("step-*")), 200)
    hosts.cable("down")
    cut = time.monotonic()
    for process in both:
        assert process.wait(90) == 1, text(log)
    assert time.monotonic() - cut < 60
    for number in (0, 1):
        own = Path(f"{log}-{number}").read_text(errors="replace")
        assert any("windlass: rank" in line and "lost" in line for line in own.splitlines()), own
    hosts.cable("up")
    for process in hosts.train(long, tmp_path / "again"):
        assert process.wait(200) == 0, text(tmp_path / "again")
    steps = [line["step"] for line in run.lines("train")]
    assert run.state == "finished" and steps[-1] == 300 and len(set(steps)) == len(steps)
    assert next(e["step"] for e in run.events if e["event"] == "resumed") >= 10
