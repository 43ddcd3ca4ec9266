"""The command line: what it prints, its exit codes, and that it starts without torch."""

import os
import subprocess
import sys
from pathlib import Path

from helpers import TINY, overrides, windlass
from windlass.run import Run


def test_a_finished_run_stays_finished_where_its_report_fails(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "broken" / "matplotlib").mkdir(parents=True)
    (tmp_path / "broken" / "matplotlib" / "__init__.py").write_text("raise RuntimeError('no fonts here')")
    path = os.pathsep.join([str(tmp_path / "broken"), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {**TINY, "train.steps": 2, "data.source": str(corpus), "data.dir": str(tmp_path / "data")}
    call = ["train", "quickstart", *overrides(settings), f"run.dir={tmp_path / 'run'}"]
    done = windlass(*call, env={"PYTHONPATH": path})
    assert "no report: RuntimeError: no fonts here" in done.stderr and "windlass report" in done.stderr


def piped(command: str) -> tuple[str, list[str]]:
    """What the last command of a pipe prints, and the exit codes of all."""
    words = ["bash", "-c", f'windlass() {{ {sys.executable} -m windlass "$@"; }}; {command}; echo ${{PIPESTATUS[@]}}']
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return done.stdout, done.stdout.splitlines()[-1].split()


def test_a_training_goes_on_where_its_reader_ends(tmp_path: Path, corpus: Path) -> None:
    settings = {**TINY, "train.steps": 2, "data.source": str(corpus), "data.dir": str(tmp_path / "data")}
    words = " ".join([*overrides(settings), f"run.dir={tmp_path / 'run'}"])
    shown, codes = piped(f"windlass train quickstart {words} 2>&1 | head -n 1")
    assert codes == ["0", "0"] and len(shown.splitlines()) == 2
    assert (tmp_path / "run" / "report" / "index.html").is_file() and "finished" in Run(tmp_path / "run").state
    assert "step 2/2 | loss" in (tmp_path / "run" / "log.txt").read_text()
    shown, codes = piped(f"windlass recipe {tmp_path / 'run'} | head -n 1")
    assert codes == ["0", "0"]
    # without standard output, and where it takes ASCII alone
    again = f"windlass train {tmp_path / 'run'}"
    assert piped(f"{again} >&-")[1] == ["0"]
    shown, codes = piped(f"PYTHONIOENCODING=ascii TERM=dumb NO_COLOR=1 {again}")
    assert (
        codes == ["0"]
        and shown.isascii()
        and "+-----" in shown
        and f"sample: windlass sample {tmp_path / 'run'}" in shown
    )


def test_help_and_version_import_no_torch() -> None:
    code = "import sys; from windlass.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\nprint({'torch', 'numpy'} & {*sys.modules})"
    for call in (["--help"], ["recipe", "quickstart"], ["recipe", "--list"]):
        done = subprocess.run([sys.executable, "-c", code, *call], capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1] == "set()"


def test_bad_input_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    for call in ("train quikstart", "train quickstart optim.lrr=1", "report none", "trian", "recipe --nope", "recipe"):
        done = windlass(*call.split(), code=2, cwd=tmp_path)
        assert done.stderr.strip() and "Traceback" not in done.stderr
