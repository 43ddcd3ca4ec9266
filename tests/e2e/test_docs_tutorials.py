"""The pages of docs/tutorials: every `windlass` command on them runs, in order, on small data.

The commands are those of the page but for what `instead` replaces: fewer steps, a model that was
made here, fewer ranks.
"""

import json
import subprocess
import sys

import pytest
from docs_runs import Page, Runner, prepared  # noqa: F401

from docs_pages import DOCS, blocks, commands_of
from helpers import write_corpus
from windlass.cli import main
from windlass.optim.schedule import lr_multiplier
from windlass.recipe import Horizon
from windlass.run import Run

PAGES = DOCS / "tutorials"
TUTORIALS = {
    "own-text.md": Page(
        {"--n 3": "--n 3 --max-tokens 20"},
        makes=["book.toml", "runs/book-*/report/index.html", "runs/larger-*/report/index.html"],
        prints=["optim.lr = 0.003", "(preset quickstart), then", "report:"],
        reports=True,
    ),
    "own-chat.md": Page(
        makes=[
            "runs/chat/report/index.html",
            "answers/model.safetensors",
            "answers/tokenizer.json",
        ],
        prints=["conversations", "exported: answers"],
        reports=True,
    ),
    "mixture.md": Page(
        {"@300": "@4"},
        makes=["runs/constant/checkpoints/step-00000016"],
        prints=["prose loss", "code loss"],
    ),
    "more-gpus.md": Page(
        {"--stop-at 200": "--stop-at 2", "--out compared": "--out compared --no-plots"},
        makes=[
            "compared/index.html",
            "runs/gpt/checkpoints/step-00000008",
            "runs/sharded/checkpoints/step-00000008",
        ],
        prints=["A100", "every byte good"],
    ),
    "sweep.md": Page(
        {
            "optim.lr=1e-3,3e-3,1e-2 model.width=64,128 run.seed=1,2": "optim.lr=1e-3 model.width=32 run.seed=1",
            "optim.lr=3e-4,1e-3,3e-3,1e-2 model.width=64,128 run.seed=1,2": "optim.lr=1e-3,1e-2 model.width=32 run.seed=1",
        },
        makes=[
            "studies/lr/report/index.html",
            "studies/lr/report/seeds.tex",
            "studies/lr/report/plots/loss-against-lr.pdf",
            "figure.pdf",
        ],
        prints=["best: "],
    ),
}


QUICK = {"own-text.md", "more-gpus.md"}  # the others are slower


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=[] if path.name in QUICK else [pytest.mark.full])
        for path in sorted(PAGES.glob("*.md"))
        if path.name != "slurm.md"
    ],
)
def test_every_command_of_a_tutorial_runs(name, tmp_path, prepared, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    page = TUTORIALS[name]
    if not page.reports:  # a run's own report and its plots take seconds
        monkeypatch.setenv("WINDLASS_QUIET_END", "1")
    Runner(page, prepared, capfd).run(PAGES / name)


def test_stitched_run_of_exercises_is_beginning_of_long_one(tmp_path, monkeypatch, capsys):
    """Saved at 50 and continued to 100 of 4,400 steps, by the commands of the page, of a small
    model on one rank.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WINDLASS_QUIET_END", "1")
    write_corpus(tmp_path / "web.txt", 4000)
    small = "data.source=web.txt data.tokenizer=byte data.streaming=false data.max_tokens=0 "
    small += "data.val_fraction=0.1 model.vocab=257 model.layers=1 model.heads=1 model.width=16 "
    small += "model.context=16 eval.batches=1 eval.sample_every=0 train.global_batch=2 "
    small += "telemetry.every=1 parallel.device=cpu"
    listed = [
        part[1:]
        for block in blocks(DOCS / "evidence" / "exercises.md")
        for command in commands_of(block)
        for part in command.parts()
        if "runs/longer" in command.text
    ]
    assert len(listed) == 3, listed
    for typed in listed:
        words = [word for word in typed if word not in ("--world", "2")]
        more = (
            small.split() if "c4-29m" in words else ["--no-plots"] if words[0] == "report" else []
        )
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        assert ended.value.code == 0, capsys.readouterr().err
    run = Run(tmp_path / "runs" / "longer")
    assert run.state == "stopped"
    assert [e["step"] for e in run.events if e["event"] == "resumed"] == [50]
    schedule, horizon = run.recipe.optim.schedule, Horizon(4400, 0, 1)
    whole = [run.recipe.optim.lr * lr_multiplier(schedule, horizon, step) for step in range(100)]
    assert [line["lr"] for line in run.lines("train")] == pytest.approx(whole)
    assert whole[43] == max(whole)
    assert (run.report_dir / "index.html").is_file()


def test_the_notebook_runs(tmp_path):
    """Its cells, in order, in one interpreter, with fewer steps: stopped, resumed, tabulated,
    measured in a module of its own.
    """
    cells = json.loads((PAGES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    shorter = {'"train.steps": 300': '"train.steps": 60', "stop_at=150": "stop_at=30"}
    for old, new in (shorter | {'"eval.every": 50': '"eval.every": 20'}).items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    code += "\nprint(shares.share.tolist(), run)\n"
    (tmp_path / "cells.py").write_text(code, encoding="utf-8")
    words = [sys.executable, "cells.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(tmp_path / "runs" / "sorting")
    assert [e["step"] for e in run.events if e["event"] == "resumed"] == [30]
    assert run.state == "finished" and [line["step"] for line in run.lines("train")][-1] == 60
    losses = [line["loss"] for line in run.lines("eval", suite="loss")]
    assert losses[-1] < 0.8 * losses[0]
    assert "Run(runs/sorting: finished, step 60 of 60" in done.stdout
    assert (run.report_dir / "index.html").is_file()
