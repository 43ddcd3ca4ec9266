"""The batch scripts of a study, and what is not submitted."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from windlass.errors import UserError
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.study.study import Study
from windlass.study.submit import array_script, submit_array
from windlass.study.sweep import Options

AXES = ["optim.lr=1e-2,1e-3", "run.seed=1,2"]


@pytest.fixture
def study(tmp_path):
    return Study.create(Recipe.load("quickstart"), AXES, tmp_path / "study")


def script_of(study, scheduler, cells, arguments=(), **options):
    made = array_script(study, scheduler, Options(**options), cells, study.path.parent, "/usr/bin/python3", arguments)
    checked = subprocess.run(["bash", "-n"], input=made, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    return made.splitlines()


def test_the_array_script_names_the_cells_that_are_left(study):
    for scheduler, array, index in (
        ("slurm", "#SBATCH --array=0,2,3", "SLURM_ARRAY_TASK_ID"),
        ("pbs", "#PBS -J 0-3", "PBS_ARRAY_INDEX"),
    ):
        lines = script_of(study, scheduler, [0, 2, 3], world=2)
        assert array in lines
        call = next(line for line in lines if "--only" in line)
        assert call.endswith(f"--world 2 --only ${index} &")


def test_a_single_cell_of_pbs_is_a_plain_job(study):
    """PBS Pro knows no array of one."""
    lines = script_of(study, "pbs", [3])
    assert not [line for line in lines if line.startswith("#PBS -J")]
    assert any(line.endswith("--only 3 &") for line in lines)
    assert "#SBATCH --array=3" in script_of(study, "slurm", [3])


def test_a_rank_has_a_core_and_where_the_recipe_says_so_a_device(study, tmp_path):
    assert "#SBATCH --cpus-per-task=4" in script_of(study, "slurm", [0, 1], world=4)
    assert "#PBS -l select=1:ncpus=4" in script_of(study, "pbs", [0, 1], world=4)
    assert not [line for line in script_of(study, "slurm", [0, 1], world=4) if "gpu" in line]
    cuda = Study.create(Recipe.load("quickstart", ["parallel.device=cuda"]), ["parallel.world=1,2"], tmp_path / "cuda")
    assert "#SBATCH --gpus-per-task=2" in script_of(cuda, "slurm", [0, 1])
    assert "#PBS -l select=1:ncpus=2:ngpus=2" in script_of(cuda, "pbs", [0, 1])


def test_what_the_user_asks_of_the_scheduler_replaces_ours(study):
    lines = script_of(study, "slurm", [0, 1], ["--time=04:00:00", "-c8", "--account lab", "--requeue"])
    assert {"#SBATCH --time=04:00:00", "#SBATCH -c8", "#SBATCH --account lab"} <= set(lines)
    assert not [line for line in lines if "cpus-per-task" in line]
    assert lines.count("#SBATCH --requeue") == 1
    asked = ["-l select=1:ncpus=8:ngpus=2", "-l walltime=04:00:00", "-q small"]
    lines = script_of(study, "pbs", [0, 1], asked)
    assert [line for line in lines if "-l" in line and line.startswith("#PBS")] == [f"#PBS {x}" for x in asked[:2]]
    assert "#PBS -q small" in lines


def test_the_tasks_judge_as_they_were_told(study):
    call = next(x for x in script_of(study, "slurm", [0], stop_diverged=True, retry_failed=True) if "--only" in x)
    assert {"--stop-diverged", "--retry-failed"} <= set(shlex.split(call))
    assert "--retry-failed" not in next(x for x in script_of(study, "slurm", [0]) if "--only" in x)


def test_what_is_submitted(study, capsys):
    study.judge(study.cells[1], "failed", "bad input")
    held = Run(study.run_of(study.cells[2]).path)
    held.path.mkdir(parents=True)
    held.metrics_path.write_text(json.dumps({"kind": "event", "step": 0, "event": "started"}))
    held.heartbeat_path.touch()
    submit_array(study, "slurm", Options(), dry_run=True)
    said = capsys.readouterr().out
    assert "#SBATCH --array=0,3" in said
    assert "running already, so not submitted: cell 2" in said
    submit_array(study, "slurm", Options(retry_failed=True), dry_run=True)
    assert "#SBATCH --array=0,1,3" in capsys.readouterr().out
    with pytest.raises(UserError, match="does not go with --submit"):
        submit_array(study, "slurm", Options(halving=True), dry_run=True)
    with pytest.raises(UserError, match="there are slurm and pbs"):
        submit_array(study, "lsf", Options(), dry_run=True)


def test_the_script_is_given_to_the_scheduler(study, tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "sbatch"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/given\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    assert submit_array(study, "slurm", Options(), dry_run=False) == 0
    assert (tmp_path / "given").read_text() == Path(study.path / "submit.slurm.sh").read_text()
