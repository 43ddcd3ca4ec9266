"""LSF as its manual describes it, with strict fakes; and one file for each scheduler."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from launch_fixtures import SAVES, header, job_of, run_job

import windlass
from helpers import refused
from helpers import windlass as run_windlass
from windlass.fileio import read_json
from windlass.launch.allocation import job_variables, launch_command, read_allocation
from windlass.launch.batch import render
from windlass.launch.job import INDEX, Site
from windlass.launch.schedulers import SCHEDULERS, find_job
from windlass.launch.submit import Resources, cancel, queued, submit_run
from windlass.recipe import Recipe
from windlass.training.start import job_id

FAKES = Path(__file__).parents[1] / "fakes"


def test_no_other_file_names_a_schedulers_variables_or_commands():
    commands = "sbatch|squeue|scancel|scontrol|qsub|qstat|qdel|qsig|qrerun|bsub|bjobs|bkill"
    name = re.compile(rf"\b(SLURMD?_[A-Z]\w*|PBS_[A-Z]\w*|LSB_\w+|{commands})\b")
    package = Path(windlass.__file__).parent
    found = {
        (str(path.relative_to(package)), match[0])
        for path in package.rglob("*.py")
        if path.parent.name != "schedulers"
        for match in name.finditer(path.read_text())
    }
    assert found == set()


@pytest.fixture
def lsf(tmp_path, monkeypatch) -> Path:
    """bsub, bjobs and bkill on PATH, which reject options that the manual lacks; returns their
    state.
    """
    state = tmp_path / "lsf"
    state.mkdir()
    monkeypatch.setenv("PATH", f"{FAKES}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LSF", str(state))
    return state


def test_the_header_for_lsf(tmp_path):
    site = Site(partition="gpu", account="lab", mail="me@x.org", time="01:30:00", cells_at_once=2)
    more = {"nodes": 2, "ranks_per_node": 4, "gpus_per_node": 4, "memory_gb": 40, "array": [0, 2]}
    script = render(job_of(tmp_path, "train", INDEX, **more), site, "lsf")
    assert header(script) == [
        '-J "run[1,3]%2"',
        "-n 8",
        '-R "span[ptile=4]"',
        '-R "affinity[core(4)]"',
        '-gpu "num=4"',
        '-R "rusage[mem=40GB]"',
        '-W "01:30"',
        '-q "gpu"',
        '-P "lab"',
        '-u "me@x.org"',
        "-N",
        "-r",
        '-Q "120"',
        f"-o {tmp_path}/logs/%J_%I.OU",
    ]
    assert "task=$((LSB_JOBINDEX - 1))" in script.splitlines()
    own = Site(directives=['-R "rusage[mem=9GB]"', "-W 2:00"], time="01:00:00")
    lines = render(job_of(tmp_path, "x", memory_gb=3), own, "lsf").splitlines()
    assert sum("rusage" in line for line in lines) == sum("-W" in line for line in lines) == 1


def test_lsf_rejects_what_its_manual_does_not_have(lsf):
    script = "#!/bin/bash\n#BSUB -J x\n#BSUB --nodes=2\n"
    done = subprocess.run(["bsub"], input=script, text=True, capture_output=True)
    assert done.returncode == 255 and "--nodes=2" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGUSR1, 120), (signal.SIGTERM, 75), (signal.SIGUSR2, 75)]
)
def test_only_the_time_limit_puts_a_job_back(lsf, tmp_path, number, code):
    """LSF requeues a job whose script ends with the code of `-Q`."""
    job = job_of(tmp_path, "bash", "-c", SAVES, array=[0, 2])
    process = run_job(job, "lsf", LSB_JOBID="7", LSB_JOBINDEX="3")
    process.send_signal(number)
    assert process.wait(30) == code
    assert '#BSUB -Q "120"' in job.script.read_text() and (job.logs / "run_7_3.out").exists()


def test_submit_state_and_cancel_on_lsf(lsf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.load("quickstart", ["run.dir=run"])
    how = {"scheduler": "lsf", "site": Site(), "asked": Resources(gpus_per_node=1)}
    job = submit_run(recipe, **how).job
    run = tmp_path / "run"
    known = {"scheduler": "lsf", "job": "101", "array": []}
    assert job == "101" and read_json(run / "job.json") == known
    assert queued(run) == ("101", "pending")
    (lsf / "101").write_text("1 DONE\n2 RUN\n3 PEND\n")
    assert queued(run) == ("101", "running")
    assert cancel(run) == "101"
    called = (lsf / "bkill").read_text().splitlines()
    assert called == ["101[3]", "-s USR2 101[2]"]
    (lsf / "101").write_text("0 EXIT\n")
    assert queued(run) == ("101", "")
    with refused("is over"):
        cancel(run)


def test_the_allocation_of_an_lsf_job(tmp_path):
    (tmp_path / "hosts").write_text("a\na\nb\nb\n")
    job = {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": str(tmp_path / "hosts"), "LSB_JOBINDEX": "2"}
    found = read_allocation(job, 0)
    assert (found.scheduler, found.hosts, found.per_host) == ("lsf", ("a", "b"), (2, 2))
    words = ["mpiexec", "-n", "4", "-ppn", "2", "--hostfile", str(tmp_path / "hosts"), "x"]
    assert launch_command(found, ["x"]) == words
    assert job_variables(job) == job and find_job(job) == ("lsf", "7")
    assert job_id(job)["scheduled"] == "7"
    restarts = SCHEDULERS["lsf"].restarts
    assert (restarts(job), restarts(job | {"LSB_RESTART": "Y"})) == (0, 1)
    with refused("LSF", "mpiexec or torchrun"):
        launch_command(found, ["x"], launcher="srun")


@pytest.mark.parametrize(
    ("name", "mark"), [("lsf", "#BSUB"), ("pbs", "#PBS"), ("slurm", "#SBATCH")]
)
def test_a_dry_run_is_shell_and_writes_nothing(tmp_path, name, mark):
    words = ("submit", "quickstart", "parallel.device=cpu", "--scheduler", name, "--dry-run")
    script = run_windlass(*words, cwd=tmp_path).stdout
    assert script.startswith("#!/bin/bash") and mark in script and not list(tmp_path.iterdir())
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
