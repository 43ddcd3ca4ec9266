"""The pages of the documentation but tutorials: every `windlass` command on them runs, in order, at
tiny sizes, or names the test that runs it.
"""

import ast

import pytest
from docs_runs import ELSEWHERE, Page, Runner, elsewhere, prepared  # noqa: F401

from docs_pages import ROOT, all_commands, blocks, commands_of, name_of, pages

TUTORIALS = "docs/tutorials/"
CELLS = "optim.lr=1e-3,3e-3,1e-2 optim.schedule.kind=cosine,wsd run.seed=1,2"
PAGES = {
    "docs/concepts/checkpoints.md": Page(given={"runs/demo": "run"}),
    "docs/evidence/gallery.md": Page({CELLS: "optim.lr=1e-3,3e-3"}),
    "docs/guides/data.md": Page(given={"input.txt": "To be, or not to be. " * 500}),
    "docs/guides/evaluate.md": Page(
        {
            "eval.hellaswag_items=200": "eval.hellaswag_file=hellaswag_val.jsonl",
            "eval.hellaswag_items=50": "eval.hellaswag_file=hellaswag_val.jsonl",
            "eval.squad_file=dev-v1.1.json": "eval.squad_file=dev-v1.1.json eval.squad_items=2",
            "path/to/hf-model": "tiny-model",
        },
        given={"runs/chat": "chat", "runs/quickstart-a6644769": "run"},
    ),
    "docs/guides/export.md": Page(given={"runs/chat": "chat"}),
    "docs/guides/ladder.md": Page(
        {
            "--sizes 100k,300k,1M --tokens 5,10,20": "--sizes 1x16,1x32,2x32 --tokens 0.2,0.5,1 "
            "model.layers=1 model.width=16 model.heads=2 model.context=16"
        }
    ),
    "docs/guides/report.md": Page(given={"run": "run", "runs/a": "run", "runs/b": "run"}),
    "docs/guides/resume.md": Page(codes={"optim.lr=1e-2": 2}),
    "docs/guides/sweep.md": Page(given={"input.txt": "To be, or not to be. " * 500}),
    "docs/guides/train.md": Page(codes={"--world 3": 2}),
}
"""What a page needs besides the files of `Prepared` and the sizes of `smaller`."""


def with_commands() -> list[str]:
    """The pages with commands that run here, in order."""
    listed = [
        name_of(page)
        for page in pages()
        for block in blocks(page)
        if block.language == "python" or any(not elsewhere(c) for c in commands_of(block))
    ]
    return [page for page in dict.fromkeys(listed) if not page.startswith(TUTORIALS)]


def test_every_command_runs_here_or_names_its_test():
    commands = all_commands()
    unknown = [
        str(command)
        for command in commands
        for part in command.parts()
        if "windlass" in part and part[0] != "windlass" and not elsewhere(command)
        if "=" not in part[0] and "|" not in command.text
    ]
    assert not unknown, "no test runs these; name one in ELSEWHERE:\n" + "\n".join(unknown)
    for pattern, test in ELSEWHERE.items():
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert any(one.startswith(name) for one in names), (pattern, test)
        assert any(elsewhere(command) == test for command in commands), f"{pattern} is not used"
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    texts = {page: " ".join(text.replace("\\\n", " ").split()) for page, text in texts.items()}
    stale = [(page, said) for page, one in PAGES.items() for said in one.instead]
    stale = [(page, said) for page, said in stale if said not in texts[page]]
    assert not stale, f"these pages do not say this any more: {stale}"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", with_commands())
def test_every_command_of_a_page_runs(name, tmp_path, prepared, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WINDLASS_QUIET_END", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    Runner(PAGES.get(name, Page()), prepared, capfd).run(ROOT / name)
