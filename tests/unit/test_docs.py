"""The documentation: its links resolve, its commands parse, its recipes load, its Python compiles,
and it is short.
"""

import re
import tomllib
from pathlib import Path

import pytest

from docs_pages import (
    DOCS,
    ROOT,
    Block,
    Command,
    blocks,
    command_line,
    commands_of,
    name_of,
    pages,
    windlass_words,
)
from windlass.errors import UserError
from windlass.launch.job import Site, read_site
from windlass.recipe import Recipe, presets, settings, study_presets
from windlass.recipe.explain import write_first_recipe
from windlass.study.grid import AXES_ONLY, expand, read_axes
from windlass.study.study import load_study

README_WORDS, DOCS_WORDS = 900, 31_600
GENERATED = ("recipe.md", "commands.md", "measures.md", "job-scripts.md")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]*)(?:\s+\"[^\"]*\")?\)")
TAG = re.compile(r"<(?:img|a|source)\b[^>]*?\b(?:src|href|srcset)=\"([^\"]+)\"")


def test_every_link_and_image_leads_somewhere():
    """The site checks the anchors, too (`tests/e2e/test_docs_site.py`)."""
    broken = []
    for page in (*pages(), ROOT / "CHANGELOG.md", ROOT / "tests" / "gpu" / "README.md"):
        text = re.sub(r"^( *)```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        text = re.sub(r"`[^`\n]*`", "``", text)  # the brackets of code are no links
        for target in [*LINK.findall(text), *TAG.findall(text)]:
            # `../../issues` is GitHub's own page
            is_elsewhere = re.match(r"[a-z]+:|#|\.\./\.\./issues$", target)
            if not is_elsewhere and not (page.parent / target.partition("#")[0]).exists():
                broken.append(f"{name_of(page)}: {target}")
    assert not broken, "\n".join(broken)


def take(block: Block) -> None:
    """Load the recipe or site file of a block; write a block that begins with its file's name."""
    if block.file:
        Path(block.file).write_text(block.text, encoding="utf-8")
    if block.language != "toml":
        return
    file = Path(block.file or "block.toml")
    file.write_text(block.text, encoding="utf-8")
    if set(tomllib.loads(block.text)) <= set(Site.model_fields):
        read_site(file)
    else:
        Recipe.load(str(file))


def try_command(command: Command) -> None:
    """Parse a command line, and load its recipes. Raises for what is wrong."""
    for part in command.parts():
        if words := windlass_words(part):
            try_words(words)
        if ">" in part and part[-1].endswith(".toml"):
            Path(part[-1]).write_text('extends = "quickstart"\n', encoding="utf-8")


def try_words(words: list[str]) -> None:
    """Parse the words after `windlass`, and load the recipe with its settings and axes."""
    name, *arguments = words
    if name.startswith("-"):
        return
    command = command_line().commands.get(name)
    assert command, f"there is no command {name}"
    values = command.make_context(name, arguments).params
    if name == "init":
        write_first_recipe(values["file"], values["data"], values["model"])
    elif name == "launch" and (words := windlass_words(values["command"])):
        try_words(words)
    if key := values.get("key"):
        assert any(f"{other}.".startswith(f"{key}.") for other in settings()), f"no setting {key}"
    if site := values.get("site"):
        read_site(site)
    recipe = values.get("recipe") or values.get("run") or values.get("model") or ""
    changes = [*(values.get("overrides") or []), *(values.get("set_") or [])]
    axes = read_axes(values.get("axes") or [])
    if recipe in study_presets():
        load_study(recipe, tomllib.loads(study_presets()[recipe].read_text())["verb"], changes)
    elif recipe in presets() or str(recipe).endswith(".toml"):
        expand(Recipe.load(recipe, changes), axes)
    else:  # a run or a study, which does not exist here
        names = [change.partition("=")[0] for change in changes]
        unknown = {*names, *(key for axis in axes for key in axis.keys)}
        unknown -= {*settings(), *AXES_ONLY}
        assert not unknown, f"there is no setting {', '.join(unknown)}"


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_recipe_loads_and_every_command_parses(page, tmp_path, monkeypatch):
    """In the order of the page: a command may name a file that the page shows or makes before."""
    monkeypatch.chdir(tmp_path)
    problems = []
    for block in blocks(page):
        for one in (block, *commands_of(block)):
            try:
                take(one) if isinstance(one, Block) else try_command(one)
            except Exception as error:
                known = isinstance(error, UserError | AssertionError | ValueError)
                if not known and not hasattr(error, "format_message"):
                    raise
                said = error.format_message() if hasattr(error, "format_message") else error
                problems.append(f"{one.page}:{one.line}: {one.text}\n  {said}")
    assert not problems, "\n".join(problems)


def test_every_python_block_compiles():
    for page in pages():
        for block in blocks(page):
            if block.language == "python":
                compile(block.text, f"{block.page}:{block.line}", "exec")


def words_in(page: Path) -> int:
    """The words of a page without its generated parts."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- generated: .*?<!-- end -->", "", text, flags=re.S)
    text = re.sub(r"(<!-- measured(?:, archived)?: .*? -->\n)\n(\|.*\n)*", r"\1", text)
    text = re.sub(r"(<!-- measured -->\n)\n```console\n.*?^```\n", r"\1", text, flags=re.M | re.S)
    return len(text.split())


def test_documentation_is_short():
    assert words_in(ROOT / "README.md") <= README_WORDS
    counts = {
        name_of(page): words_in(page)
        for page in sorted(DOCS.rglob("*.md"))
        if page.name not in (*GENERATED, "LOG.md")  # the log grows
    }
    shown = "\n".join(f"{words:6,} {page}" for page, words in counts.items())
    total = sum(counts.values())
    assert total <= DOCS_WORDS, f"{shown}\n{total:6,} words, more than {DOCS_WORDS:,}"
