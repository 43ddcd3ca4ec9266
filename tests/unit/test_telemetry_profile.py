"""A profile of some steps."""

import gzip
import json

from helpers import each_step, refused, tiny_recipe
from windlass import train


def test_a_profile_is_in_the_run_and_its_ledger(corpus, tmp_path):
    settings = {"train__steps": 6, "telemetry__profile": "3:2", "telemetry__every": 2}
    run = train(tiny_recipe(corpus, tmp_path / "run", **settings))
    [event] = [e for e in run.events if e["event"] == "profile"]
    trace, table = (run.path / name for name in event["files"])
    assert event["step"] == 4 and trace.name == "steps-3-4.json.gz"
    with gzip.open(trace) as file:
        names = [e.get("name") for e in json.load(file)["traceEvents"]]
    per_step = names.count("aten::embedding")
    assert per_step and per_step % 2 == 0, "two steps"
    assert "aten::addmm" in table.read_text() or "aten::mm" in table.read_text()
    # the end of the run ends a profile
    late = train(tiny_recipe(corpus, tmp_path / "late", train__steps=3, telemetry__profile="3:9"))
    assert (late.path / "profile" / "steps-3-3.txt").is_file()


def test_a_profile_that_cannot_be_written_does_not_end_the_run(corpus, tmp_path):
    block = each_step(lambda now: (tmp_path / "run" / "profile").touch())
    recipe = tiny_recipe(corpus, tmp_path / "run", train__steps=3, telemetry__profile="2:1")
    run = train(recipe, callbacks=[block])
    assert run.state == "finished" and "was not written" in run.log_path.read_text()


def test_a_wrong_profile_is_refused(corpus, tmp_path):
    with refused("telemetry.profile", "100:3"):
        tiny_recipe(corpus, tmp_path / "run", telemetry__profile="0:5")
