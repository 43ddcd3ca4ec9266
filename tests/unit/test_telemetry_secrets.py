"""A secret in every place where a user can write one: no file that leaves a run has it."""

import json
from pathlib import Path

from report_fixtures import add_lines, build_run

from windlass.recipe import Recipe
from windlass.reports.charts import charts
from windlass.reports.study import StudyView, sweep_charts
from windlass.reports.write import report
from windlass.run import Run
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


def leaked(folder: Path) -> list[tuple[Path, str]]:
    found = [path for path in folder.rglob("*") if path.suffix not in (".png", ".pdf")]
    texts = {
        path: f"{path.relative_to(folder)} {path.read_text()}" for path in found if path.is_file()
    }
    assert len(texts) > 5
    return [(path, secret) for path, text in texts.items() for secret in SECRETS if secret in text]


def run_with_secrets(path: Path, source: str, lr: float) -> Run:
    notes = f"with {' '.join(VARIABLES.values())} and s3://key:{PASSWORD}@bucket/x"
    run = build_run(path, f"data.source={source}", f"run.notes={notes}", DIGEST, steps=60, lr=lr)
    changed = {"data.source": [SOURCES, [source]], "tracker.password": [OTHER, f"{OTHER}2"]}
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


def test_no_file_of_a_report_of_a_run_or_a_study_and_no_name_has_a_secret(tmp_path, monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    recipe = Recipe.load("quickstart", ["train.steps=60", DIGEST])
    grid = {"data.source": SOURCES, "optim.lr": [1e-3, 1e-4]}
    study = Study.create(recipe, grid, tmp_path / "study")
    runs = [run_with_secrets(study.run_of(c).path, *c.assignment.values()) for c in study.cells]
    report(runs[0], tmp_path / "of-one", plots=False)
    report(runs[1:], tmp_path / "of-three", plots=False)
    report(study.path, tmp_path / "of-all", plots=False)
    for folder in ("of-one", "of-three", "of-all"):
        assert leaked(tmp_path / folder) == []
    results = (tmp_path / "of-three" / "results.csv").read_text()
    assert "https://***@example.org/a.txt" in results
    names = " ".join(cell.directory for cell in study.cells)
    seen = StudyView(study.path)
    drawn = [*sweep_charts(seen), *charts(seen.views)]  # what the pictures say
    texts = [chart.title for chart in drawn]
    for chart in drawn:
        texts += [*chart.x.names, *chart.y.names, *(one.name for one in chart.series)]
    assert texts and not [secret for secret in SECRETS if secret in f"{names} {texts}"]
