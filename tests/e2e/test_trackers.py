"""Live exporters beside a stand-in for training: what the trackers' own readers find is what the ledger says."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import tracker_readers as readers

from helpers import start
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.telemetry.devices import DeviceSampler
from windlass.telemetry.ledger import Ledger
from windlass.telemetry.trackers import Trackers
from windlass.telemetry.trackers import exporter_process as points

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

KEY = "0123456789abcdef0123456789abcdef01234567"
PASSWORD = "correct-horse-battery"
PROJECT = "proofs"


def recipe_of(run: Path, **telemetry) -> Recipe:
    """The recipe of a run that has no trainer, written where a run has it."""
    telemetry = {"trackers": ["tensorboard", "mlflow", "wandb"], "project": PROJECT, "flush_seconds": 120.0} | telemetry
    about = {"dir": str(run), "notes": f"from https://me:{PASSWORD}@example.org/data"}
    recipe = Recipe.model_validate({"run": about, "telemetry": telemetry})
    run.mkdir(parents=True, exist_ok=True)
    (run / "recipe.toml").write_text(recipe.toml())
    return recipe


def train(run: Path, attempt: int, first: int, last: int, end: str = "") -> None:
    """What training writes: losses of which no two are equal, an evaluation and a sample every 4 steps."""
    sampler = DeviceSampler(run / "devices", rank=attempt, world=2, every=30.0, attempt=attempt).start()
    sampler.phase("train")
    sampler.stop()
    ledger = Ledger(run / "metrics.jsonl", attempt, stamp=lambda: {"seconds": {"train": 1.5}})
    ledger.write("event", first, event="resumed" if attempt else "started", world=2, steps=12)
    for step in range(first + 1, last + 1):
        loss = 5 / step + attempt / 7
        ledger.write(
            "train", step, loss=loss, lr=1e-3 / 3, grad_norm=math.inf if step == 3 else loss / 3, tokens=1000 * step,
            tokens_per_s=1e4 / 3 + step, step_ms=3.5, epoch=step / 9,
        )  # fmt: skip
        if step % 4 == 0:
            ledger.write(
                "eval", step, suite="loss", loss=4 / step + attempt, perplexity=math.exp(4 / step), runtime_s=0.1
            )
            ledger.write("eval", step, suite="hellaswag", acc_norm=0.25 + step / 100)
            ledger.write("sample", step, index=0, prompt="To", text=f"To <be>\nor **not** {step} \N{SNOWMAN}")
    if end == "finished":
        ledger.write("summary", last, final_loss=1 / 3, best_step="8", by_rank={"rank_0": {"avg_cpu_util_pct": 98.5}})
    if end:
        ledger.write("event", last, event=end)
    ledger.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that was killed after step 8, resumed from step 5, and finished at 12, with all trackers live."""
    top = tmp_path_factory.mktemp("trackers")
    run = top / "runs" / "the-run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(top)
        patch.setenv("WANDB_API_KEY", KEY)
        patch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        recipe, notes = recipe_of(run), []
        killed = Trackers(Path("runs/the-run"), recipe.telemetry.trackers, 120.0)
        train(run, 0, 0, 8)
        notes += killed.finish(120)
        again = Trackers(Path("runs/the-run"), recipe.telemetry.trackers, 120.0)
        train(run, 1, 5, 12, "finished")
        notes += again.finish(120)
        yield top, run, notes


def expected(run: Path) -> readers.Curves:
    """Every number of the effective ledger under the name that it has in a tracker."""
    curves = defaultdict(list)
    for line in Run(run).ledger():
        if line["kind"] in ("train", "eval"):
            for name, value in points.point(line, {}).scalars.items():
                curves[name].append((line["step"], value))
    return dict(curves)


def without(curves: readers.Curves, *prefixes: str) -> readers.Curves:
    return {name: points for name, points in curves.items() if not name.startswith(prefixes)}


def as_float32(curves: readers.Curves) -> readers.Curves:
    return {name: [(step, float(np.float32(value))) for step, value in found] for name, found in curves.items()}


def test_where_to_look_is_said_once_and_nothing_went_wrong(finished):
    _, _, notes = finished
    assert not [note for note in notes if note.warning]
    text = "\n".join(note.text for note in notes)
    assert "tensorboard --logdir runs/the-run/tensorboard" in text
    assert "mlflow ui --backend-store-uri sqlite:///runs/mlflow.db" in text
    assert "wandb sync runs/the-run/wandb/offline-run-" in text and "(offline: " in text


def test_tensorboard_holds_the_effective_ledger(finished):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    _, run, _ = finished
    events = readers.tensorboard(run / "tensorboard")
    curves = readers.tensorboard_curves(events)
    assert without(curves, "device/", "summary/") == as_float32(expected(run))
    assert len(list((run / "tensorboard").glob("events.*"))) == 1
    assert curves["device/rss_mb/rank_1"]
    assert curves["summary/final_loss"] == [(12, float(np.float32(1 / 3)))]
    assert curves["summary/by_rank/rank_0/avg_cpu_util_pct"] == [(12, 98.5)]
    texts = [x.tensor_proto.string_val[0].decode() for x in events.Tensors("samples/0")]
    assert texts == [f"To <be>\nor **not** {step} \N{SNOWMAN}" for step in (4, 8, 12)]
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["optim.lr"].number_value == 1e-3 and hparams["model.norm"].string_value == "layernorm"


def test_mlflow_holds_each_step_once(finished):
    top, run, _ = finished
    client, found = readers.mlflow_run(f"sqlite:///{top}/runs/mlflow.db", PROJECT)
    curves = {name: sorted(values) for name, values in readers.mlflow_curves(client, found).items()}
    # a point cannot be taken back: steps 6 to 8 stay as the first attempt told them
    first = expected_of_attempts(run)
    assert without(curves, "device/", "summary/") == first
    assert found.info.status == "FINISHED" and found.info.run_name == "the-run"
    assert found.data.params["optim.lr"] == "0.001" and found.data.params["telemetry.project"] == PROJECT
    assert found.data.params["world"] == "2" and PASSWORD not in str(found.data.tags)
    assert curves["summary/final_loss"] == [(12, 1 / 3)]
    artifacts = {x.path for x in client.list_artifacts(found.info.run_id, "samples/0")}
    assert "samples/0/step-00000012.txt" in artifacts


def expected_of_attempts(run: Path) -> readers.Curves:
    """The first telling of each step, which is what a tracker keeps that can forget nothing."""
    curves, seen = defaultdict(list), set()
    for raw in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(raw)
        if line["kind"] in ("train", "eval") and (line["step"], points.stream(line)) not in seen:
            seen.add((line["step"], points.stream(line)))
            for name, value in points.point(line, {}).scalars.items():
                # SQL has no infinity: MLflow keeps the largest number there is
                curves[name].append((line["step"], min(value, sys.float_info.max)))
    return dict(curves)


def test_wandb_holds_the_effective_ledger_in_one_offline_run(finished):
    _, run, _ = finished
    records = list(readers.wandb_records(run / "wandb"))
    rows = readers.wandb_history(records)
    curves = readers.wandb_curves(rows)
    own = without(curves, "_", "step", "marks/", "device/", "samples/", "summary/")
    assert own == expected(run)
    assert [row["_step"] for row in rows] == list(range(1, 13)), "a row a step"
    pages = sorted(
        run.glob("wandb/offline-run-*/files/media/html/samples/0_*.html"), key=lambda path: path.stat().st_mtime
    )
    assert "To &lt;be&gt;\nor **not** 12 \N{SNOWMAN}" in pages[-1].read_text()
    (begin,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in begin.config.update}
    assert config["optim.lr"] == 1e-3 and begin.display_name == "the-run" and begin.project == PROJECT
    summary = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            summary |= {x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in record.summary.update}
    assert summary["summary/final_loss"] == 1 / 3 and summary["state"] == "finished"


def test_a_replay_into_a_tracker_that_has_all_changes_nothing(finished):
    top, run, _ = finished

    def stored():
        events = readers.tensorboard_curves(readers.tensorboard(run / "tensorboard"))
        mlflow = readers.mlflow_curves(*readers.mlflow_run(f"sqlite:///{top}/runs/mlflow.db", PROJECT))
        rows = readers.wandb_history(list(readers.wandb_records(run / "wandb")))
        rows = [{key: value for key, value in row.items() if key != "_runtime"} for row in rows]  # written anew
        return events, mlflow, rows

    before = stored()
    for process in [start("track", run, "--to", name) for name in ("tensorboard", "mlflow", "wandb")]:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0 and "runs" in output, output
    assert stored() == before


def test_no_secret_is_in_any_file(finished):
    """But for the recipe, which is the user's own text."""
    top, run, _ = finished
    files = [path for path in top.rglob("*") if path.is_file() and path != run / "recipe.toml"]
    assert len(files) > 10
    for path in files:
        data = path.read_bytes()
        assert KEY.encode() not in data and PASSWORD.encode() not in data, path
