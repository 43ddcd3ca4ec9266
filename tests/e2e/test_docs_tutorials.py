"""Pages of the documentation, by their own commands: two tutorials at a small size, and the notebook."""

import glob
import json
import re
import shlex
import sys

import pytest

import forked
from docs_pages import DOCS, blocks, commands_of
from helpers import write_corpus
from windlass.cli import main
from windlass.run import Run

PAGES = DOCS / "tutorials"
SMALL = {
    "model.layers": 1,
    "model.heads": 2,
    "model.width": 32,
    "model.context": 32,
    "train.steps": 8,
    "train.global_batch": 8,
    "checkpoint.every": 4,
    "eval.every": 4,
    "eval.batches": 1,
    "eval.sample_tokens": 8,
    "parallel.device": "cpu",
}
"""In every training, instead of the values on a page."""
SHORTER = {
    r"--world \d": "--world 2",
    "--stop-at 200": "--stop-at 2",
    "--stop-at 400": "--stop-at 4",
    "--extend-to 600": "--extend-to 12",
    "--n 3": "--n 3 --max-tokens 20",
    "--out compared": "--out compared --no-plots",
}
"""On every command line."""
TUTORIALS = {
    "own-text.md": (
        ["book.toml", "runs/book-*/report/index.html", "runs/larger-*/report/index.html"],
        ["optim.lr = 0.003", "report:"],
    ),
    "more-gpus.md": (
        ["compared/index.html"]
        + [f"runs/{name}/checkpoints/step-00000008" for name in ("gpt", "sharded")],
        ["A100", "every byte good"],
    ),
}
"""Files that a tutorial makes, and words that it prints."""


@pytest.mark.parametrize("name", TUTORIALS)
def test_every_command_of_a_tutorial_runs(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "book.txt")
    for block in blocks(PAGES / name):
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        for command in commands_of(block):
            text = command.text
            for said, run in SHORTER.items():
                text = re.sub(said, run, text)
            if not text.startswith("windlass "):
                continue  # of a cluster
            words = [path for word in shlex.split(text)[1:] for path in glob.glob(word) or [word]]
            if words[0] == "train":
                words = [word for word in words if word.partition("=")[0] not in SMALL]
                words += [f"{key}={value}" for key, value in SMALL.items()]
            monkeypatch.setattr(sys, "argv", ["windlass", *words])
            with forked.forking(), pytest.raises(SystemExit) as ended:
                main(words)
            assert ended.value.code == 0, (command.text, capfd.readouterr())
    files, printed = TUTORIALS[name]
    assert not [pattern for pattern in files if not glob.glob(pattern)]
    output = capfd.readouterr().out
    assert not [text for text in printed if text not in output], output


def test_the_notebook_runs(tmp_path):
    """Its cells, in order, in one interpreter, with fewer steps: stopped, resumed, tabulated,
    measured in a module of its own.
    """
    cells = json.loads((PAGES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    shorter = {'"train.steps": 300': '"train.steps": 60', "stop_at=150": "stop_at=30"}
    shorter |= {'"eval.every": 50': '"eval.every": 20', "report(run)": "report(run, plots=False)"}
    for old, new in shorter.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    code += "\nprint(shares.share.tolist(), run)\n"
    (tmp_path / "cells.py").write_text(code, encoding="utf-8")
    words = [sys.executable, "cells.py"]
    done = forked.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(tmp_path / "runs" / "sorting")
    assert [e["step"] for e in run.events if e["event"] == "resumed"] == [30]
    assert run.state == "finished" and [line["step"] for line in run.lines("train")][-1] == 60
    losses = [line["loss"] for line in run.lines("eval", suite="loss")]
    assert losses[-1] < 0.8 * losses[0]
    assert "Run(runs/sorting: finished, step 60" in done.stdout
    assert (run.report_dir / "index.html").is_file()
