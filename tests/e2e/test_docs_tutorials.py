"""The pages of docs/tutorials: every `windlass` command on them runs, in order, on small data.

The commands are those of the page but for what `instead` replaces: fewer steps, a model that was
made here, fewer ranks.
"""

import glob
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import hf_fixtures
from helpers import write_corpus
from windlass.cli import main
from windlass.optim.schedule import lr_multiplier
from windlass.recipe import Horizon
from windlass.run import Run

PAGES = Path(__file__).parents[2] / "docs" / "tutorials"
SMALL = "model.layers=1 model.width=32 model.heads=2 model.context=32 "
SMALL += "train.steps=8 checkpoint.every=4"


@dataclass
class Page:
    """What a page needs, what is run instead of what it says, and the files that there are
    afterwards.
    """

    prepare: Callable[[Path, Path], None]
    instead: dict[str, str]
    makes: list[str]
    prints: list[str] = field(default_factory=list)


def book(folder: Path, data: Path) -> None:
    text = (data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    (folder / "book.txt").write_text(text[:60_000], encoding="utf-8")


def chats(folder: Path, data: Path) -> None:
    articles = json.loads((data / "squad" / "dev-v1.1.json").read_text(encoding="utf-8"))["data"]
    texts, lines = [], []
    for paragraph in [one for article in articles[:8] for one in article["paragraphs"][:5]]:
        asked = f"{paragraph['context'][:200]}\n{paragraph['qas'][0]['question']}"
        answer = paragraph["qas"][0]["answers"][0]["text"]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}) + "\n")
        texts += [asked, answer]
    (folder / "chat.jsonl").write_text("".join(lines), encoding="utf-8")
    hf_fixtures.save("llama", folder / "tiny-model", max_position_embeddings=1024)
    hf_fixtures.save_tokenizer(texts, folder / "tiny-model")


TUTORIALS = {
    "own-text.md": Page(
        book,
        {
            "train book.toml": f"train book.toml {SMALL}",
            "--extend-to 600": "--extend-to 10",
            "train larger.toml": f"train larger.toml {SMALL}",
            "--n 3": "--n 3 --max-tokens 20",
        },
        ["book.toml", "runs/book-*/report/index.html", "runs/larger-*/report/index.html"],
        ["optim.lr = 0.003", "(preset quickstart), then", "report:"],
    ),
    "own-chat.md": Page(
        chats,
        {"HuggingFaceTB/SmolLM2-135M-Instruct": "tiny-model"},
        ["runs/chat/report/index.html", "answers/model.safetensors", "answers/tokenizer.json"],
        ["36 conversations", "runs/chat at step 7", "exported: answers", "60640 512"],
    ),
    "more-gpus.md": Page(
        book,
        {
            "run.dir=runs/gpt": f"run.dir=runs/gpt {SMALL}",
            "--stop-at 200": "--stop-at 2",
            "--stop-at 400": "--stop-at 4",
            "--world 8\n": "--world 2\n",
            "train.steps=100 --world 2": SMALL,
            "--out compared": "--out compared --no-plots",
        },
        [
            "compared/index.html",
            "runs/gpt/checkpoints/step-00000008",
            "runs/sharded/checkpoints/step-00000008",
        ],
        ["A100", "every byte good"],
    ),
    "sweep.md": Page(
        book,
        {
            "optim.lr=1e-3,3e-3,1e-2 model.width=64,128 run.seed=1,2": "optim.lr=1e-3 model.width=32 run.seed=1",
            "optim.lr=3e-4,1e-3,3e-3,1e-2 model.width=64,128 run.seed=1,2": "optim.lr=1e-3,1e-2 model.width=32 run.seed=1",
            "train.steps=400 --set eval.every=100": SMALL.replace("model.width=32 ", "").replace(
                " ", " --set "
            ),
        },
        [
            "studies/lr/report/index.html",
            "studies/lr/report/seeds.tex",
            "studies/lr/report/plots/loss-against-lr.pdf",
            "figure.pdf",
        ],
        ["best: "],
    ),
}


def commands(page: str) -> Iterator[tuple[str, str]]:
    """The language and text of each block that begins with a file's name, `("run", command)` for
    each command, in order.
    """
    for info, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.M | re.S):
        if info in ("toml", "json", "python"):
            if re.match(r"# [\w.-]+\n", block):
                yield info, block
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("windlass "):
                yield "run", f"{line}\n"


def words_of(command: str) -> list[str]:
    """A command's words without its comment, file patterns expanded, as a shell does it."""
    words = list[str]()
    for word in shlex.split(command, comments=True)[1:]:
        words += sorted(glob.glob(word)) if "*" in word and "=" not in word else [word]
    return words


@pytest.mark.parametrize("name", sorted(path.name for path in PAGES.glob("*.md")))
def test_every_command_of_a_tutorial_runs(name, tmp_path, data_files, monkeypatch, capsys):
    page = TUTORIALS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who built it?\n"))
    if not any("runs" in pattern and "report" in pattern for pattern in page.makes):
        # a run's own report and its plots take seconds
        monkeypatch.setenv("WINDLASS_QUIET_END", "1")
    page.prepare(tmp_path, data_files)
    printed, unused = "", set(page.instead)
    capsys.readouterr()
    for kind, text in commands((PAGES / name).read_text(encoding="utf-8")):
        if kind != "run":
            file = Path(text.partition("\n")[0].removeprefix("# "))
            file.write_text(text, encoding="utf-8")
            if kind == "python":
                runpy.run_path(str(file))
                printed += capsys.readouterr().out
            continue
        for said, run in page.instead.items():
            if said in text:
                text = text.replace(said, run)
                unused.discard(said)
        words = words_of(text)
        monkeypatch.setattr(sys, "argv", ["windlass", *words])
        with pytest.raises(SystemExit) as ended:
            main(words)
        out = capsys.readouterr()
        assert ended.value.code == 0, f"{text}\n{out.out[-3000:]}\n{out.err[-3000:]}"
        printed += out.out + out.err
    missing = [pattern for pattern in page.makes if not glob.glob(pattern)]
    assert not missing and not unused, (missing, unused, sorted(tmp_path.rglob("*"))[:80])
    assert [words for words in page.prints if words not in printed] == [], printed[-3000:]


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
    page = (PAGES.parent / "exercises.md").read_text(encoding="utf-8")
    part = page.partition("\n## B.")[2].partition("\n## C.")[0]
    typed = [text for kind, text in commands(part) if kind == "run" and "runs/longer" in text]
    for text in typed:
        words = [word for word in words_of(text) if word not in ("--world", "2")]
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
