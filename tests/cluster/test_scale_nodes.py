"""A scaling study over the hosts of a real SLURM: one array job for each number of hosts."""

import sys

import pytest
from launching import DDP
from slurm_cluster import Cluster, log_of

from windlass.fileio import read_json
from windlass.study.study import Study

pytestmark = [pytest.mark.dist, pytest.mark.full]


@pytest.mark.timeout(600)
def test_strong_scaling_over_two_hosts(cluster: Cluster, settings, tmp_path):
    """A cell measures the rates; the probe runs on the first host; a second call submits nothing."""
    path = tmp_path / "study"
    words = [*settings(None, **DDP), "parallel.device=cpu", "--nodes", "1,2"]
    command = [sys.executable, "-m", "windlass", "scale", "quickstart", *words, "--dir", str(path)]
    done = cluster.call(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    jobs = [read_json(path / "jobs" / f"{nodes}-nodes" / "job.json")["job"] for nodes in (1, 2)]
    logs = ""
    for nodes, job in zip((1, 2), jobs, strict=True):
        ended = cluster.wait(job, 300)
        logs += log_of(path / "jobs" / f"{nodes}-nodes")
        assert ended["JobState"] == "COMPLETED", logs + cluster.logs()
    study = Study.open(path)
    assert [result.state for result in study.results()] == ["finished"] * 2, logs
    for cell in study.cells:
        starts = [event for event in study.run_of(cell).events if event["event"] == "started"]
        assert {event["world"] for event in starts} == {cell.world} == {cell.nodes}
    machine = read_json(path / "machine.json")
    assert list(machine) == ["1x1", "2x2"]
    rates = {rate["collective"] for rate in machine["2x2"]["collectives"]}
    assert rates >= {"all_reduce", "all_gather"}
    (probe,) = (path / "probes").iterdir()
    assert read_json(probe / "probe.json")["state"] == "finished", logs
    assert [run.name for run in sorted(probe.glob("*")) if run.is_dir()] == ["0"]  # one rank a host
    assert "nothing to submit" in cluster.call(*command, cwd=tmp_path).stdout
    shown = cluster.call(sys.executable, "-m", "windlass", "scale", str(path), cwd=tmp_path)
    assert shown.returncode == 0 and shown.stdout.count("finished") >= 2, shown.stdout
