"""A run and a study that the tests of reports read and do not change."""

import json

import pytest
from report_fixtures import NASTY, build_run, build_study

from windlass.reports.study import StudyView
from windlass.reports.view import RunView


@pytest.fixture(scope="session")
def one(tmp_path_factory):
    """A run that was killed at step 263 of 400 and resumed from its checkpoint of step 200."""
    path = tmp_path_factory.mktemp("runs") / "one"
    return RunView(build_run(path, f"run.notes={json.dumps(NASTY)}", killed_at=263))


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """Three rates, two schedules, two seeds; one cell failed, one waits."""
    return StudyView(build_study(tmp_path_factory.mktemp("studies") / "study"))
