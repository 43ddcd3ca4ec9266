"""The command line: what it prints, its exit codes, and that it starts without torch."""

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
    call = ["train", "quickstart", *overrides(settings), f"run.dir={tmp_path / 'run'}"]
    done = windlass(*call, env={"PYTHONPATH": path})
    assert "no report: RuntimeError: no fonts here" in done.stderr and "windlass report" in done.stderr


def test_output_into_a_closed_pipe_ends_quietly(tmp_path: Path, corpus: Path) -> None:
    run = train(tiny_recipe(corpus, tmp_path / "run", train__steps=2))
    command = f"{sys.executable} -m windlass recipe {run.path} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("0", "")


def test_help_and_version_import_no_torch() -> None:
    code = "import sys; from windlass.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\nprint({'torch', 'numpy'} & {*sys.modules})"
    for call in (["--help"], ["recipe", "quickstart"], ["recipe", "--list"]):
        done = subprocess.run([sys.executable, "-c", code, *call], capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1] == "set()"


def test_bad_input_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    for call in ("train quikstart", "train quickstart optim.lrr=1", "report none", "trian", "recipe --nope", "recipe"):
        done = windlass(*call.split(), code=2, cwd=tmp_path)
        assert done.stderr.strip() and "Traceback" not in done.stderr
