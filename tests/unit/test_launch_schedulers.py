"""One file for each scheduler."""

import re
import subprocess
from pathlib import Path

import pytest

import windlass
from helpers import windlass as run_windlass


def test_no_other_file_names_a_schedulers_variables_or_commands():
    commands = "sbatch|squeue|scancel|scontrol|qsub|qstat|qdel|qsig|qrerun"
    name = re.compile(rf"\b(SLURMD?_[A-Z]\w*|PBS_[A-Z]\w*|{commands})\b")
    package = Path(windlass.__file__).parent
    found = {
        (str(path.relative_to(package)), match[0])
        for path in package.rglob("*.py")
        if path.parent.name != "schedulers"
        for match in name.finditer(path.read_text())
    }
    assert found == set()


@pytest.mark.parametrize(("name", "mark"), [("pbs", "#PBS"), ("slurm", "#SBATCH")])
def test_a_dry_run_is_shell_and_writes_nothing(tmp_path, name, mark):
    words = ("submit", "quickstart", "parallel.device=cpu", "--scheduler", name, "--dry-run")
    script = run_windlass(*words, cwd=tmp_path).stdout
    assert script.startswith("#!/bin/bash") and mark in script and not list(tmp_path.iterdir())
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
