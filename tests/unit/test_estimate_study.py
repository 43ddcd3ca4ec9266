"""A loss law from a study on disk: sizes x learning rates x seeds, of which the law is known."""

from __future__ import annotations

import json

import numpy as np
import pytest

from windlass.cli import main
from windlass.estimate.scaling import fit_scaling, points_of
from windlass.recipe import Recipe
from windlass.run import Run

RATES = {"1e-2": 1.15, "3e-3": 1.0, "1e-4": 1.3}
"""Learning rates, and what they make of the loss that a size can reach."""


def law(n):
    return 1.5 + 40 / n**0.25


def write_cell(path, layers, rate, seed, loss, tokens=None, state="finished"):
    recipe = Recipe.load("quickstart", [f"model.layers={layers}", f"optim.lr={rate}", f"run.seed={seed}"])
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(recipe.toml(), encoding="utf-8")
    size = {"parameters": layers * 200_000, "tokens": tokens or layers * 4_000_000}
    lines = [
        {"kind": "event", "event": "started", "step": 0},
        {"kind": "summary", "step": 9, "final_eval_loss": loss, **size},
        {"kind": "event", "event": state, "step": 9},
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    return Run(path)


def study(place, noise=0.0, sizes=(1, 2, 4, 8, 16), seeds=2, random=None):
    random = random or np.random.default_rng(0)
    return [
        write_cell(
            place / f"l{layers}-{rate}-{seed}", layers, rate, seed,
            law(layers * 200_000) * worse * (1 + noise * random.standard_normal()),
        )
        for layers in sizes for rate, worse in RATES.items() for seed in range(seeds)
    ]  # fmt: skip


def test_the_best_rate_of_each_size_is_fitted_with_all_its_seeds(tmp_path):
    points, left_out = points_of(study(tmp_path, noise=0.005))
    assert len(points) == 5 * 2 and {p.name.split("-", 1)[1].rsplit("-", 1)[0] for p in points} == {"3e-3"}
    assert (
        len(left_out) == 5 and "4 runs with loss" in left_out[0] and "the best setting is optim.lr=0.003" in left_out[0]
    )


def test_the_law_is_found_without_noise_and_its_interval_covers_it_with(tmp_path):
    points, _ = points_of(study(tmp_path / "clean"))
    clean = fit_scaling(points, samples=0)
    assert clean.law.exponents[0] == pytest.approx(0.25, abs=2e-3) and clean.predict(64e6, 0).loss == pytest.approx(
        law(64e6), rel=1e-3
    )
    covered = 0
    for seed in range(10):
        noisy = study(tmp_path / f"s{seed}", 0.01, random=np.random.default_rng(seed))
        fit = fit_scaling(points_of(noisy)[0], samples=60)
        guess = fit.predict(12.8e6, 0)
        covered += guess.low <= law(12.8e6) <= guess.high
        assert 0.003 < fit.noise < 0.03
    assert covered >= 8


def test_bad_rates_would_have_spoiled_it(tmp_path):
    from windlass.estimate.scaling import Point

    runs = study(tmp_path)
    every = [Point(r.summary["parameters"], r.summary["tokens"], r.summary["final_eval_loss"]) for r in runs]
    off = fit_scaling(every, samples=0).predict(12.8e6, 0).loss / law(12.8e6) - 1
    kept = fit_scaling(points_of(runs)[0], samples=0).predict(12.8e6, 0).loss / law(12.8e6) - 1
    assert off > 0.1 and abs(kept) < 1e-3


def test_lengths_that_only_rounding_parts_are_one(tmp_path):
    near = write_cell(tmp_path / "a", 1, "1e-3", 0, 3.0, tokens=4_000_000)
    also = write_cell(tmp_path / "b", 1, "1e-2", 0, 4.0, tokens=4_030_000)
    longer = write_cell(tmp_path / "c", 1, "1e-2", 0, 2.5, tokens=8_000_000)
    points, left_out = points_of([near, also, longer])
    assert [p.name for p in points] == ["a", "c"] and len(left_out) == 1


def test_what_diverged_or_did_not_finish_is_said(tmp_path):
    broken = write_cell(tmp_path / "nan", 1, "1e-1", 0, None)
    stopped = write_cell(tmp_path / "open", 1, "1e-1", 1, 3.0, state="interrupted")
    points, left_out = points_of([broken, stopped])
    assert points == [] and left_out[0].startswith("nan: no finite") and left_out[1].startswith("open: ")


def test_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study(tmp_path / "study", noise=0.005)
    with pytest.raises(SystemExit) as end:
        main(["plan", "--fit-scaling", "study"])
    out = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and "fitted to 10 runs" in out and "left out: N = 2e+05, D = 4e+06: 4 runs" in out
