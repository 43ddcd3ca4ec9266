"""A whole training on a streamed source: the samples of the whole prepared data, with a bounded disk;
the same after a stop, a kill and on other ranks, also in an empty data directory.
"""

import contextlib
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_runs import corpus, curve, evaluations, recipe_of, settings, start, stopped

from helpers import each_step, refused
from windlass import evaluate, plan, report, train
from windlass.checkpoint.load import open_checkpoint
from windlass.cli import recipes
from windlass.run import Run

__all__ = ["corpus"]

STREAM = {
    "data.max_tokens": 0,
    "data.tokenizer": "byte",
    "data.shard_tokens": 1024,
    "data.disk_tokens": 2048,
    "data.val_shards": 1,
    "train.steps": 24,
    "train.threads": 1,
    "checkpoint.every": 6,
    "checkpoint.keep_last": 9,
    "eval.every": 12,
}
"""A shard has 63 samples of 16 tokens, and a step 8."""


@pytest.fixture(scope="module")
def crawl(corpus):
    """Parquet files of 24 documents in row groups of 5: about 10,000 tokens."""
    words, folder = (corpus / "text.txt").read_text().split(), corpus / "crawl"
    folder.mkdir()
    for number in range(3):
        texts = [" ".join(words[i : i + 8 * (i % 9)]) for i in range(number, 120, 5)]
        pq.write_table(pa.table({"text": texts}), folder / f"{number}.parquet", row_group_size=5)
    return folder


def streamed(crawl, run, **more):
    own = {"data.source": f"'hf:{crawl}'", "data.dir": f"'{run}-data'", **STREAM, **more}
    return recipe_of(crawl.parent, run, **own)


def words_of(crawl, run, **more):
    own = {"data.source": f"'hf:{crawl}'", "data.dir": f"'{run}-data'", **STREAM, **more}
    return settings(crawl.parent, run, **own)


@pytest.fixture(scope="module")
def whole(crawl, tmp_path_factory):
    """The run without an interruption, and the most bytes of its shards on the disk."""
    run = tmp_path_factory.mktemp("whole") / "run"
    peak, done = [0], threading.Event()

    def measure():
        while not done.is_set():
            with contextlib.suppress(FileNotFoundError):
                folders = run.with_name("run-data").glob("stream-*")
                files = [path for folder in folders for path in folder.iterdir()]
                peak.append(sum(p.stat().st_size for p in files if ".bin" in p.name))
            time.sleep(0.001)

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        return train(streamed(crawl, run)), peak
    finally:
        done.set()
        thread.join()


def places(run):
    return [event["place"] for event in run.events if event["event"] == "shard"]


def test_the_disk_is_bounded_and_free_at_the_end(whole):
    run, peak = whole
    assert 2 * 1024 < max(peak) <= 2 * 2048  # two bytes a token
    assert not list(run.path.with_name("run-data").glob("stream-*"))
    assert [place[0] for place in places(run)] == [1, 2, 3]


def test_the_losses_are_those_of_the_whole_prepared_data(crawl, tmp_path):
    order = {"data.order": "sequential"}
    usual = streamed(crawl, tmp_path / "usual", **order, **{"data.disk_tokens": 0})
    one, other = train(streamed(crawl, tmp_path / "run", **order)), train(usual)
    fields = [(x["loss"], x["grad_norm"], x["tokens"]) for x in one.lines("train")]
    assert fields == [(x["loss"], x["grad_norm"], x["tokens"]) for x in other.lines("train")]
    assert evaluations(one) == evaluations(other)


def test_stopped_and_resumed_with_its_shards_and_without(crawl, whole, tmp_path):
    recipe = streamed(crawl, tmp_path / "run")
    stopped(recipe, 5)
    stopped(recipe, 16)  # shard 2 begins with sample 126, in step 16
    run = train(recipe.replace({"data.dir": str(tmp_path / "elsewhere")}))
    assert curve(run) == curve(whole[0]) and places(run) == places(whole[0])
    assert evaluations(run) == evaluations(whole[0])


def test_killed_and_resumed_elsewhere_reads_only_what_it_needs(crawl, whole, tmp_path, monkeypatch):
    run, read = tmp_path / "run", []
    own = {"checkpoint.background": "false"}
    assert start(1, words_of(crawl, run, **own), kill_after=20) == 1
    place = open_checkpoint(run / "checkpoints" / "step-00000018").counters["stream"]
    assert place == places(whole[0])[1]
    recipe = streamed(crawl, run, **{"data.dir": f"'{tmp_path / 'elsewhere'}'", "eval.every": 0})
    train(recipe, stop_at=18)  # prepares the validation data

    class Counted(pq.ParquetFile):
        def __init__(self, raw):
            super().__init__(raw)
            self.place = int(Path(raw.name).stem)

        def iter_batches(self, *args, row_groups, **more):
            read.append((self.place, *row_groups))
            return super().iter_batches(*args, row_groups=row_groups, **more)

    monkeypatch.setattr(pq, "ParquetFile", Counted)
    resumed = train(recipe.replace({"eval.every": 12}))
    assert curve(resumed) == curve(whole[0])
    assert place[2:4] == [0, 4]
    assert read[:6] == [(0, 4), *((1, group) for group in range(5))]


@pytest.mark.full
@pytest.mark.dist
def test_two_ranks_killed_and_resumed_elsewhere(crawl, whole, tmp_path):
    run, dropout = tmp_path / "run", {"model.dropout": 0}
    reference = train(streamed(crawl, tmp_path / "one", **dropout))
    assert start(2, words_of(crawl, run, **dropout), kill_after=14) == 1
    elsewhere = {"data.dir": f"'{tmp_path / 'elsewhere'}'"}
    assert start(2, words_of(crawl, run, **dropout, **elsewhere)) == 0
    killed = Run(run)
    assert places(killed) == places(reference)
    for one, other in zip(curve(killed), curve(reference), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert not list((tmp_path / "elsewhere").glob("stream-*"))


def test_a_rewind_makes_old_shards_again(crawl, tmp_path):
    """The samples that are left out end two shards after the checkpoint."""

    def spoil(now):
        if now.step == 20 and not spoiled:
            spoiled.append(now.step)
            for parameter in now.model.parameters():
                parameter.data.mul_(float("nan"))

    spoiled = []
    more = {"train.on_nonfinite": "rewind", "checkpoint.every": 7, "eval.every": 0}
    recipe = streamed(crawl, tmp_path / "run", **more, **{"checkpoint.background": "false"})
    run = train(recipe, callbacks=[each_step(spoil)])
    rewound = [event for event in run.events if event["event"] == "rewound"]
    assert [event["left_out"] for event in rewound] == [[14 * 8, 21 * 8]]
    assert [line["step"] for line in run.lines("train")] == list(range(1, 25))
    place = open_checkpoint(run.checkpoints_dir / "step-00000024").counters["stream"]
    assert place[0] == (24 + 7) * 8 // 63


def test_an_evaluation_needs_no_shards(whole, crawl):
    scores = evaluate(f"{whole[0].path}@24", ["loss"]).results["loss"]
    assert scores["loss"] == pytest.approx(whole[0].lines("eval")[-1]["loss"], rel=1e-6)


def test_a_branch_begins_at_the_place_of_its_checkpoint(crawl, whole, tmp_path):
    new = streamed(crawl, tmp_path / "branch", **{"optim.lr": 1e-4})
    branch = train(new, branch_from=f"{whole[0].path}@12")
    first, origin = branch.lines("train")[0], whole[0].lines("train")[12]
    assert (first["step"], first["loss"]) == (13, origin["loss"])
    assert places(branch) == places(whole[0])[1:]


def test_another_source_is_refused(crawl, tmp_path):
    stopped(streamed(crawl, tmp_path / "run"), 6)
    folder = tmp_path / "other"
    folder.mkdir()
    for path in crawl.iterdir():
        table = pq.read_table(path)
        pq.write_table(table, folder / path.name, row_group_size=4)
    other = streamed(crawl, tmp_path / "run", **{"data.dir": f"'{tmp_path / 'data'}'"})
    crawl.rename(crawl.with_name("away"))
    folder.rename(crawl)
    try:
        with refused("the data is not what", "bring the old data back"):
            train(other)
    finally:
        crawl.rename(folder)
        crawl.with_name("away").rename(crawl)


def test_the_pinned_commit_is_used_by_a_resume(crawl, tmp_path, monkeypatch):
    """With a stand-in for the Hub: a run that has begun asks for its own commit."""
    from windlass.data import stream

    asked, list_files = [], stream.list_files

    def listed(data, split, revision=""):
        asked.append(revision)
        return list_files(data, split)[0], revision or "c1"

    monkeypatch.setattr(stream, "list_files", listed)
    recipe = streamed(crawl, tmp_path / "run", **{"train.steps": 8})
    run = stopped(recipe, 6)
    assert run.events[0]["data"]["revision"] == "c1"
    train(recipe.replace({"data.dir": str(tmp_path / "elsewhere")}))
    assert asked == ["", "c1"]


def test_what_the_verbs_say(crawl, tmp_path, capsys):
    recipe = streamed(crawl, tmp_path / "run")
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.toml())
    recipes.prepare(str(path), [])
    shown = " ".join(capsys.readouterr().out.split())
    assert "streamed from" in shown and "at most 2,048 on the disk" in shown
    assert len(list((tmp_path / "run-data").glob("stream-*/shard-*.bin"))) == 2
    numbers = plan(recipe)
    assert "streamed" in numbers.unknown["epochs"] and numbers.tokens_bytes == 4096
    run = train(recipe)
    assert "shard 2 begins: file 1" in capsys.readouterr().out
    assert run.summary["epochs"] == 0 and "steps_per_epoch" not in run.summary
    report(run, plots=False)


def test_what_cannot_be_streamed_is_reported_together(crawl, tmp_path):
    wrong = {
        "data.order": "shards-shuffled",
        "data.packing": "documents",
        "data.tokenizer": "char",
        "data.max_tokens": 1000,
        "data.val_shards": 0,
        "data.disk_tokens": 2047,
        "train.global_batch": 64,
        "train.steps": '"2 epochs"',
        "eval.train_batches": 1,
    }
    keys = {*wrong} - {"train.global_batch", "data.val_shards", "data.tokenizer"}
    with refused(*keys, "data.shard_tokens", "write 1025", "data.val_fraction", "data.tokenizer"):
        streamed(crawl, tmp_path / "run", **wrong)
    with refused("data.disk_tokens", "one source"):
        streamed(crawl, tmp_path / "run", **{"data.source": "stdlib"})
