"""A mixture in a whole training: the same after a stop, a kill, and on other ranks; other weights in
a branch; its numbers in the ledger, the report, the trackers and the plan.
"""

import numpy as np
import pytest
from small_runs import recipe_of, stopped, untouched

from helpers import refused
from windlass import train
from windlass.checkpoint.format import open_checkpoint
from windlass.data.mixture import Mixture, Stage
from windlass.data.open import open_data

NAMES = ("long", "short", "third")


@pytest.fixture(scope="module")
def texts(corpus):
    """Sources of 48, 14 and 30 samples."""
    text = (corpus / "text.txt").read_text()
    for name, size in zip(NAMES, (787, 230, 500), strict=True):
        (corpus / f"{name}.txt").write_text(text[:size])
    return corpus


def mix(texts, *weights):
    return [
        {"name": name, "source": str(texts / f"{name}.txt"), "weight": weight}
        for name, weight in zip(NAMES, weights, strict=True)
    ]


STAGES = [{"from": 0.5, "weights": {"third": 0.8}}]


def mixed(texts, run, *weights, **more):
    weights = weights or (0.6, 0.3, 0.1)
    own = {
        "data.mix": mix(texts, *weights),
        "data.stages": STAGES,
        "data.source": "",
    }
    place = {"run.dir": str(run), "data.dir": str(texts / "mix-data")}
    recipe = recipe_of(texts, run, **more)
    return recipe.replace({**own, **place})


def sources(run):
    """The loss of each `train` line, and its numbers about the sources."""
    return [
        (line["step"], line["loss"], {k: v for k, v in line.items() if k.startswith("source.")})
        for line in run.lines("train")
    ]


def counted(run):
    return [[line[f"source.{name}.samples"] for name in NAMES] for line in run.lines("train")]


def test_stopped_failed_and_resumed_is_bit_for_bit_the_same(texts, tmp_path):
    recipe = mixed(texts, tmp_path / "run").replace({"telemetry.every": 4})
    whole = untouched(recipe)
    stopped(recipe, 3)
    stopped(recipe, 6)
    run = train(recipe)
    assert sources(run) == sources(whole)
    last = run.lines("train")[-1]
    assert last["source.short.epochs"] == last["source.short.samples"] / 14
    assert sum(last[f"source.{name}.samples"] for name in NAMES) == last["samples"] == 96
    shown = [{k: v for k, v in x.items() if "loss" in k} for x in run.lines("eval")]
    assert shown == [{k: v for k, v in x.items() if "loss" in k} for x in whole.lines("eval")]
    assert {f"source.{name}.loss" for name in NAMES} < set(shown[-1])


def test_a_branch_has_other_weights_and_no_sample_twice(texts, tmp_path):
    origin = train(mixed(texts, tmp_path / "origin"))
    new = mixed(texts, tmp_path / "branch", 0.1, 0.1, 0.8).replace({"data.stages": []})
    branch = untouched(new, branch_from=f"{origin.path}@6")
    train(new, branch_from=f"{origin.path}@6", stop_at=8)
    resumed = train(new, branch_from=f"{origin.path}@6")
    assert sources(resumed) == sources(branch) and branch.lines("train")[0]["step"] == 7
    counters = open_checkpoint(branch.checkpoints_dir / "step-00000012").counters
    stages = [Stage(a, tuple(w)) for a, w in counters["mixture"]]
    assert [(s.start, s.weights) for s in stages] == [(0, (0.6, 0.3, 0.1)), (48, (0.1, 0.1, 0.8))]
    samples = open_data(new).train
    expected = Mixture(samples, stages, new.run.seed)
    assert counted(branch)[-1] == expected.counts(96).tolist()
    before = np.array(counted(origin)[5])
    assert (np.array(counted(branch)[0]) >= before).all()
    other = mix(texts, 0.1, 0.1, 0.8)[:2]
    with refused("the data is not what"):
        train(
            new.replace({"data.mix": other, "run.dir": str(tmp_path / "x"), "data.dir": ""}),
            branch_from=f"{origin.path}@6",
        )
