"""From modes and numbers of ranks to the cells of a scaling study, and the probes beside them;
nothing is trained.
"""

import shutil
import tomllib

import pytest
from scaling_fixtures import SETTINGS, phases, write_run

from helpers import refused, windlass
from windlass import scale, sweep
from windlass.fileio import read_json
from windlass.processes import thread_share
from windlass.recipe import Recipe, study_presets
from windlass.study import probe
from windlass.study.grid import Cell, Scaling, cells_of, expand, parse_axis
from windlass.study.probe import probe_recipe, store_rates
from windlass.study.scale import assignments, create_study, scaling_of, too_few_cores
from windlass.study.setups import read_setups
from windlass.study.study import Study, load_study

WORLD = "parallel.world"


def recipe(*settings):
    return Recipe.load("quickstart", ["parallel.device=cpu", *settings])


def study_of(path, *settings, worlds=(1, 2), **options):
    return create_study(recipe(*settings), worlds, path=path, **options)


def test_strong_keeps_the_recipe_and_every_other_repeat_is_reversed():
    listed = assignments(recipe(), Scaling("strong", repeats=3), [1, 2, 4])
    assert [one["repeat"] for one in listed] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [one[WORLD] for one in listed] == [1, 2, 4, 4, 2, 1, 1, 2, 4]
    assert all(Cell.of(recipe(), one).recipe == recipe() for one in listed)
    assert assignments(recipe(), Scaling("strong"), [2, 1]) == [{WORLD: 2}, {WORLD: 1}]


@pytest.mark.parametrize(
    ("scaling", "settings", "wanted"),
    [
        # batch, steps and layers at 2, 4 and 8 ranks
        (Scaling("fixed-data"), ["train.steps=40"], [(16, 20, 4), (32, 10, 4), (64, 5, 4)]),
        (
            Scaling("fixed-data"),
            ["train.steps=5 epochs"],
            [(n, "5 epochs", 4) for n in (16, 32, 64)],
        ),
        (Scaling("weak", "batch"), ["train.steps=40"], [(16, 40, 4), (32, 40, 4), (64, 40, 4)]),
        (Scaling("weak", "model"), ["train.steps=40"], [(8, 40, 4), (8, 40, 8), (8, 40, 16)]),
    ],
)
def test_what_grows_with_the_ranks(scaling, settings, wanted):
    recipes = [
        Cell.of(recipe(*settings), one).recipe
        for one in assignments(recipe(*settings), scaling, [2, 4, 8])
    ]
    assert [(r.train.global_batch, r.train.steps, r.model.layers) for r in recipes] == wanted


def test_strategies_share_the_probes_that_are_equal(tmp_path, monkeypatch):
    """One for each setting of activation checkpointing; each strategy has its numbers."""
    study = study_of(
        tmp_path / "s", *SETTINGS, "train.micro_batch=2", worlds=(2,), mode="strategies"
    )
    cells, started = [cell for cell in study.cells if not cell.recipe.parallel.offload], []

    def wait(processes, runs, steps, stopped):
        for run in runs:
            shutil.rmtree(run.path, ignore_errors=True)
            write_run(
                run.path,
                probe_recipe(cells[0]).replace({"train.global_batch": 4}),
                1,
                phases(10.0 + len(started)),
            )
        started.append(runs)
        return ""

    monkeypatch.setattr(probe, "WINDLASS", ("true",))
    monkeypatch.setattr(probe, "_wait", wait)
    for cell in cells:
        write_run(study.run_of(cell).path, cell.recipe, 2, phases(20.0))
        probe.run_probe(study, cell, lambda text: None)
    modes = [cell.recipe.parallel.activation_checkpointing for cell in cells]
    assert len(started) == len(set(modes)) == 2 < len(cells)
    for row in read_setups(study):
        if not row.recipe.parallel.offload:
            took = 10.0 + [*dict.fromkeys(modes)].index(
                row.recipe.parallel.activation_checkpointing
            )
            assert row.values["exposed_ms"] == pytest.approx(20.0 - took)


def test_the_published_weak_scaling():
    """Layers 3, 6, 12, 24 on 2, 4, 8, 16 GPUs, of 8, 4, 2 and 1 samples each."""
    base = Recipe.load("gpt-squad", ["train.global_batch=16", "model.layers=3"])
    cells = [
        Cell.of(base, one) for one in assignments(base, Scaling("weak", "model"), [2, 4, 8, 16])
    ]
    assert [cell.recipe.model.layers for cell in cells] == [3, 6, 12, 24]
    assert [cell.recipe.train.global_batch // cell.world for cell in cells] == [8, 4, 2, 1]


def test_strategies_leave_out_what_cannot_be():
    base, mode = recipe("train.global_batch=24"), Scaling("strategies")
    four = assignments(base, mode, [4])
    kinds = {(one["parallel.strategy"], one["parallel.offload"]) for one in four}
    assert {
        ("ddp", False),
        ("full_shard", True),
        ("shard_grad_op", True),
        ("hybrid_shard", False),
    } <= kinds
    assert ("ddp", True) not in kinds and {one[WORLD] for one in four} == {4}
    assert {one["parallel.activation_checkpointing"] for one in four} == {"none", "full"}
    assert len({Cell.of(base, one).key for one in four}) == len(four)
    for world in (2, 3):  # a sharding group of 1, or of all ranks, is another strategy
        assert not [
            one
            for one in assignments(base, mode, [world])
            if one["parallel.strategy"] == "hybrid_shard"
        ]
    alone = assignments(base, mode, [1], precisions=["fp32", "bf16"])
    assert {one["train.precision"] for one in alone} == {"fp32", "bf16"}
    assert alone[0]["parallel.strategy"] == "single"
    sized = recipe(
        "train.global_batch=24", "parallel.strategy=hybrid_shard", "parallel.shard_size=2"
    )
    sizes = {
        one["parallel.strategy"]: one["parallel.shard_size"]
        for one in assignments(sized, mode, [4])
    }
    assert (sizes["hybrid_shard"], sizes["ddp"], sizes["full_shard"]) == (2, 0, 0)


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        (
            [],
            {"worlds": (1, 3)},
            ["train.global_batch = 8", "3 ranks", "train.global_batch=6 or 9"],
        ),
        (["train.steps=41"], {"mode": "fixed-data"}, ["train.steps = 41", "train.steps=40 or 42"]),
        (["train.micro_batch=8"], {}, ["parallel.world=2", "train.micro_batch = 8", "write 4"]),
        ([], {"mode": "stong"}, ["mode=stong", "strong"]),
        ([], {"worlds": (0, 1)}, ["worlds=[0, 1]"]),
        ([], {"grow": "model"}, ["mode=weak"]),
        ([], {"mode": "weak", "grow": "data"}, ["batch or model"]),
        (
            ["model.layers=3", "train.global_batch=6"],
            {"mode": "weak", "grow": "model", "worlds": (2, 3)},
            ["model.layers = 3", "of 2"],
        ),
        ([], {"mode": "strategies"}, ["mode=strategies", "give one"]),
        ([], {"worlds": ()}, ["worlds=[1, 2, 4]"]),
        ([], {"nodes": (1,)}, ["nodes=[1]", "worlds=[1, 2]"]),
    ],
)
def test_what_cannot_be_measured_is_one_message(tmp_path, settings, options, words):
    with refused(*words):
        study_of(tmp_path / "study", *settings, **options)
    assert not (tmp_path / "study").exists()


def test_cells_share_threads_and_log_often_enough(tmp_path):
    study = study_of(
        tmp_path / "study",
        "train.steps=100",
        worlds=(1, 2, 4),
        mode="weak",
        warmup=0,
        project=(8, 16),
    )
    assert study.recipe.train.threads == thread_share(4)
    assert study.recipe.telemetry.every == 100 // 20
    assert (
        study.scaling == Study.open(study.path).scaling == Scaling("weak", "batch", 0, 1, (8, 16))
    )
    assert (
        study_of(tmp_path / "seldom", "train.steps=8", "telemetry.every=50").recipe.telemetry.every
        == 1
    )
    assert study_of(tmp_path / "often", "telemetry.every=2").recipe.telemetry.every == 2
    assert "4 ranks of 3 threads" in too_few_cores(
        study_of(tmp_path / "many", "train.threads=3", worlds=(4,))
    )


def test_a_study_is_continued_and_grows(tmp_path):
    path = tmp_path / "study"
    first = study_of(path, "train.steps=60", mode="weak", warmup=2)
    again = study_of(path, "train.steps=60", worlds=())
    assert again == first
    grown = study_of(path, "train.steps=60", worlds=(1, 2, 4), repeats=2)
    assert grown.cells[:2] == [
        Cell.of(grown.recipe, {**c.assignment, "repeat": 1}, c.directory) for c in first.cells
    ]
    assert [c.world for c in grown.cells] == [1, 2, 4, 4, 2, 1]
    assert [c.repeat for c in grown.cells] == [1, 1, 1, 2, 2, 2]
    assert grown.scaling == Scaling("weak", "batch", 2, 2)
    assert grown.recipe.train.threads == first.recipe.train.threads
    with refused("mode=weak batch", "path=DIR"):
        study_of(path, mode="strong")
    with refused("train.threads = 7", "equal"):
        study_of(path, "train.threads=7")
    with refused("scaling study", "path=DIR"):
        Study.create(recipe(), ["optim.lr=1e-2,1e-3"], path)


def test_a_study_over_hosts_is_shown_and_not_trained_here(tmp_path):
    path = tmp_path / "study"
    study = scale("quickstart", (1, 2), {"train.steps": 7}, nodes=(1, 2), path=path)
    assert study.recipe.train.steps == 7 and scale(path) == scale(study) == study
    assert [result.state for result in study.results()] == ["waiting"] * 2
    with refused("windlass submit"):
        sweep(path)
    assert not (study.path / "runs").exists() and not (study.path / "machine.json").exists()


def test_a_probe_has_one_ranks_shapes_and_nothing_to_say(tmp_path):
    settings = "train.global_batch=16 train.micro_batch=2 parallel.strategy=full_shard"
    settings += " telemetry.every=3"
    cell = study_of(tmp_path / "study", *settings.split(), worlds=(4,)).cells[0]
    probe = probe_recipe(cell)
    assert probe.batch(1).accumulation == cell.recipe.batch(4).accumulation
    assert probe.batch(1).micro_batch == 2
    assert (probe.parallel.strategy, probe.eval.every, probe.checkpoint.every) == ("single", 0, 0)
    assert probe.model == cell.recipe.model and probe.train.precision == cell.recipe.train.precision


def test_rates_of_several_checks_are_one_file(tmp_path):
    rank = {"host": "a", "node": 0, "tflops": {"float32": 2.0}}
    rate = {"collective": "all_reduce", "size": 4, "seconds": 1.0, "algbw": 1.0, "busbw": 1.5}
    rate["ranks"] = {0: 1.5}
    rates = [rate | {"group": "all ranks"}, rate | {"group": "one host"}]
    store_rates(tmp_path, [rank], [])
    store_rates(
        tmp_path, [rank, rank | {"host": "b", "node": 1, "tflops": {"float32": 1.0}}], rates
    )
    machine = read_json(tmp_path / "machine.json")
    assert list(machine) == ["1x1", "2x2"] and machine["1x1"]["collectives"] == []
    assert machine["2x2"]["matrix_tflops"] == {"float32": 1.0} and machine["2x2"]["hosts"] == [
        "a",
        "b",
    ]
    assert machine["2x2"]["collectives"] == [{k: v for k, v in rate.items() if k != "ranks"}]


@pytest.mark.parametrize("name", study_presets())
def test_every_preset_of_studies_is_one(name):
    verb = tomllib.loads(study_presets()[name].read_text())["verb"]
    base, options, _ = load_study(name, verb)
    worlds = options.pop("worlds", [])
    if verb == "scale":
        asked = {
            key: value for key, value in options.items() if key not in ("precisions", "preset")
        }
        scaling = scaling_of(None, asked, name)
        assert cells_of(
            base, assignments(base, scaling, worlds, precisions=options.get("precisions", ()))
        )
    else:
        assert expand(base, map(parse_axis, options["axes"]))


def test_a_preset_of_studies_is_changed_on_the_way():
    recipe, options, _ = load_study("quickstart-scaling", "scale", ["train.steps=7"])
    assert recipe.train.steps == 7
    assert recipe.eval.every == 0
    assert options["worlds"] == [1, 2]
    assert options["mode"] == "strong"
    assert "repeats" not in options, "what the preset does not set stays as a study has it"
    assert load_study("quickstart", "sweep") == (Recipe.load("quickstart"), {}, None)
    with refused("quickstart-scaling", "for scale"):
        load_study("quickstart-scaling", "sweep")
    with refused("did you mean quickstart-scaling"):
        load_study("quickstart-scalign", "scale")
    with refused("quickstart-scaling", "scale"):
        Recipe.load("quickstart-scaling")


def test_a_study_over_hosts_is_an_array_job_for_each_number_of_hosts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "scale quickstart --nodes 1,2 --scheduler slurm --min-busbw 5 --repeats 2".split()
    done = windlass(
        *words, "--gpus-per-node", "2", "--time", "01:00:00", "--dir", "study", "--dry-run"
    )
    one, two = done.stdout.split("#!/bin/bash")[1:]
    for text, script, array, word in (
        (one, "1-nodes", "0,3", "--nodes=1"),
        (two, "2-nodes", "1-2", "--nodes=2"),
    ):
        assert {f"#SBATCH {word}", "#SBATCH --ntasks-per-node=2", "#SBATCH --time=01:00:00"} <= set(
            text.splitlines()
        )
        assert f"--array={array}" in text or f"--array={array.replace('-', ',')}" in text
        assert f"jobs/{script}" in text and "--min-busbw 5" in text
        assert f'sweep {tmp_path}/study --only "$task" --launch &' in text
    assert not (tmp_path / "study").exists()
    there = create_study(
        Recipe.load("quickstart"), [2, 4], nodes=[1, 2], path=tmp_path / "study", repeats=2
    )
    there.set_status(there.cells[0], "failed", "bad input")
    words += ["--gpus-per-node", "2", "--dir", "study", "--dry-run"]
    one, two = windlass(*words).stdout.split("#!/bin/bash")[1:]
    assert "--array=3" in one and "--retry-failed" not in one
    one, two = windlass(*words, "--retry-failed").stdout.split("#!/bin/bash")[1:]
    assert "--array=0,3" in one and '--only "$task" --launch --retry-failed &' in one
    submitted = ["submit", "study", "--gpus-per-node", "2", "--scheduler", "slurm", "--dry-run"]
    for script in windlass(*submitted).stdout.split("#!/bin/bash")[1:]:
        assert "jobs/1-nodes" in script or "jobs/2-nodes" in script
    cpu = "scale quickstart parallel.device=cpu --nodes 1,2 --scheduler slurm --min-busbw 5".split()
    one, two = windlass(*cpu, "--dry-run").stdout.split("#!/bin/bash")[1:]
    assert "--min-busbw" not in one and "--min-busbw 5" in two  # one rank has no bandwidth
    assert "leave --worlds out" in windlass(*cpu, "--worlds", "1,2", code=2).stderr
    assert (
        "--gpus-per-node"
        in windlass(
            "scale", "quickstart", "--nodes", "2", "--scheduler", "slurm", "--dry-run", code=2
        ).stderr
    )
