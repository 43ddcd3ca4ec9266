"""`windlass submit` through a real SLURM of two nodes: a training over both, its end by the limit,
a lost node, a cancel; studies, one over the hosts.
"""

import ast
import contextlib
import shlex
import sys
from pathlib import Path

import psutil
import pytest
from launching import DDP, LONG, TRAIN, assert_same, launched
from slurm_cluster import NODES, Cluster, log_of

from helpers import wait_for
from windlass.fileio import read_json
from windlass.launch.job import Job, Site
from windlass.launch.submit import Resources, cancel, submit
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.study.jobs import submit_study
from windlass.study.study import Study

pytestmark = pytest.mark.dist
SUBMIT = [sys.executable, "-m", "windlass", "submit"]
SHOW = """from dataclasses import asdict; from windlass.parallel.env import detect_env
print(asdict(detect_env()))"""


def test_who_is_a_rank(cluster: Cluster, tmp_path):
    """The tasks of srun are; the shell of the batch job, with the same job's variables, is not."""
    show = shlex.join([sys.executable, "-c", SHOW])
    lines = ["echo $SLURM_PROCID of $SLURM_NTASKS", show, f"srun {show}", f"srun -n1 -N1 {show}"]
    options = ("--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/job-%j.out")
    script = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), *lines, ""]
    (tmp_path / "job.sh").write_text("\n".join(script))
    job = cluster.submit(tmp_path / "job.sh")
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


def submitted(cluster: Cluster, run: Path, settings: list[str], *options: str) -> str:
    """The id of the job that trains in `run` on two nodes."""
    words = ["quickstart", *settings, "parallel.device=cpu", "--nodes", "2", *options]
    done = cluster.call(*SUBMIT, *words, cwd=run.parent)
    assert done.returncode == 0, done.stdout + cluster.logs()
    return read_json(run / "job.json")["job"]


def job_end(
    cluster: Cluster, job: str, run: Run, expected: str, seconds: float = 200
) -> dict[str, str]:
    """What SLURM says of a job that has ended with this state, exit code and number of restarts."""
    ended = cluster.wait(job, seconds)
    shown = " ".join(ended[name] for name in ("JobState", "ExitCode", "Restarts"))
    assert shown == expected, log_of(run.path) + cluster.logs()
    return ended


def test_a_run_over_two_nodes(cluster: Cluster, settings, tmp_path, two_local_ranks):
    run = tmp_path / "run"
    job = submitted(cluster, run, settings(run, **DDP))
    job_end(cluster, job, Run(run), "COMPLETED 0:0 0")
    assert_same(run, two_local_ranks)
    assert [path.name for path in run.glob("*.out")] == [f"run_{job}.out"]
    for text in ("srun --nodes=2 --ntasks=2", "step 12/12"):
        assert text in log_of(run)


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory) -> list[float]:
    """The losses of the long run that nobody stops."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    launched([*TRAIN, "--world", "2", *settings(run, **LONG)])
    return [line["loss"] for line in Run(run).lines("train")]


@pytest.mark.full  # 39 s; tests/unit/test_launch_batch.py runs the script without a cluster
def test_at_its_limit_it_saves_and_requeues_itself(cluster: Cluster, settings, tmp_path):
    """SLURM sends the batch shell the signal of --signal=B:USR1; here a person sends it."""
    run = Run(tmp_path / "run")
    job = submitted(cluster, run.path, settings(run.path, **LONG))
    wait_for(lambda: run.path.exists() and run.lines("train"), 150)
    done = cluster.call("scancel", "--batch", "--signal=USR1", job)
    assert done.returncode == 0, done.stdout
    job_end(cluster, job, run, "COMPLETED 0:0 1")
    assert [e["saved"] for e in run.events if e["event"] == "preempted"] == [True]
    [resumed] = [e["step"] for e in run.events if e["event"] == "resumed"]
    assert 0 < resumed < 400 and run.state == "finished"
    assert run.lines("train")[-1]["step"] == 400


SAVES = "trap 'sleep 5; touch saved$SLURM_ARRAY_TASK_ID; exit 75' TERM; touch up; while :; do sleep 0.05; done"


@pytest.mark.parametrize("array", [(), pytest.param((0, 1), marks=pytest.mark.full)])
def test_cancel_leaves_more_time_for_a_save_than_killwait(
    cluster: Cluster, tmp_path, monkeypatch, array
):
    """SLURM kills 2 s after its SIGTERM here, 30 s by default; the save takes 5 s. A task that
    waits does not start.
    """
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    logs = tmp_path / "logs"
    job = Job("run", ["bash", "-c", SAVES], tmp_path, logs, 2, 2, array=array)
    submit(job, Site(), "slurm")
    wait_for((tmp_path / "up").exists, 60)
    (tmp_path / "up").unlink()
    assert cancel(logs) == read_json(logs / "job.json")["job"]
    ended = cluster.wait(read_json(logs / "job.json")["job"])
    saved = [path.name for path in tmp_path.glob("saved*")]
    assert saved == ["saved0" if array else "saved"], log_of(logs)
    assert not (tmp_path / "up").exists() and ended["Restarts"] == "0"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_node_that_is_killed_restarts_the_run_on_the_other(cluster: Cluster, settings, tmp_path):
    """slurmd, batch shell and ranks die at once; the controller notices, requeues, and the run
    resumes on what is left.
    """
    run, one = Run(tmp_path / "run"), LONG | {"checkpoint.every": 20, "train.steps": 200}
    job = submitted(cluster, run.path, settings(run.path, **one), "--nodes", "1", "--per-host", "2")
    wait_for(lambda: list(run.checkpoints_dir.glob("step-*")), 150)
    node = cluster.call("squeue", "--noheader", "-o", "%N", "-j", job).stdout.strip()
    cluster.kill_node(node)
    try:
        ended = job_end(cluster, job, run, "COMPLETED 0:0 1", 400)
    finally:
        cluster.spawn("slurmd", "-D", "-N", node)
    assert ended["NodeList"] != node and run.state == "finished"
    assert next(e["step"] for e in run.events if e["event"] == "resumed") >= 20


def test_a_study_that_is_submitted_twice(cluster: Cluster, tmp_path, monkeypatch):
    """One cell runs on both nodes and two wait; only the cell of the grown study is new."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    recipe = Recipe.load("quickstart", ["parallel.device=cpu", "train.steps=100000"])
    study = Study.create(recipe, ["run.seed=1,2,3"], tmp_path / "study")
    how, messages = {"scheduler": "slurm", "site": Site(), "asked": Resources(2)}, list[str]()
    monkeypatch.setattr("windlass.study.jobs.WINDLASS", ("bash", "-c", "sleep 100"))
    [first] = submit_study(study, **how)
    tasks = ("squeue", "--noheader", "--array", "-o", "%i %T")
    wait_for(lambda: f"{first.job}_0 RUNNING" in cluster.call(*tasks).stdout, 60)
    wait_for(lambda: list(study.path.rglob(".open-0")), 30)
    [mark] = study.path.rglob(".open-0")
    assert submit_study(study, **how, notify=messages.append) == []
    assert any(f"cell 1, 2, 3 is in job {first.job} (running)" in text for text in messages)
    [second] = submit_study(Study.create(recipe, ["run.seed=4"], study.path), **how)
    listed = cluster.call(*tasks).stdout.split()[::2]
    assert {*listed} == {*(f"{first.job}_{task}" for task in (0, 1, 2)), f"{second.job}_3"}
    assert mark.exists() and cancel(study.path) == f"{second.job}, {first.job}"
    cluster.wait(first.job)
    cluster.wait(second.job)


@pytest.mark.full
def test_a_rank_that_is_lost_starts_the_job_again_once(
    cluster: Cluster, settings, tmp_path, undisturbed
):
    """The job's script does it, by exit code 69: SLURM, whose node is well, sees only a task that
    was killed. So the next start does not leave the node out.
    """
    run = Run(tmp_path / "run")
    job = submitted(cluster, run.path, settings(run.path, **(LONG | {"checkpoint.every": 20})))
    wait_for(lambda: list(run.checkpoints_dir.glob("step-*")), 150)
    rank = next(p for p in psutil.process_iter() if is_rank_1(p, run.path))
    node = rank.environ()["SLURMD_NODENAME"]
    rank.kill()
    ended = job_end(cluster, job, run, "COMPLETED 0:0 1")
    assert run.state == "finished" and f"lost {node}" in log_of(run.path)
    assert "a rank was lost; the job is started again" in log_of(run.path)
    assert ended["ExcNodeList"] == "(null)", log_of(run.path)
    assert next(e["step"] for e in run.events if e["event"] == "resumed") >= 20
    assert [line["loss"] for line in run.lines("train")] == pytest.approx(undisturbed, rel=1e-6)
    assert not list(run.path.glob(".open*")) and not list(run.path.glob(".ends*"))


def is_rank_1(process: psutil.Process, run: Path) -> bool:
    """Whether it trains in `run` as rank 1 under srun."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        trains = any(str(run) in word for word in words) and "launch" not in words
        return trains and process.environ().get("SLURM_PROCID") == "1"
    return False


@pytest.mark.full
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
