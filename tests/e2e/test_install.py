"""The wheel in an environment of its own: what `pip install windlass-lm` brings, and what it
answers without the extras.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers import TINY, overrides, write_corpus
from windlass.errors import EXTRAS
from windlass.recipe import presets
from windlass.run import Run

REPOSITORY = Path(__file__).parents[2]
MOST_PACKAGES = 45
CLEAN = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy of the checkout, which stays as it is."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    made = shutil.ignore_patterns("*.egg-info", "__pycache__")
    shutil.copytree(REPOSITORY / "src", copy / "src", ignore=made)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=copy)
    return next((copy / "dist").glob("windlass_lm-*.whl"))


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and links to the packages that it needs, taken from this
    environment, and no others.
    """
    venv = tmp_path_factory.mktemp("base")
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    install = [sys.executable, "-m", "pip", "--python", venv / "bin/python", "install"]
    run(*install, "-q", "--no-deps", wheel)
    site = next((venv / "lib").glob("python*/site-packages"))
    needed = next(iter(distributions(name="windlass-lm", path=[str(site)]))).requires
    for name in closure(needed):
        package = distribution(name)
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(package.locate_file(top))).absolute())
    return venv


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    how: dict[str, Any] = {"env": CLEAN, "capture_output": True, "text": True, "timeout": 280}
    done = subprocess.run([*map(str, command)], cwd=cwd, **how)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def closure(requirements: list[str]) -> set[str]:
    """The packages that some requirements bring, by the metadata of those installed here."""
    todo, done = [Requirement(text) for text in requirements], set[tuple[str, str]]()
    while todo:
        requirement = todo.pop()
        for extra in ("", *requirement.extras):
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            key = (canonicalize_name(requirement.name), extra)
            if not wanted or key in done:
                continue
            done.add(key)
            needed = map(Requirement, distribution(requirement.name).requires or ())
            for each in needed:
                if each.marker is None or each.marker.evaluate({"extra": extra}):
                    each.marker = None
                    todo.append(each)
    return {name for name, _ in done}


def test_the_wheel_has_presets_and_the_page(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {f"presets/{name}.toml" for name in presets()}
    files |= {f"reports/{name}" for name in ("page.html", "page.css", "page.js", "chart.js")}
    files |= {"py.typed", "interop/modeling_windlass.py"}
    assert {f"windlass/{name}" for name in files} <= names
    assert not any(name.startswith("tests") for name in names)


def trains(venv: Path, folder: Path) -> None:
    """Quickstart trains from an environment, outside the checkout, to its report."""
    few = ["train.steps=4", "model.layers=1", "data.max_tokens=100_000", "eval.sample_tokens=8"]
    done = run(venv / "bin/windlass", "train", "quickstart", *few, "run.dir=run", cwd=folder)
    assert "run/report/index.html" in done.stdout and (folder / "run/report/index.html").is_file()
    assert Run(folder / "run").lines("sample")[-1]["step"] == 4


SHOW = """
import windlass
from importlib.metadata import distributions
print(windlass.__file__, *{one.name for one in distributions()} - {"pip"})
"""


def packages(venv: Path, folder: Path) -> list[str]:
    """The packages of an environment, but for pip, which came with it; windlass is its own."""
    place, *names = run(venv / "bin/python", "-c", SHOW, cwd=folder).stdout.split()
    assert place.startswith(str(venv))
    return names


def test_the_base_is_small_and_trains_quickstart(base, tmp_path):
    names = packages(base, tmp_path)
    assert {"windlass-lm", "torch"} <= {*names} and len(names) <= MOST_PACKAGES, sorted(names)
    trains(base, tmp_path)


@pytest.mark.full  # a minute, most of it for torch
def test_pip_brings_as_few_from_the_registry(wheel, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(tmp_path / "venv/bin/pip", "install", "-q", "-c", REPOSITORY / "constraints.txt", wheel)
    names = packages(tmp_path / "venv", tmp_path)
    assert len(names) <= MOST_PACKAGES, sorted(names)
    trains(tmp_path / "venv", tmp_path)


COMMANDS = """
import contextlib, io, json, sys
from windlass.cli import main
ends = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.suppress(SystemExit):
        main(words)
    ends.append(errors.getvalue())
print(json.dumps(ends))
"""
"""Run several commands in one process, and print what each writes to standard error."""


def test_what_is_missing_is_one_message_at_the_start(base, tmp_path):
    compressed = tmp_path / "words.txt.zst"
    compressed.touch()
    corpus = write_corpus(tmp_path / "words.txt", words=200)
    tiny = overrides({**TINY, "data.source": str(corpus), "run.dir": "run"})
    train = ["train", "quickstart", *tiny]
    prepare = ["prepare", "quickstart"]
    hf = '[model]\nkind = "hf"\nname = "some/model"\n[train]\nsteps = 1\n'
    (tmp_path / "hf.toml").write_text(hf)
    cases = [
        ([*train, 'telemetry.trackers=["wandb"]'], "wandb", "wandb", "telemetry.trackers"),
        ([*train, "eval.suites=lm-eval:arc_easy"], "lm_eval", "lm-eval", "eval.suites"),
        (["train", "hf.toml"], "transformers", "hf", "model.kind"),
        ([*prepare, "data.tokenizer=gpt2", "model.vocab=0"], "tiktoken", "data", "data.tokenizer"),
        ([*prepare, f"data.source={compressed}"], "pyarrow", "data", "data.source"),
        ([*prepare, "data.source=hf:some/data"], "datasets", "hf", "data.source"),
    ]
    commands = json.dumps([words for words, *_ in cases])
    done = run(base / "bin/python", "-c", COMMANDS, commands, cwd=tmp_path)
    errors = json.loads(done.stdout.splitlines()[-1])
    for error, (_, package, extra, key) in zip(errors, cases, strict=True):
        for words in (f"pip install {' '.join(EXTRAS[extra])}", package, key):
            assert words in error, error
        assert len(error.splitlines()) == 1, error
    assert not [*tmp_path.glob("run*"), *tmp_path.glob("stud*")]


def test_every_optional_package_is_in_the_extra_that_the_message_names():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        names = {canonicalize_name(Requirement(text).name) for text in declared[extra]}
        assert {canonicalize_name(package) for package in packages} <= names, extra
    everything = Requirement(declared["all"][0])
    assert set(everything.extras) == set(EXTRAS)
    assert everything.name == Requirement(declared["dev"][0]).name == "windlass-lm"
