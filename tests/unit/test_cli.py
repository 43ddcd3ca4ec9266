"""The command line: what it prints, its exit codes, and that it starts without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers import TINY, overrides, tiny_recipe, windlass
from windlass import train


def test_a_finished_run_stays_finished_where_its_report_fails(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "broken" / "matplotlib").mkdir(parents=True)
    (tmp_path / "broken" / "matplotlib" / "__init__.py").write_text("raise RuntimeError('no fonts here')")
    path = os.pathsep.join([str(tmp_path / "broken"), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {**TINY, "train.steps": 2, "data.source": str(corpus), "data.dir": str(tmp_path / "data")}
    done = windlass(
        "train", "quickstart", *overrides(settings), f"run.dir={tmp_path / 'run'}", env={"PYTHONPATH": path}
    )
    assert "no report: RuntimeError: no fonts here" in done.stderr
    assert "windlass report" in done.stderr


def test_output_into_a_closed_pipe_ends_quietly(tmp_path: Path, corpus: Path) -> None:
    run = train(tiny_recipe(corpus, tmp_path / "run", train__steps=2))
    command = f"{sys.executable} -m windlass recipe {run.path} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_help_and_version_import_no_torch() -> None:
    code = "import sys; from windlass.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False"
    verbs = "recipe prepare plan train eval sample sweep report runs checkpoints export track verify"
    for verb in verbs.split():
        assert f" {verb} " in done.stdout


def test_bad_input_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    typo, key = ["train", "quikstart"], ["train", "quickstart", "optim.lrr=1"]
    for arguments in (typo, key, ["report", tmp_path / "none"], ["trian"]):
        done = windlass(*arguments, code=2, cwd=tmp_path)
        assert "Traceback" not in done.stderr
        assert done.stderr.strip()
