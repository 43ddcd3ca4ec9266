"""Under a real SLURM of two nodes: who is a rank, and a batch job that is told to stop and resumes."""

import ast
import shlex
import sys
from pathlib import Path

import pytest
from launching import LONG, TRAIN
from slurm_cluster import NODES, Cluster

from helpers import wait_for
from windlass.run import Run

pytestmark = pytest.mark.dist

SHOW = """from dataclasses import asdict; from windlass.parallel.env import detect_env
print(asdict(detect_env()))"""


def batch_script(path: Path, *lines: str) -> Path:
    options = ["--nodes=2", "--ntasks-per-node=1", "--open-mode=append", "--requeue"]
    options += [f"--output={path.parent}/job-%j.out"]
    lines = ("#!/bin/bash", *(f"#SBATCH {option}" for option in options), *lines, "")
    path.write_text("\n".join(lines))
    return path


def test_who_is_a_rank(cluster: Cluster, tmp_path):
    """The tasks of srun are; the shell of the batch job, with the same job's variables, is not."""
    show = shlex.join([sys.executable, "-c", SHOW])
    lines = ["echo $SLURM_PROCID of $SLURM_NTASKS", show, f"srun {show}", f"srun -n1 -N1 {show}"]
    job = cluster.submit(batch_script(tmp_path / "job.sh", *lines))
    assert cluster.wait(job)["JobState"] == "COMPLETED", cluster.logs()
    first, *lines = (tmp_path / f"job-{job}.out").read_text().splitlines()
    # srun may say that it waits
    shell, *ranks, alone = (ast.literal_eval(line) for line in lines if line.startswith("{"))
    assert first == "0 of 2", "the batch shell has the variables of a rank"
    assert (shell["world"], shell["launcher"]) == (alone["world"], alone["launcher"]) == (1, "none")
    keys = ("rank", "world", "local_rank", "local_world", "node", "nodes", "launcher", "addr")
    assert sorted([one[key] for key in keys] for one in ranks) == [
        [0, 2, 0, 1, 0, 2, "slurm", NODES[0]],
        [1, 2, 0, 1, 1, 2, "slurm", NODES[0]],
    ]
    assert ranks[0]["port"] == ranks[1]["port"] > 0


@pytest.mark.full
@pytest.mark.parametrize("requeued", [False, True])
def test_a_stopped_batch_job_resumes(cluster: Cluster, settings, tmp_path, requeued):
    """After SIGTERM it saves and requeues itself, or the same script is submitted again."""
    run = Run(tmp_path / "run")
    again = "[ $code = 75 ] && scontrol requeue $SLURM_JOB_ID" if requeued else ""
    lines = (f"srun {shlex.join([*TRAIN, *settings(run.path, **LONG)])}", "code=$?")
    script = batch_script(tmp_path / "job.sh", *lines, again, "exit $code")
    job = cluster.submit(script)
    wait_for(lambda: run.path.exists() and run.lines("train"), 150)
    done = cluster.call("scancel", *(["--signal=TERM"] if requeued else []), job)
    assert done.returncode == 0, done.stdout
    if not requeued:
        assert cluster.wait(job)["JobState"] == "CANCELLED" and run.state == "preempted"
        job = cluster.submit(script)
    output = tmp_path / f"job-{job}.out"
    assert cluster.wait(job)["JobState"] == "COMPLETED", output.read_text() + cluster.logs()
    assert run.state == "finished"
    [stopped] = [e for e in run.events if e["event"] == "preempted"]
    [resumed] = [e for e in run.events if e["event"] == "resumed"]
    # whichever rank 0 saw first
    assert stopped["saved"] and stopped["reason"] in ("SIGTERM", "a stop signal on another rank")
    assert 0 < resumed["step"] == stopped["step"] < 400 and resumed["world"] == 2
    steps = [line["step"] for line in run.lines("train")]
    assert steps[-1] == 400 and len(set(steps)) == len(steps)
