"""The site of the documentation, as `make docs` builds it."""

import os
import re
import subprocess
import sys

import pytest

from docs_pages import ROOT


@pytest.mark.full
def test_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "s")]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    built = {path: path.read_text(encoding="utf-8") for path in (tmp_path / "s").rglob("*.html")}
    assert len(built) > 50
    for path, text in built.items():
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"(\w+:)?//", text)
        assert not loaded, path
    api = next(text for path, text in built.items() if path.name == "api.html")
    for name in ("windlass.train", "windlass.Recipe.load", "windlass.Run.lines", "windlass.Suite"):
        assert f'id="{name}"' in api, name
