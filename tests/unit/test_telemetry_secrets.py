"""A secret in every place where a user can write one: no file that leaves a run has it."""

import json
from pathlib import Path

import pytest
from report_fixtures import add_lines, build_run

from windlass.recipe import Recipe
from windlass.reports.charts import charts
from windlass.reports.study import StudyView, sweep_charts
from windlass.reports.write import report
from windlass.study.study import Study

PASSWORD, TOKEN, OTHER = "correct-horse-battery", "9f8e7d6c5b4a", "f00dfacecafe"
SOURCES = [
    f"https://me:{PASSWORD}@example.org/a.txt",
    f"https://example.org/b.txt?rows=9&access_token={TOKEN}",
]
NAMES = ("PGPASSWORD", "OPENAI_KEY", "SSHPASS", "GITHUB_PAT")
VARIABLES = {name: f"the-{name.lower()}-itself" for name in NAMES}
DIGEST = f"data.sha256={'0' * 64}"  # a source that is downloaded has one
SECRETS = [PASSWORD, TOKEN, OTHER, *VARIABLES.values()]


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def leaked(folder: Path) -> list[tuple[Path, str]]:
    found = [path for path in folder.rglob("*") if path.suffix not in (".png", ".pdf")]
    texts = {
        path: f"{path.relative_to(folder)} {path.read_text()}" for path in found if path.is_file()
    }
    assert len(texts) > 5
    return [(path, secret) for path, text in texts.items() for secret in SECRETS if secret in text]


def run_with_secrets(path: Path, *overrides: str):
    notes = f"with {' '.join(VARIABLES.values())} and s3://key:{PASSWORD}@bucket/x"
    settings = [f"data.source={json.dumps(SOURCES)}", f"run.notes={notes}", DIGEST]
    run = build_run(path, *settings, *overrides, steps=60, killed_at=40)
    sources = [SOURCES, [f"{SOURCES[1]}2"]]
    changed = {"data.source": sources, "tracker.password": [OTHER, f"{OTHER}2"]}
    event, end = {"kind": "event", "attempt": 1, "step": 40}, {"attempt": 1, "step": 60}
    add_lines(
        run,
        event | {"event": "settings_changed", "settings": changed},
        event | end | {"event": "finished", "reason": f"could not reach {SOURCES[0]}"},
        end | {"kind": "sample", "index": 0, "prompt": "", "text": f"see {SOURCES[1]}"},
    )
    environment = {"sources": SOURCES, "api_key": OTHER, "packages": {"tiktoken": "0.9"}}
    (path / "environment.json").write_text(json.dumps(environment))
    return run


def test_no_file_of_a_report_has_a_secret(tmp_path):
    one = run_with_secrets(tmp_path / "one")
    two = run_with_secrets(tmp_path / "two", f"data.source={SOURCES[0]}")
    report(one, tmp_path / "of-one", plots=False)
    report([one, two], tmp_path / "of-two", plots=False)
    assert leaked(tmp_path / "of-one") == [] == leaked(tmp_path / "of-two")
    results = (tmp_path / "of-two" / "results.csv").read_text()
    assert "https://***@example.org/a.txt" in results


def test_no_file_of_a_studys_report_and_no_name_has_a_secret(tmp_path):
    recipe = Recipe.load("quickstart", ["train.steps=60", DIGEST])
    grid = {"data.source": SOURCES, "optim.lr": [1e-3, 1e-4]}
    study = Study.create(recipe, grid, tmp_path / "study")
    for cell in study.cells:
        source, lr = cell.assignment.values()
        build_run(study.run_of(cell).path, f"data.source={source}", DIGEST, steps=60, lr=lr)
    report(study.path, tmp_path / "out", plots=False)
    assert leaked(tmp_path / "out") == []
    names = " ".join(cell.directory for cell in study.cells)
    seen = StudyView(study.path)
    drawn = [*sweep_charts(seen), *charts(seen.views)]  # what the pictures say
    texts = [chart.title for chart in drawn]
    for chart in drawn:
        texts += [*chart.x.names, *chart.y.names, *(one.name for one in chart.series)]
    assert texts and not [secret for secret in SECRETS if secret in f"{names} {texts}"]
