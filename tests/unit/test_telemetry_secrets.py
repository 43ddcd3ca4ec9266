"""A secret in every place where a user can write one: no file that leaves a run has it."""

import json
import os
from pathlib import Path

import pytest
from report_fixtures import add_lines, build_run

from windlass.recipe import Recipe
from windlass.reports.run_charts import charts
from windlass.reports.study import StudyView, sweep_charts
from windlass.reports.write import report
from windlass.study.study import Study
from windlass.telemetry.environment import describe_rank, write_environment

PASSWORD, TOKEN, OTHER = "correct-horse-battery", "9f8e7d6c5b4a", "f00dfacecafe"
SOURCES = [
    f"https://me:{PASSWORD}@example.org/a.txt",
    f"https://example.org/b.txt?rows=9&access_token={TOKEN}",
]
VARIABLES = {
    name: f"the-{name.lower()}-itself"
    for name in ("PGPASSWORD", "OPENAI_KEY", "SSHPASS", "GITHUB_PAT")
}
DIGEST = f"data.sha256={'0' * 64}"  # a source that is downloaded has one
SECRETS = [PASSWORD, TOKEN, OTHER, *VARIABLES.values()]


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def leaked(folder: Path) -> list[tuple[str, str]]:
    files = [
        path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".png", ".pdf")
    ]
    assert len(files) > 5
    texts = {str(path.relative_to(folder)): path.read_text() for path in files}
    return [
        (name, secret)
        for name, text in texts.items()
        for secret in SECRETS
        if secret in text or secret in name
    ]


def run_with_secrets(path: Path, *overrides: str):
    notes = f"with {' '.join(VARIABLES.values())} and s3://key:{PASSWORD}@bucket/x"
    settings = [
        f"data.source={json.dumps(SOURCES)}",
        f"run.notes={notes}",
        DIGEST,
    ]
    run = build_run(path, *settings, *overrides, steps=60, killed_at=40)
    changed = {
        "data.source": [SOURCES, [f"{SOURCES[1]}2"]],
        "tracker.password": [OTHER, f"{OTHER}2"],
    }
    add_lines(
        run,
        {
            "kind": "event",
            "event": "settings_changed",
            "step": 40,
            "attempt": 1,
            "settings": changed,
        },
        {
            "kind": "event",
            "event": "finished",
            "step": 60,
            "attempt": 1,
            "reason": f"could not reach {SOURCES[0]}",
        },
        {
            "kind": "sample",
            "step": 60,
            "attempt": 1,
            "index": 0,
            "prompt": "",
            "text": f"see {SOURCES[1]}",
        },
    )
    (path / "environment.json").write_text(
        json.dumps({"sources": SOURCES, "api_key": OTHER, "packages": {"tiktoken": "0.9"}})
    )
    return run


def test_no_file_of_a_report_has_a_secret(tmp_path):
    one = run_with_secrets(tmp_path / "one")
    two = run_with_secrets(tmp_path / "two", f"data.source={SOURCES[0]}")
    report(one, tmp_path / "of-one", plots=False)
    report([one, two], tmp_path / "of-two", plots=False)
    assert leaked(tmp_path / "of-one") == [] == leaked(tmp_path / "of-two")
    settings = (tmp_path / "of-two" / "settings.csv").read_text()
    assert "https://***@example.org/a.txt" in settings and "rows=9&access_token=***" in settings
    assert "0.9" in (tmp_path / "of-one" / "index.html").read_text()


def test_no_file_of_a_studys_report_and_no_name_has_a_secret(tmp_path):
    recipe = Recipe.load("quickstart", ["train.steps=60", DIGEST])
    study = Study.create(
        recipe, {"data.source": SOURCES, "optim.lr": [1e-3, 1e-4]}, tmp_path / "study"
    )
    for cell in study.cells:
        source, lr = cell.assignment.values()
        build_run(study.run_of(cell).path, f"data.source={source}", DIGEST, steps=60, lr=lr)
    report(study.path, tmp_path / "out", plots=False)
    assert leaked(tmp_path / "out") == []
    assert not [
        cell.directory
        for cell in study.cells
        if any(secret in cell.directory for secret in SECRETS)
    ]
    seen = StudyView(study.path)
    drawn = [*sweep_charts(seen), *charts(seen.views)]  # what the pictures say
    texts = [
        text
        for chart in drawn
        for text in (
            chart.title,
            *chart.x.names,
            *chart.y.names,
            *(one.name for one in chart.series),
        )
    ]
    assert texts and not [text for text in texts for secret in SECRETS if secret in text]


def test_no_secret_is_in_the_environment_file(tmp_path, monkeypatch):
    command = ["windlass", "train", "x", f"data.source={json.dumps(SOURCES)}", "--api-key", OTHER]
    monkeypatch.setattr("sys.orig_argv", [*command, *VARIABLES.values()])
    monkeypatch.setenv("NCCL_NET", f"https://me:{PASSWORD}@host")
    write_environment(tmp_path, [describe_rank(0)], origin={"source": SOURCES, "password": OTHER})
    text = (tmp_path / "environment.json").read_text()
    assert [secret for secret in SECRETS if secret in text] == []
    assert json.loads(text)["ranks"][0]["rank"] == 0 and os.environ["PGPASSWORD"] not in text
