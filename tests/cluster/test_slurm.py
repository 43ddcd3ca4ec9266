"""Under a real SLURM of two nodes: srun, a batch job that is told to stop and resumes."""

import ast
import shlex
import sys
from pathlib import Path

import pytest
from launching import DDP, LONG, TRAIN, assert_same
from slurm_cluster import NODES, Cluster

from helpers import wait_for
from windlass.run import Run

pytestmark = pytest.mark.dist

SHOW = "from dataclasses import asdict; from windlass.parallel.env import detect_env; print(asdict(detect_env()))"


def batch_script(path: Path, *lines: str, head: tuple[str, ...] = ()) -> Path:
    options = ["--nodes=2", "--ntasks-per-node=1", "--open-mode=append", *head]
    options += [f"--output={path.parent}/job-%j.out"]
    lines = ("#!/bin/bash", *(f"#SBATCH {option}" for option in options), *lines, "")
    path.write_text("\n".join(lines))
    return path


def test_srun_trains_over_two_nodes(cluster: Cluster, settings, tmp_path, two_local_ranks):
    done = cluster.call("srun", "-N2", "-n2", *TRAIN, *settings(tmp_path / "run", **DDP))
    assert done.returncode == 0, done.stdout + cluster.logs()
    assert_same(tmp_path / "run", two_local_ranks)


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
@pytest.mark.parametrize("how", ["signal", "cancel", "requeue"])
def test_a_stopped_batch_job_resumes(cluster: Cluster, settings, tmp_path, how):
    """Told to stop it saves; the same script, submitted again or requeued by itself, goes on to the
    end.
    """
    run = Run(tmp_path / "run")
    again = "[ $code = 75 ] && scontrol requeue $SLURM_JOB_ID" if how == "requeue" else ""
    line = f"srun {shlex.join([*TRAIN, *settings(run.path, **LONG)])}"
    lines = (line, "code=$?", again, "exit $code")
    script = batch_script(tmp_path / "job.sh", *lines, head=("--requeue",))
    job = cluster.submit(script)
    output = tmp_path / f"job-{job}.out"
    wait_for(lambda: run.path.exists() and run.lines("train"), 150)
    done = cluster.call("scancel", *([] if how == "cancel" else ["--signal=TERM"]), job)
    assert done.returncode == 0, done.stdout
    if how != "requeue":
        ended, state = cluster.wait(job), "CANCELLED" if how == "cancel" else "FAILED"
        assert ended["JobState"] == state, output.read_text()
        assert how == "cancel" or ended["ExitCode"] == "75:0"
        assert run.state == "preempted", output.read_text()
        job = cluster.submit(script)
    assert cluster.wait(job)["JobState"] == "COMPLETED", output.read_text() + cluster.logs()
    assert run.state == "finished"
    stopped, resumed = (
        [e for e in run.events if e["event"] == name] for name in ("preempted", "resumed")
    )
    assert [e["saved"] for e in stopped] == [True]
    # whichever rank 0 saw first
    assert stopped[0]["reason"] in ("SIGTERM", "a stop signal on another rank")
    assert [(e["step"], e["world"]) for e in resumed] == [(stopped[0]["step"], 2)]
    assert 0 < resumed[0]["step"] < 400, "it was stopped on the way, and nothing was lost"
    steps = [line["step"] for line in run.lines("train")]
    assert steps[-1] == 400 and len(set(steps)) == len(steps)
