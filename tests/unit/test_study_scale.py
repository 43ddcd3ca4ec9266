"""From modes and numbers of ranks to the cells of a scaling study, and the probes beside them;
nothing is trained.
"""

import shutil

import pytest
from scaling_fixtures import SETTINGS, phases, write_run

from helpers import refused
from windlass import scale, sweep
from windlass.processes import thread_share
from windlass.recipe import Recipe
from windlass.study import probes
from windlass.study.grid import Cell
from windlass.study.probes import probe_dir, probe_recipe
from windlass.study.scale import assignments, create_scaling
from windlass.study.setups import read_setups
from windlass.study.study import Scaling, Study, load_study

WORLD = "parallel.world"


def recipe(*settings):
    return Recipe.load("quickstart", ["parallel.device=cpu", *settings])


def study_of(path, *settings, worlds=(1, 2), **options):
    return create_scaling(recipe(*settings), worlds, path=path, **options)


@pytest.mark.parametrize(
    ("scaling", "steps", "wanted"),
    [
        # batch, steps and layers at 2, 4 and 8 ranks
        (Scaling("strong"), 40, [(8, 40, 4)] * 3),
        (Scaling("fixed-data"), 40, [(16, 20, 4), (32, 10, 4), (64, 5, 4)]),
        (Scaling("fixed-data"), "5 epochs", [(n, "5 epochs", 4) for n in (16, 32, 64)]),
        (Scaling("weak", "batch"), 40, [(16, 40, 4), (32, 40, 4), (64, 40, 4)]),
        (Scaling("weak", "model"), 40, [(8, 40, 4), (8, 40, 8), (8, 40, 16)]),
    ],
)
def test_what_grows_with_the_ranks(scaling, steps, wanted):
    base = recipe(f"train.steps={steps}")
    recipes = [Cell.of(base, one).recipe for one in assignments(base, scaling, [2, 4, 8])]
    assert [(r.train.global_batch, r.train.steps, r.model.layers) for r in recipes] == wanted


def test_strategies_share_the_probes_that_are_equal(tmp_path, monkeypatch):
    """One for each setting of activation checkpointing; each strategy has its numbers."""
    settings = [*SETTINGS, "train.micro_batch=2"]
    study = study_of(tmp_path / "s", *settings, worlds=(2,), mode="strategies")
    cells, started = [cell for cell in study.cells if not cell.recipe.parallel.offload], []
    alone = probe_recipe(cells[0]).replace({"train.global_batch": 4})

    def wait(processes, runs, steps, stopped):
        for run in runs:
            shutil.rmtree(run.path, ignore_errors=True)
            write_run(run.path, alone, 1, phases(10.0 + len(started)))
        started.append(runs)
        return ""

    monkeypatch.setattr(probes, "WINDLASS", ("true",))
    monkeypatch.setattr(probes, "_wait", wait)
    for cell in cells:
        write_run(study.run_of(cell).path, cell.recipe, 2, phases(20.0))
        probes.run_probe(study, cell, lambda text: None)
    modes = [*dict.fromkeys(cell.recipe.parallel.activation_checkpointing for cell in cells)]
    assert len(started) == len(modes) == 2 < len(cells)
    for row in read_setups(study):
        if not row.recipe.parallel.offload:
            place = modes.index(row.recipe.parallel.activation_checkpointing)
            assert row.values["exposed_ms"] == pytest.approx(20.0 - (10.0 + place))


def test_strategies_leave_out_what_cannot_be():
    base, mode = recipe("train.global_batch=24"), Scaling("strategies")
    four = assignments(base, mode, [4])
    kinds = {(one["parallel.strategy"], one["parallel.offload"]) for one in four}
    assert {("full_shard", True), ("ddp", False), ("hybrid_shard", False)} <= kinds
    assert ("ddp", True) not in kinds and {one[WORLD] for one in four} == {4}
    assert {one["parallel.activation_checkpointing"] for one in four} == {"none", "full"}
    assert len({Cell.of(base, one).key for one in four}) == len(four)
    # a sharding group of 1, or of all ranks, is another strategy
    assert "hybrid_shard" not in {one["parallel.strategy"] for one in assignments(base, mode, [3])}
    assert assignments(base, mode, [1])[0]["parallel.strategy"] == "single"
    sized = base.replace(["parallel.strategy=hybrid_shard", "parallel.shard_size=2"])
    listed = assignments(sized, mode, [4])
    sizes = {one["parallel.strategy"]: one["parallel.shard_size"] for one in listed}
    assert (sizes["hybrid_shard"], sizes["ddp"], sizes["full_shard"]) == (2, 0, 0)


def test_a_study_that_grows_keeps_its_probes(tmp_path):
    settings, path = ["train.steps=160", "telemetry.every=20"], tmp_path / "study"
    few = study_of(path, *settings, worlds=(1, 2), mode="fixed-data")
    more = study_of(path, *settings, worlds=(1, 2, 4), mode="fixed-data")
    assert more.recipe.telemetry.every < few.recipe.telemetry.every
    places = [[probe_dir(study, cell) for cell in study.cells] for study in (few, more)]
    assert places[0] == places[1][:2] and len(set(places[1])) == 3
    slower = study_of(tmp_path / "other", *settings, "train.micro_batch=1", mode="fixed-data")
    assert probe_dir(slower, slower.cells[1]).name != places[0][1].name


GROWN = {"mode": "weak", "grow": "model", "worlds": (2, 3)}


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ("", {"worlds": (1, 3)}, ["train.global_batch = 8", "3 data ranks", "6 or 9"]),
        ("train.steps=41", {"mode": "fixed-data"}, ["train.steps = 41", "train.steps=40 or 42"]),
        ("train.micro_batch=8", {}, ["parallel.world=2", "train.micro_batch = 8", "write 4"]),
        ("", {"mode": "stong"}, ["mode=stong", "strong"]),
        ("", {"worlds": (0, 1)}, ["worlds=[0, 1]"]),
        ("", {"grow": "model"}, ["mode=weak"]),
        ("", {"mode": "weak", "grow": "data"}, ["batch or model"]),
        ("model.layers=3 train.global_batch=6", GROWN, ["model.layers = 3", "of 2"]),
        ("", {"mode": "strategies"}, ["mode=strategies", "give one"]),
        ("", {"worlds": ()}, ["worlds=[1, 2, 4]"]),
        ("", {"nodes": (1,)}, ["nodes=[1]", "worlds=[1, 2]"]),
        ("", {"worlds": (1, 3), "nodes": (1, 2)}, ["2 hosts cannot share 3 ranks"]),
    ],
)
def test_what_cannot_be_measured_is_one_message(tmp_path, settings, options, words):
    with refused(*words):
        study_of(tmp_path / "study", *settings.split(), **options)
    assert not (tmp_path / "study").exists()


def test_cells_share_threads_and_log_often_enough(tmp_path):
    study = study_of(tmp_path / "study", "train.steps=100", worlds=(1, 2, 4), mode="weak")
    assert study.recipe.train.threads == thread_share(4)
    assert study.recipe.telemetry.every == 100 // 20
    assert Study.open(study.path).scaling == Scaling("weak", "batch")
    seldom = study_of(tmp_path / "seldom", "train.steps=8", "telemetry.every=50")
    assert seldom.recipe.telemetry.every == 1
    assert study_of(tmp_path / "often", "telemetry.every=2").recipe.telemetry.every == 2


def test_a_study_is_continued_and_grows(tmp_path):
    path = tmp_path / "study"
    first = study_of(path, "train.steps=60", mode="weak")
    again = study_of(path, "train.steps=60", worlds=())
    assert again == first
    grown = study_of(path, "train.steps=60", worlds=(1, 2, 4))
    assert grown.cells[:2] == first.cells
    assert [c.world for c in grown.cells] == [1, 2, 4]
    assert grown.recipe.train.threads == first.recipe.train.threads
    with refused("mode=weak batch", "path=DIR"):
        study_of(path, mode="strong")
    with refused("scaling study", "path=DIR"):
        Study.create(recipe(), ["optim.lr=1e-2,1e-3"], path)


def test_ranks_that_a_study_gains_keep_the_layers_of_a_rank(tmp_path):
    path, layers = tmp_path / "study", {"model.layers": 4, "train.global_batch": 8}
    options = {"path": path, "mode": "weak", "grow": "model"}
    create_scaling(recipe().replace(layers), (2, 4), **options)
    for more in ((1,), (1, 8)):
        study = create_scaling(recipe().replace(layers), more, **options)
    layers = [(c.world, c.recipe.model.layers) for c in study.cells]
    assert layers == [(2, 4), (4, 8), (1, 2), (8, 16)]


def test_a_study_over_hosts_is_shown_and_not_trained_here(tmp_path):
    path = tmp_path / "study"
    study = scale("quickstart", (1, 2), {"train.steps": 7}, nodes=(1, 2), path=path)
    assert study.recipe.train.steps == 7 and scale(path) == scale(study) == study
    assert [result.state for result in study.results()] == ["waiting"] * 2
    with refused("windlass submit"):
        sweep(path)
    assert not (study.path / "runs").exists()


def test_a_probe_has_one_ranks_shapes_and_nothing_to_say(tmp_path):
    settings = ["train.global_batch=16", "train.micro_batch=2", "parallel.strategy=full_shard"]
    cell = study_of(tmp_path / "study", *settings, worlds=(4,)).cells[0]
    probe = probe_recipe(cell)
    assert (probe.batch(1).accumulation, probe.batch(1).micro_batch) == (2, 2)
    assert (probe.parallel.strategy, probe.eval.every, probe.checkpoint.every) == ("single", 0, 0)
    assert probe.model == cell.recipe.model and probe.train.precision == cell.recipe.train.precision


def test_a_preset_of_studies_is_changed_by_overrides():
    recipe, options, _ = load_study("quickstart-scaling", "scale", ["train.steps=7"])
    assert (recipe.train.steps, recipe.eval.every) == (7, 0)
    assert (options["worlds"], options["mode"]) == ([1, 2], "strong")
    with refused("quickstart-scaling", "for scale"):
        load_study("quickstart-scaling", "sweep")
    with refused("quickstart-scaling", "scale"):
        Recipe.load("quickstart-scaling")


def test_a_study_over_hosts_is_an_array_job_for_each_number_of_hosts(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)

    def scripts(study, *words):
        resources = ["--gpus-per-node", "2", "--min-busbw", "5", *words]
        output, _ = call("submit", study, *resources, "--scheduler", "slurm", "--dry-run")
        return output.split("#!/bin/bash")[1:]

    def create(path, worlds, nodes, *settings, **options):
        recipe = Recipe.load("quickstart", settings)
        return create_scaling(recipe, worlds, nodes=nodes, path=tmp_path / path, **options)

    study = create("study", [2, 4], [1, 2])
    one, two = scripts("study", "--time", "01:00:00")
    for text, nodes, cell in ((one, 1, 0), (two, 2, 1)):
        lines = {f"#SBATCH --{x}" for x in (f"nodes={nodes}", "ntasks-per-node=2", "time=01:00:00")}
        assert lines <= set(text.splitlines())
        assert f"--array={cell}" in text
        assert f"jobs/{nodes}" in text and "--min-busbw 5" in text
        assert f'sweep {tmp_path}/study --only "$task" --launch &' in text
    study.set_failure(study.cells[0], "bad input")
    (two,) = scripts("study")
    assert "--array=1" in two and "--retry-failed" not in two
    one, two = scripts("study", "--retry-failed")
    assert "--array=0" in one and '--only "$task" --launch --retry-failed &' in one
    create("cpu", [1, 2], [1, 2], "parallel.device=cpu")
    one, two = scripts("cpu")
    assert "--min-busbw" not in one and "--min-busbw 5" in two  # one rank has no bandwidth
    create("few", [1, 2, 4], [1, 1, 2])
    assert ["nodes=2" in text for text in scripts("few")] == [False, True]
    shown, _ = call("scale", "quickstart", "--worlds", "2,4", "--nodes", "1,2", "--dir", "typed")
    assert "waiting" in shown and "`windlass submit typed`" in shown
    assert Study.open("typed").values == study.values
