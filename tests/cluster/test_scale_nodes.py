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
    """Cells of 1 and 2 ranks on a host, and of 4 on two: each measures the rates, and the probe runs
    on its first host. A second call submits nothing.
    """
    path = tmp_path / "study"
    words = [*settings(None, **DDP), "parallel.device=cpu", "train.global_batch=8"]
    words += ["train.threads=1", "--nodes", "1,1,2", "--worlds", "1,2,4", "--dir", str(path)]
    windlass = [sys.executable, "-m", "windlass"]
    created = cluster.call(*windlass, "scale", "quickstart", *words, cwd=tmp_path)
    assert created.returncode == 0, created.stdout
    command = [*windlass, "submit", str(path)]
    done = cluster.call(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    jobs = [read_json(path / "jobs" / str(nodes) / "job.json")["job"] for nodes in (1, 2)]
    logs = ""
    for nodes, job in zip((1, 2), jobs, strict=True):
        ended = cluster.wait(job, 300)
        logs += log_of(path / "jobs" / str(nodes))
        assert ended["JobState"] == "COMPLETED", logs + cluster.logs()
    study = Study.open(path)
    assert [result.state for result in study.results()] == ["finished"] * 3, logs
    for cell in study.cells:
        starts = [event for event in study.run_of(cell).events if event["event"] == "started"]
        assert {event["world"] for event in starts} == {cell.world}
    assert [(cell.world, cell.nodes) for cell in study.cells] == [(1, 1), (2, 1), (4, 2)]
    for probe in sorted((path / "probes").iterdir()):
        assert read_json(probe / "probe.json")["state"] == "finished", logs
        # the ranks of one host
        assert [run.name for run in sorted(probe.glob("*")) if run.is_dir()] == ["0", "1"]
    assert "nothing to submit" in cluster.call(*command, cwd=tmp_path).stdout
    shown = cluster.call(*windlass, "scale", str(path), cwd=tmp_path)
    assert shown.returncode == 0 and shown.stdout.count("finished") >= 3, shown.stdout
