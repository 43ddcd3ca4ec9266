"""The batch scripts of a study, and what is not submitted."""

import os
import subprocess

import pytest

from helpers import windlass, write_ledger
from windlass.errors import UserError
from windlass.recipe import Recipe
from windlass.study.study import Study
from windlass.study.sweep import array_script, submit_sweep

AXES = ["optim.lr=1e-2,1e-3", "run.seed=1,2"]


@pytest.fixture
def study(tmp_path):
    return Study.create(Recipe.load("quickstart"), AXES, tmp_path / "study")


def script_of(study, scheduler, cells, arguments=(), world=1, flags=()):
    script = array_script(study, scheduler, cells, world, study.path.parent, "/usr/bin/python3", flags, arguments)
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    return script.splitlines()


def test_the_array_script_names_the_cells_that_are_left(study):
    """PBS Pro has no array of one."""
    for scheduler, cells, array, index in (
        ("slurm", [0, 2, 3], "#SBATCH --array=0,2,3", "$SLURM_ARRAY_TASK_ID"),
        ("slurm", [3], "#SBATCH --array=3", "$SLURM_ARRAY_TASK_ID"),
        ("pbs", [0, 2, 3], "#PBS -J 0-3", "$PBS_ARRAY_INDEX"),
        ("pbs", [3], "", "3"),
    ):
        lines = script_of(study, scheduler, cells, world=2)
        assert [line for line in lines if "--array" in line or " -J " in line] == [array] * bool(array)
        assert any(line.endswith(f"--world 2 --only {index} &") for line in lines)


def test_a_rank_has_a_core_and_a_gpu_unless_the_recipe_says_cpu(study, tmp_path):
    lines = script_of(study, "slurm", [0, 1], world=4)  # parallel.device = "auto"
    assert {"#SBATCH --cpus-per-task=4", "#SBATCH --gpus-per-task=4"} <= set(lines)
    assert "#PBS -l select=1:ncpus=4:ngpus=4" in script_of(study, "pbs", [0, 1], world=4)
    cpu = Study.create(Recipe.load("quickstart", ["parallel.device=cpu"]), ["parallel.world=1,2"], tmp_path / "cpu")
    assert not [line for line in script_of(cpu, "slurm", [0, 1]) if "gpu" in line]
    assert "#PBS -l select=1:ncpus=2" in script_of(cpu, "pbs", [0, 1])


def test_what_the_user_asks_of_the_scheduler_replaces_ours(study):
    lines = script_of(study, "slurm", [0, 1], ["--time=04:00:00", "--cpus-per-task 8", "--account lab", "--requeue"])
    assert {"#SBATCH --time=04:00:00", "#SBATCH --cpus-per-task 8", "#SBATCH --account lab"} <= set(lines)
    assert "#SBATCH --cpus-per-task=1" not in lines
    assert lines.count("#SBATCH --requeue") == 1
    asked = ["-l select=1:ncpus=8:ngpus=2", "-l walltime=04:00:00", "-q small"]
    lines = script_of(study, "pbs", [0, 1], asked)
    assert [line for line in lines if "-l" in line and line.startswith("#PBS")] == [f"#PBS {x}" for x in asked[:2]]
    assert "#PBS -q small" in lines


def test_what_is_submitted(study):
    study.set_status(study.cells[1], "failed", "bad input")
    running = study.run_of(study.cells[2])
    write_ledger(running, {"kind": "event", "event": "started"})
    running.heartbeat_path.touch()
    messages = []
    recipe, options = Recipe.load("quickstart"), {"path": study.path, "dry_run": True}
    script = submit_sweep(recipe, AXES, "slurm", stop_diverged=True, notify=messages.append, **options)
    assert "#SBATCH --array=0,3" in script and "--stop-diverged" in script and "--retry-failed" not in script
    assert any("cell 2" in message for message in messages)
    again = submit_sweep(recipe, AXES, "slurm", retry_failed=True, **options)
    assert "#SBATCH --array=0,1,3" in again and "--retry-failed" in again
    for scheduler, halving in (("lsf", False), ("slurm", True)):
        with pytest.raises(UserError):
            submit_sweep(recipe, AXES, scheduler, halving=halving, **options)


def test_the_script_is_given_to_the_scheduler(study, tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "sbatch"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/given\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    script = submit_sweep(Recipe.load("quickstart"), AXES, "slurm", path=study.path)
    assert (tmp_path / "given").read_text() == (study.path / "submit.slurm.sh").read_text() == script


def test_a_dry_run_writes_nothing(tmp_path):
    call = ["sweep", "quickstart", "run.seed=1,2", "--dir", tmp_path / "study", "--submit", "slurm", "--dry-run"]
    assert "#SBATCH --array=0,1" in windlass(*call, cwd=tmp_path).stdout
    assert list(tmp_path.iterdir()) == []
