"""Ladders: shapes of sizes, the grid, and bad input; and a ladder from training to the report."""

from __future__ import annotations

import csv
import json
import math
import shlex
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from report_fixtures import build_run, edit

from helpers import write_corpus, write_ledger
from windlass import Recipe, Run, Study, UserError, plan, report, train
from windlass.ledger import last_start
from windlass.model.size import count
from windlass.reports.law import compute_chart, predicted_chart, residuals
from windlass.study.ladder import (
    assignments,
    create_ladder,
    join,
    open_ladder,
    shape_of,
)
from windlass.study.law import FORMS, Law, Observation, effective_tokens, fit_law
from windlass.study.numbers import BITS
from windlass.telemetry.measures import show

VOCAB = 50_304
SHAPE = {"model.width": 16, "model.heads": 1, "data.tokenizer": "byte", "model.vocab": 0}


@pytest.fixture(scope="module")
def gpt2() -> Recipe:
    return Recipe.load("gpt2-124m")


def test_a_size_keeps_the_recipe_s_proportions(gpt2: Recipe):
    for size, wanted in (("10M", 1e7), ("350m", 3.5e8), ("1.5B", 1.5e9)):
        shape = shape_of(gpt2, size, VOCAB)
        total = count(gpt2.replace(shape).model, VOCAB).total
        assert total == pytest.approx(wanted, rel=0.1)
        assert shape["model.width"] / shape["model.heads"] == 64
        assert 0.45 < shape["model.width"] / shape["model.layers"] / 64 < 2.2
    own = shape_of(gpt2, str(count(gpt2.model, VOCAB).total), VOCAB)
    assert own == {"model.layers": 12, "model.width": 768, "model.heads": 12}
    grouped = {"model.heads": 8, "model.kv_heads": 2, "model.ff_width": 1024, "model.width": 512}
    shape = shape_of(Recipe.load("quickstart", grouped), "3x256", 257)
    widths = {"model.width": 256, "model.heads": 4, "model.kv_heads": 1, "model.ff_width": 512}
    assert shape == {"model.layers": 3} | widths


def test_learning_rate_and_batch_follow_the_size(gpt2: Recipe):
    rows = assignments(gpt2, ["6x384", "12x768"], [5, 20], VOCAB)
    small = gpt2.replace({key: value for key, value in rows[0].items() if "model" in key})
    ratio = count(small.model, VOCAB).total / count(gpt2.model, VOCAB).total
    assert [row["train.tokens_per_parameter"] for row in rows] == [5, 20, 5, 20]
    assert rows[0]["optim.lr"] == pytest.approx(gpt2.optim.lr * ratio ** (-1 / 3), rel=0.01)
    batch = gpt2.train.global_batch * ratio ** (2 / 3)
    assert batch / 2 < rows[0]["train.global_batch"] <= batch
    mup = gpt2.replace("model.mup_base_width=256")
    assert all("optim.lr" not in row for row in assignments(mup, ["10M", "30M"], [10], VOCAB))


def test_a_size_that_cannot_be_had(gpt2: Recipe):
    messages = {"10X": "300k, 10M, 1.5B", "0": "300k, 10M, 1.5B", "3x100": "multiple of 64"}
    for size, message in (messages | {"1M": "50,304 tokens of vocabulary has"}).items():
        with pytest.raises(UserError, match=message):
            shape_of(gpt2, size, VOCAB)


def test_what_cannot_be_a_ladder(tmp_path: Path):
    for recipe, sizes, changes, message in (
        ("quickstart", [], {}, "name the sizes"),
        ("quickstart", ["1M"], {"eval.every": 0}, r"eval\.every = 0"),
        ("bloom-560m-squad", ["1M"], {}, r"only model\.kind = gpt"),
    ):
        with pytest.raises(UserError, match=message):
            create_ladder(recipe, sizes, [5], changes, tmp_path / "none")
    assert not list(tmp_path.iterdir())
    study = Study.create(Recipe.load("quickstart"), ["model.layers=1,2"], tmp_path / "sweep")
    for act in (open_ladder, create_ladder):
        with pytest.raises(UserError, match="is a sweep"):
            act(study.path)


@pytest.mark.parametrize(
    ("sizes", "tokens", "message"),
    [
        (["1x16", "2x16", "3x16"], [1, 2], "more runs than constants"),
        (["2x16"], [1, 2, 3, 4, 5, 6, 7, 8], "one size"),
    ],
)
def test_too_few_runs_are_rejected_before_they_train(tmp_path: Path, sizes, tokens, message):
    with pytest.raises(UserError, match=message):
        create_ladder("quickstart", sizes, tokens, SHAPE, tmp_path / "lad")
    assert not (tmp_path / "lad").exists()
    create_ladder("quickstart", ["1x16", "2x16"], [1, 2, 4, 8], SHAPE, tmp_path / "lad")
    grown = create_ladder(tmp_path / "lad", ["3x16"], [1], SHAPE)  # with the others it is enough
    assert len(grown.cells) == 9


def test_without_scipy_no_ladder_begins(tmp_path: Path, monkeypatch):
    def missing(package: str, what: str) -> None:
        raise UserError(f"{what} needs {package}")

    monkeypatch.setattr("windlass.study.law.require", missing)
    with pytest.raises(UserError, match="scipy"):
        create_ladder("quickstart", ["1M", "2M", "3M"], path=tmp_path / "lad")
    assert not (tmp_path / "lad").exists()


def test_a_ladder_rejects_bad_input_before_it_trains(tmp_path: Path, call, monkeypatch):
    path, again = tmp_path / "my ladder", tmp_path / "other"
    settings = (f"{key}={value}" for key, value in SHAPE.items())
    words = ["ladder", "quickstart", *settings, "--sizes", "1x16,2x16", "--dir", path]
    assert f"`windlass submit '{path}'`" in call(*words, "--create", "--world", "2")[0]
    assert Study.open(path).world == 2
    monkeypatch.setattr("windlass.study.ladder.sweep", None)  # nothing trains
    for more, message in (
        (["train.steps=3"], "train.steps"),
        (["optim.weight_decay=0.5"], "optim.weight_decay"),
        (["--dir", again], "name the sizes"),
        (["--add", again], "not a run directory"),
        (["--flops", "-1"], "--flops"),
        (["--hours", "1", "--device", "cpu"], "no plan of the speed"),
    ):
        assert message in call("ladder", path, *more, code=2)[1]
    assert not (path / "runs").exists() and not again.exists()


@pytest.fixture
def ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call, capsys):
    """A ladder `lad`, and a trained run `further`, whose ledger the cells have with own numbers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("windlass.study.ladder.fit_law", partial(fit_law, samples=5))  # it is slow
    monkeypatch.delitem(FORMS, "chinchilla")  # the slowest form
    write_corpus(tmp_path / "words.txt")
    settings = "data.source=words.txt data.tokenizer=byte model.context=16 eval.every=1000"
    shape = "model.layers=1 model.width=8 model.heads=1 train.global_batch=8"
    words = ["ladder", "quickstart", *settings.split(), *shape.split()]
    words += ["--sizes", "1x8,1x16,2x16", "--tokens", "0.2,0.5,1", "--dir", "lad"]
    assert "lad: 9 cells; `windlass submit lad` trains them" in call(*words, "--create")[0]
    with pytest.raises(UserError, match="no finished cell, so no law"):
        open_ladder("lad")
    run = train(Recipe.load("lad/recipe.toml", {"train.steps": 40, "run.dir": "further"}))
    study = Study.open("lad")
    for number, cell in enumerate(study.cells):
        own, size = study.run_of(cell), count(cell.recipe.model, 257).total
        tokens = int(size * cell.recipe.train.tokens_per_parameter)
        shutil.copytree(run.path / "tokenizer", own.path / "tokenizer")
        (own.path / "recipe.toml").write_text(cell.recipe.toml())
        loss = 1 + 30 / size**0.3 + 20 / tokens**0.4 + 0.01 * math.sin(number)
        values = {"event": {"parameters": size}, "train": {"tokens": tokens}}
        values |= {"eval": {"loss": loss}}
        lines = (json.loads(line) for line in run.metrics_path.read_text().splitlines())
        write_ledger(own, *(line | values.get(line["kind"], {}) for line in lines))
    capsys.readouterr()  # of the training
    return open_ladder("lad"), run


def test_a_ladder_fits_answers_and_reports(ladder, call, tmp_path: Path):
    seen, run = ladder
    answer = json.loads(call("ladder", "lad", "--flops", "1e9", "--json")[0])
    assert len(seen.observations) == 9
    largest = {one.name for one in seen.observations if one.name.startswith("2x16")}
    assert answer["errors"].keys() == largest
    best = answer["optimum"]
    assert best["parameters"] * best["tokens"] * 6 == pytest.approx(1e9)
    written = report("lad", plots=True)
    assert answer["optimum"]["command"].startswith("windlass train lad/recipe.toml model.layers=")
    assert "The law of scaling" in written.page.read_text()
    assert show(answer["mean_error"], "share") in written.markdown.read_text()
    names = {"law-compute", "law-predicted", "law-residuals", "law-slices"}
    assert names <= written.plots.keys()
    chart = predicted_chart(seen)
    solid = [one for one in chart.series if one.points == "median"]
    outside = {
        one.loss: one.loss * (1 + answer["errors"][one.name]) for one in runs_of(seen, "2x16")
    }
    assert [dict(zip(one.x, one.y, strict=True)) for one in solid] == [pytest.approx(outside)]
    assert sum(len(one.x) for one in chart.series if one.points == "only") == 9
    assert all((np.diff(one.x) >= 0).all() for one in chart.series), "the page searches in them"
    assert len((tmp_path / "lad/report/law-runs.csv").read_text().splitlines()) == 10
    with pytest.raises(UserError, match="a law predicts runs, and lad is a study"):
        report("lad", law="lad")
    unique = last_start(run.ledger())["data"]["train"]["tokens"]
    words = ["plan", "lad/recipe.toml", "train.steps=2000", "--law", "lad", "--json"]
    told = json.loads(call(*words)[0])
    assert told["tokens"] > 8 * unique and told["law"]["unit"] == "nats per token"
    size = told["size"]["parameters" if seen.law.embeddings else "non_embedding"]
    loss = seen.law.loss(size, effective_tokens(told["tokens"], unique))
    assert told["law"]["loss"] == pytest.approx(loss, rel=1e-4)
    # losses of another tokenizer or of other data do not compare; another path to the same does
    changes = {"train.steps": 5, "data.source": str(Path("words.txt").resolve())}
    recipe = Recipe.load("lad/recipe.toml", changes)
    planned = plan(recipe)
    assert seen.predict(recipe, planned).loss > 0
    assert seen.predict(recipe.replace("data.max_tokens=9000"), planned).loss > 0
    for change in ("data.tokenizer=char", "data.source=recipe.toml", "data.eval_source=words.txt"):
        with pytest.raises(UserError, match=change.partition("=")[0]):
            seen.predict(recipe.replace(change), planned)
    bits = replace(seen, measure=BITS)
    assert bits.predict(recipe.replace("data.tokenizer=char"), planned).loss > 0


def test_hours_and_money_count_at_the_speed_of_the_answer(ladder, call):
    """FLOPs of the hours are those of the answer's own plan, not of the small recipe's."""
    seen, _ = ladder
    words = ["ladder", "lad", "--device", "A100-80GB"]
    hours = json.loads(call(*words, "--hours", "0.001", "--json")[0])["optimum"]
    money = json.loads(call(*words, "--money", "0.002", "--price", "2", "--json")[0])["optimum"]
    assert money == hours
    settings = shlex.split(hours["command"])[3:]
    planned = plan("lad/recipe.toml", settings, device="A100-80GB")
    assert planned.device_hours == pytest.approx(0.001, rel=0.02)
    size = planned.size.parameters if seen.law.embeddings else planned.size.non_embedding
    assert [size, planned.tokens] == pytest.approx([hours["parameters"], hours["tokens"]], rel=0.02)
    shown = call(*words, "--money", "0.002", "--price", "2")[0]
    assert "for 0.001 h of A100-80GB" in shown and hours["command"] in shown
    assert "belong together" in call(*words, "--money", "3", code=2)[1]
    assert "one budget" in call(*words, "--hours", "3", "--flops", "1e9", code=2)[1]


def test_a_ladder_of_several_tokenizers_is_in_bits_per_byte(ladder):
    """A run with another tokenizer joins; 2 nats at 2 bytes a token are 1 / ln 2 bits per byte."""
    seen, run = ladder
    other = Path("other")
    shutil.copytree(run.path, other)
    (other / "recipe.toml").write_text(run.recipe.replace("data.tokenizer=char").toml())
    (other / "tokenizer/windlass.json").write_text('{"fingerprint": "other"}')
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    size = next(x for x in lines if x["kind"] == "eval")["tokens"]  # bytes: the tokenizer is byte
    tokens = {"loss": 2.0, "tokens": size // 2, "bits_per_byte": 1 / math.log(2)}
    lines = [line | tokens if line["kind"] == "eval" else line for line in lines]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for place in (study.path for study in seen.study.runs()):
        edit(Run(place), in_bits)
    mixed = open_ladder("lad", [Run(other)])
    assert (mixed.measure, mixed.unit) == (BITS, "bits per byte")
    assert mixed.further[0].loss == pytest.approx(1 / math.log(2))
    losses = [one.loss * math.log(2) for one in mixed.observations if one.in_fit]
    assert losses == pytest.approx([one.loss for one in seen.observations])
    assert mixed.earlier.loss(1e4, 1e4) == pytest.approx(
        seen.law.loss(1e4, 1e4) / math.log(2), rel=0.02
    )


def in_bits(line):
    """An evaluation by bytes: a token is a byte."""
    return line | ({"bits_per_byte": line["loss"] / math.log(2)} if "loss" in line else {})


def runs_of(seen, name):
    return [one for one in seen.observations if one.name.startswith(name)]


def test_a_run_that_diverged_or_was_cut_is_left_out(ladder):
    study = ladder[0].study
    first, second = (study.run_of(cell) for cell in study.cells[:2])
    loss = first.lines("train")[0]["loss"]
    lines = (json.loads(line) for line in first.metrics_path.read_text().splitlines())
    last = first.lines("train")[-1]["step"]
    worse = {"loss": loss + 2}
    write_ledger(
        first, *(x | worse if (x["kind"], x["step"]) == ("train", last) else x for x in lines)
    )
    kept = second.metrics_path.read_text().splitlines()
    second.metrics_path.write_text("".join(f"{x}\n" for x in kept if '"finished"' not in x))
    seen = open_ladder("lad")
    assert len(seen.observations) == 7
    assert ["the training loss went from" in seen.left_out[0], len(seen.left_out)] == [True, 2]


def test_a_further_run_is_predicted_and_joins_the_law(ladder, call, tmp_path: Path):
    seen, run = ladder
    before, written = seen.law, report(run, law="lad", plots=False)
    (row,) = rows_of(tmp_path / "further/report/predicted.csv")
    measured = [x for x in run.ledger() if x["kind"] == "eval"][-1]["loss"]
    unique = last_start(run.ledger())["data"]["train"]["tokens"]
    tokens = effective_tokens(int(row["tokens"]), unique)
    size = int(row["parameters"]) if before.embeddings else count(run.recipe.model, 0).non_embedding
    predicted = before.loss(size, tokens)
    numbers = [float(row[name]) for name in ("measured", "predicted", "error")]
    assert numbers == pytest.approx([measured, predicted, predicted / measured - 1])
    assert "Predicted by the law of scaling" in written.markdown.read_text(encoding="utf-8")
    assert "Predicted by the law of scaling" in call("ladder", "lad", "--add", "further")[0]
    seen = open_ladder("lad")
    assert [one.name for one in seen.observations][9:] == ["further"]
    assert all(one.in_fit for one in seen.observations)
    join(seen.study, [seen.study.runs()[0], run])  # a cell of the ladder itself, and it again
    assert len(open_ladder("lad", [run, run]).observations) == 10
    assert len(open_ladder("lad").observations) == 10
    # its own report still has the prediction without it, by the form that was chosen without it
    report(run, law="lad", plots=False)
    assert rows_of(tmp_path / "further/report/predicted.csv") == [row]
    shutil.rmtree("further")
    assert open_ladder("lad").left_out == ["further: it is gone"]


def test_a_report_says_why_a_ladder_has_no_law(tmp_path: Path):
    sizes = ["1x16", "2x16", "3x16"]
    ladder = create_ladder("quickstart", sizes, overrides=SHAPE, path=tmp_path / "l")
    build_run(ladder.run_of(ladder.cells[0]).path, steps=20, finished=False)
    written = report(ladder, plots=False)
    assert "no finished cell" in written.markdown.read_text("utf-8")


@pytest.mark.parametrize("embeddings", [True, False])
def test_curves_of_repeated_tokens_go_through_the_runs(embeddings: bool):
    """FLOPs and sizes count the parameters of the law, and a curve repeats tokens as its runs do."""
    grid, unique = [(n, d) for n in (10**6, 4 * 10**6, 10**7) for d in (10**8, 10**9)], 2 * 10**8
    runs = [Observation(f"{n}x{d}", 2 * n, n, d, 1.0, unique) for n, d in grid]
    values = np.array([5.0, 7.0, 0.5, 0.35, 0.37, 1.0])
    law = Law("chinchilla", embeddings, runs, values, values[None], (14.0, 19.0))
    runs = [replace(one, loss=law.of_run(one)) for one in runs]
    chart = compute_chart(law, runs, "nats per token")
    points, curves = chart.series[:6:2], chart.series[1:6:2]
    for place, (dots, curve) in enumerate(zip(points, curves, strict=True)):
        own = runs[2 * place : 2 * place + 2]
        assert dots.x.tolist() == [6 * one.size(embeddings) * one.tokens for one in own]
        assert curve.y[[0, -1]] == pytest.approx(dots.y) and curve.x[[0, -1]] == pytest.approx(
            dots.x
        )
    (flat,) = residuals(law, runs[:1]).series
    assert flat.y == pytest.approx(0)
    assert law.counted in chart.x.label


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
