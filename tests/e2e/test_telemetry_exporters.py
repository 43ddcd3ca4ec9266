"""Live exporters beside a stand-in for training: what the trackers' own readers find is what the
ledger says.
"""

import json
import math
import re
import sqlite3
import struct
import sys
import time
from collections import defaultdict
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from helpers import start, wait_for
from windlass.ledger import Ledger, read_lines
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.telemetry.exporter import point, stream
from windlass.telemetry.trackers import Trackers, track

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

KEY = "0123456789abcdef0123456789abcdef01234567"
PASSWORD, TOKEN = "correct-horse-battery", "9f8e7d6c5b4a"
PROJECT = "proofs"
NAMES = ["tensorboard", "mlflow", "wandb"]
SUMMARY = {"steps": 12, "epochs": 4 / 3, "world": 2, "runtime_s": 98.5, "best_eval_loss": 0.25}
SUMMARY |= {"samples_per_s_mean": 11.5, "avg_gpu_util_pct": 91.5, "peak_mem_mb": 1760.0}
WALL_TIME = {"startup": 1.5, "train": 97.0}
HEADLINE = SUMMARY | {f"wall_time/{name}": value for name, value in WALL_TIME.items()}
FACTS = {"parameters": 28_952_064, "device": "NVIDIA A100-SXM4-40GB", "precision": "bf16"}


def train(run: Path, attempt: int, first: int, last: int, end: str = "") -> None:
    """What training writes: losses of which no two are equal, an evaluation and a sample every 4
    steps.
    """
    ledger = Ledger(run / "metrics.jsonl", attempt, stamp=lambda: {"seconds": {"train": 1.5}})
    start = {"event": "resumed" if attempt else "started", "world": 2, "steps": 12}
    ledger.write("event", first, **start, **FACTS)
    same = {"lr": 1e-3 / 3, "samples_per_s": 8.5, "step_ms": 3.5}
    same |= {"forward_ms": 1.25, "backward_ms": 2.0}
    for step in range(first + 1, last + 1):
        loss = 5 / step + attempt / 7
        numbers = {"loss": loss, "grad_norm": math.inf if step == 3 else loss / 3}
        numbers |= {"tokens": 1000 * step, "tokens_per_s": 1e4 / 3 + step, "epoch": step / 9}
        ledger.write("train", step, **numbers, **same)
        if step % 4 == 0:
            scores = {"loss": 4 / step + attempt, "perplexity": math.exp(4 / step)}
            ledger.write("eval", step, suite="loss", runtime_s=0.1, **scores)
            ledger.write("eval", step, suite="hellaswag", acc_norm=0.25 + step / 100)
            ledger.write("eval", step, suite="lm-eval:a+b", **{"gsm8k/exact_match,strict": 0.5})
            text = f"To <be>\nor **not** {step} \N{SNOWMAN}"
            ledger.write("sample", step, index=0, prompt="To", text=text)
    if end:
        ledger.write("summary", last, **SUMMARY, wall_time=WALL_TIME)
        ledger.write("event", last, event=end)
    ledger.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that was killed after step 8, resumed from step 5, and finished at 12, with all
    trackers live, W&B offline.
    """
    top = tmp_path_factory.mktemp("trackers")
    run = top / "runs" / "the-run"
    about = {"dir": str(run), "notes": f"from https://me:{PASSWORD}@example.org/data"}
    telemetry = {"trackers": NAMES, "project": PROJECT}
    sources = [f"https://me:{PASSWORD}@example.org/a"]
    sources += [f"https://example.org/b?access_token={TOKEN}&rows=1"]
    data = {"source": sources, "sha256": "0" * 64}
    recipe = Recipe.model_validate({"run": about, "telemetry": telemetry, "data": data})
    run.mkdir(parents=True)
    (top / "study.json").write_text("{}")  # a run in STUDY/runs is a cell of it
    (run / "recipe.toml").write_text(recipe.toml())
    notes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(top)
        patch.setenv("WANDB_API_KEY", KEY)
        patch.setenv("WANDB_MODE", "offline")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        for attempt in ((0, 0, 8), (1, 5, 12, "finished")):
            trackers = Trackers(Path("runs/the-run"), NAMES, 120.0)
            train(run, *attempt)
            if attempt[0] == 0:
                wait_for(lambda: time.sleep(0.3) or has_metrics(top), 200)
                _, stored, curves = from_mlflow(top)
                under_way = stored.data.params, stored.info.status, curves["train/loss"][-1]
            notes += trackers.finish(120)
        text = "\n".join(note.text for note in notes)
        for hint in ("tensorboard --logdir runs/", "mlflow ui --backend", "wandb sync runs/"):
            assert hint in text
        assert not [note.text for note in notes if note.warning]
        yield top, run, under_way


def has_metrics(top):
    """Whether MLflow has numbers; its client would create the tables itself, as the exporter does
    at the same time."""
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{top}/runs/mlflow.db?mode=ro", uri=True)) as store,
    ):
        return store.execute("select count(*) from metrics").fetchone()[0]


def of_kind(records, kind):
    """The records of W&B of one kind."""
    found = [record for record in records if record.WhichOneof("record_type") == kind]
    return [getattr(record, kind) for record in found]


def items_of(items):
    """Values by name, as W&B's records have them."""
    return {x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in items}


def curves_of(lines):
    """Every number of some lines of the ledger under the name that it has in a tracker, as (step,
    value).
    """
    curves = defaultdict(list)
    for line in lines:
        for name, value in point(line).scalars.items() if line["kind"] in ("train", "eval") else ():
            curves[name].append((line["step"], value))
    return dict(curves)


def without(curves, *prefixes):
    return {name: values for name, values in curves.items() if not name.startswith(prefixes)}


def from_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = dict.fromkeys(("scalars", "tensors"), 0)
    events = EventAccumulator(str(run / "tensorboard"), size_guidance=everything).Reload()
    tags = events.Tags()["scalars"]
    return events, {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in tags}


def from_mlflow(top):
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{top}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name(PROJECT).experiment_id])
    curves = dict[str, list]()
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        curves[name] = sorted((x.step, x.value) for x in history)
    return client, run, curves


def from_wandb(run):
    """The records of the one offline run, and the rows of its history.

    A `.wandb` file is a LevelDB log: after a header of 7 bytes, blocks of 32 KiB; in them chunks of
    checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last), data; a block's
    last bytes are void where no header fits.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = run.glob("wandb/offline-run-*/run-*.wandb")
    data, at, whole, records = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        chunk, at = data[at + 7 : at + 7 + length], at + 7 + length
        whole = chunk if kind in (1, 2) else whole + chunk
        if kind in (1, 4):
            records.append(Record.FromString(whole))
    return records, [items_of(history.item) for history in of_kind(records, "history")]


def test_tensorboard_holds_the_effective_ledger(finished):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    _, run, _ = finished
    events, curves = from_tensorboard(run)
    expected = curves_of(Run(run).ledger())
    rounded = {
        name: [(step, float(np.float32(value))) for step, value in values]
        for name, values in expected.items()
    }
    assert without(curves, "summary/") == rounded
    assert len(list((run / "tensorboard").glob("events.*"))) == 1
    summary = {name: values for name, values in curves.items() if name[:8] == "summary/"}
    rounded = {name: [(12, float(np.float32(value)))] for name, value in HEADLINE.items()}
    assert summary == {f"summary/{name}": values for name, values in rounded.items()}
    texts = [x.tensor_proto.string_val[0].decode() for x in events.Tensors("samples/0")]
    assert texts == [f"To <be>\nor **not** {step} \N{SNOWMAN}" for step in (4, 8, 12)]
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["optim.lr"].number_value == 1e-3
    assert hparams["model.norm"].string_value == "layernorm"


def test_mlflow_holds_each_step_once(finished):
    """A point cannot be taken back: steps 6 to 8 stay as the first attempt wrote them."""
    top, run, _ = finished
    client, stored, curves = from_mlflow(top)
    first: dict = {}
    for line in read_lines(run / "metrics.jsonl"):
        first.setdefault((line["step"], stream(line)), line)
    expected = curves_of(first.values())
    assert "eval/lm-eval:a+b/gsm8k/exact_match,strict" in expected
    expected = {  # SQL has no infinity: MLflow stores the largest number; it takes no + and no comma
        re.sub("[+,]", "_", name): [(step, min(x, sys.float_info.max)) for step, x in points]
        for name, points in expected.items()
    }
    assert without(curves, "summary/") == expected
    assert stored.info.status == "FINISHED" and stored.info.run_name == "the-run"
    assert stored.data.params["optim.lr"] == "0.001"
    assert stored.data.params["telemetry.project"] == PROJECT
    assert stored.data.params["world"] == "2" and PASSWORD not in str(stored.data.tags)
    for name, value in HEADLINE.items():
        assert curves[f"summary/{name}"] == [(12, value)]
    assert stored.data.tags["group"] == top.name
    artifacts = {x.path for x in client.list_artifacts(stored.info.run_id, "samples/0")}
    assert "samples/0/step-00000012.txt" in artifacts


def test_while_the_run_goes_on_mlflow_has_its_parameters_device_and_settings(finished):
    _, _, (params, status, loss) = finished
    assert {name: params[name] for name in FACTS} == {k: str(v) for k, v in FACTS.items()}
    assert (params["optim.lr"], params["world"], status) == ("0.001", "2", "RUNNING")
    assert loss == (8, 5 / 8)


def test_wandb_holds_the_effective_ledger_in_one_offline_run(finished):
    _, run, _ = finished
    records, rows = from_wandb(run)
    curves = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            if isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity"):
                curves[key].append((row["step"], float(value)))
    own = without(curves, "_", "step", "marks/", "samples/", "summary/")
    assert own == curves_of(Run(run).ledger())
    assert [row["_step"] for row in rows] == list(range(1, 13)), "a row a step"
    pages = run.glob("wandb/offline-run-*/files/media/html/samples/0_*.html")
    newest = max(pages, key=lambda path: path.stat().st_mtime)
    assert "To &lt;be&gt;\nor **not** 12 \N{SNOWMAN}" in newest.read_text()
    (begin,) = of_kind(records, "run")  # the first record
    config = items_of(begin.config.update)
    assert config["optim.lr"] == 1e-3 and FACTS.items() <= config.items()
    assert (begin.display_name, begin.project) == ("the-run", PROJECT)
    summary = {}
    for one in of_kind(records, "summary"):
        summary |= items_of(one.update)
    assert summary["state"] == "finished" and {name: summary[name] for name in HEADLINE} == HEADLINE
    shown = {name.partition("/")[0] for name in summary if name[0] != "_"}
    groups = {"train", "eval", "throughput", "time", "run", "marks", "samples"}
    assert shown == {*groups, *(name.partition("/")[0] for name in HEADLINE), "state", "step"}
    assert begin.run_group == run.parents[1].name


@pytest.mark.full  # 15 s; the second attempt of `finished` continues the same way
def test_a_replay_into_a_tracker_that_has_all_changes_nothing(finished):
    top, run, _ = finished

    def stored():
        rows = from_wandb(run)[1]
        for row in rows:
            row.pop("_runtime")
        return from_tensorboard(run)[1], from_mlflow(top)[2], rows

    before = stored()
    for process in [start("track", run, "--to", name) for name in NAMES]:
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
        assert not [secret for secret in (KEY, PASSWORD, TOKEN) if secret.encode() in data], path


def a_run(folder: Path) -> Path:
    run = folder / "runs" / "the-run"
    run.mkdir(parents=True)
    (run / "recipe.toml").write_text(Recipe().toml())
    train(run, 0, 0, 2, "finished")
    return run


@pytest.mark.full
def test_variables_of_the_trackers_win_over_defaults(tmp_path, monkeypatch):
    import mlflow

    run, uri = a_run(tmp_path), f"sqlite:///{tmp_path}/mine.db"
    own = {"WANDB_MODE": "offline", "WANDB_PROJECT": "mine", "WANDB_ENTITY": "us"}
    own |= {"WANDB_RUN_GROUP": "ours", "WANDB_NAME": "named", "WANDB_TAGS": "a,b"}
    own |= {"MLFLOW_TRACKING_URI": uri, "MLFLOW_EXPERIMENT_NAME": "mine"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    notes = [*track(run, "wandb"), *track(run, "mlflow")]
    assert not any(note.warning for note in notes)
    (begin,) = of_kind(from_wandb(run)[0], "run")
    shown = begin.project, begin.entity, begin.run_group, begin.display_name, list(begin.tags)
    assert shown == ("mine", "us", "ours", "named", ["a", "b"])
    client = mlflow.MlflowClient(tracking_uri=uri)
    number = client.get_experiment_by_name("mine").experiment_id
    assert len(client.search_runs([number])) == 1
    assert not client.get_experiment_by_name("windlass") and not (run.parent / "mlflow.db").exists()
