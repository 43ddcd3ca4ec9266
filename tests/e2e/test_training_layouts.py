"""Trainings whose ranks divide the model or the sequences, as processes of `windlass`."""

import json
from pathlib import Path

import pytest
import torch
from small_runs import curve, evaluations, recipe_of, settings

from helpers import kill_when, windlass
from windlass import train
from windlass.checkpoint.choose import choose_checkpoint
from windlass.checkpoint.format import open_checkpoint
from windlass.evaluation.source import find_source, open_model
from windlass.parallel.ranks import alone
from windlass.run import Run

pytestmark = pytest.mark.dist

FP64 = {"train.precision": "fp64", "parallel.device": "cpu"}
TENSOR, CONTEXT = {"parallel.tensor": 2}, {"parallel.context": 2}
EXACT = 1e-9  # of float64, relative
LLAMA = {
    "model.position": "rope",
    "model.norm": "rmsnorm",
    "model.activation": "swiglu",
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.ff_width": 24,
    "model.tie_head": False,
    "model.attn_bias": False,
    "model.ff_bias": False,
    "model.dropout": 0.0,
}
GRID = LLAMA | {"train.steps": 6, "eval.every": 3, "eval.sample_every": 3, "eval.sample_tokens": 12}


def words(corpus: Path, run: Path, layout: dict[str, int], *options: str, **more: object):
    """`train` with a layout and enough ranks for one copy of the model."""
    world = 1
    for ranks in layout.values():
        world *= ranks
    overrides = settings(corpus, run, **(FP64 | layout | {"micro": 2} | more))  # type: ignore[arg-type]
    return ["train", "quickstart", *(["--world", str(world)] * (world > 1)), *options, *overrides]


def weights(run: Run) -> dict[str, torch.Tensor]:
    """The whole parameters in the newest checkpoint, from the pieces of all ranks."""
    choice = choose_checkpoint(run.path)
    assert choice is not None and not choice.notes
    checkpoint = open_checkpoint(choice.path)
    return {name: checkpoint.tensor(name) for name in checkpoint.names("model/")}


def assert_equal(run: Run, whole: Run) -> None:
    """Equal losses, gradient norms, counts and parameters, except for the rounding of float64."""
    assert_weights_and_curves(run, whole)
    for mine, other in zip(evaluations(run), evaluations(whole), strict=True):
        assert mine == pytest.approx(other, rel=EXACT)


def assert_weights_and_curves(run: Run, whole: Run) -> None:
    for mine, other in zip(curve(run), curve(whole), strict=True):
        assert mine == pytest.approx(other, rel=EXACT)
    mine, other = weights(run), weights(whole)
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=EXACT)


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Run:
    """The run of one process, in one go."""
    return train(recipe_of(corpus, tmp_path_factory.mktemp("whole") / "run", micro=2, **FP64))


def test_a_killed_run_continues_in_other_layouts_with_equal_numbers(corpus, tmp_path, whole):
    """Tensor 2, killed; context 2; one process; tensor 2: with dropout and equal micro-batches."""
    run = Run(tmp_path / "moving")
    kill_when(words(corpus, run.path, TENSOR), lambda: len(run.lines("train")) >= 5)
    assert 3 <= choose_checkpoint(run.path).step < 12
    windlass(*words(corpus, run.path, CONTEXT, "--stop-at", "8"))
    train(recipe_of(corpus, run.path, micro=2, **FP64), stop_at=10)
    windlass(*words(corpus, run.path, TENSOR))
    assert run.state == "finished"
    assert_equal(run, whole)
    meshes = [e["mesh"] for e in run.events if e["event"] in ("started", "resumed")]
    assert [(m["tp"], m["cp"]) for m in meshes] == [(2, 1), (1, 2), (1, 1), (2, 1)]


@pytest.fixture(scope="module")
def grid(corpus, tmp_path_factory) -> Run:
    """A run of a Llama with tensor 2 x data 2 under `full_shard`."""
    run = Run(tmp_path_factory.mktemp("grid") / "run")
    overrides = words(corpus, run.path, TENSOR, strategy="full_shard", **GRID)
    overrides[overrides.index("--world") + 1] = "4"
    windlass(*overrides)
    return run


@pytest.fixture(scope="module")
def exported(grid, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("exported") / "hf"
    windlass("export", grid.path, directory)
    return directory


def test_tensor_2_x_data_2_measures_what_one_process_does(grid, corpus, tmp_path):
    """Losses, evaluations, samples and weights; every rank samples its device."""
    whole = train(recipe_of(corpus, tmp_path / "whole", micro=2, **FP64, **GRID))
    assert_equal(grid, whole)
    texts = [[line["text"] for line in run.lines("sample")] for run in (grid, whole)]
    assert texts[0] == texts[1] and len(texts[0]) >= 2
    assert sorted(path.name for path in grid.devices_dir.iterdir()) == [
        f"rank-{rank:05d}.jsonl" for rank in range(4)
    ]
    for ours, other in zip(grid.lines("train"), whole.lines("train"), strict=True):
        assert ours["tokens"] == other["tokens"]
        assert ours["tokens_per_s"] * ours["step_ms"] == pytest.approx(8 * 16 * 1e3, rel=1e-6)
        assert ours["tokens_per_s_per_device"] == pytest.approx(ours["tokens_per_s"] / 4)
    assert grid.summary["world"] == 4
    assert grid.summary["device_hours"] > grid.summary["wall_time"]["total"] / 3600 * 3.9


def test_a_divided_run_is_evaluated_sampled_and_exported(grid, exported):
    """`eval`, `sample` and `export` by one process; `transformers` computes the same logits."""
    transformers = pytest.importorskip("transformers")
    scores = json.loads(windlass("eval", grid.path, "--json", "train.precision=fp64").stdout)
    loss = scores["results"]["loss"]["loss"]
    assert loss == pytest.approx(grid.lines("eval")[-1]["loss"], rel=EXACT)
    text = windlass("sample", grid.path, "--prompt", "ab", "--max-tokens", "12").stdout
    assert "ab" in text
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported).double()
    ours = open_model(find_source(grid, ["train.precision=fp64"]), alone("cpu"))
    tokens = torch.arange(16).view(2, 8) % 9
    with torch.no_grad():  # the export has float32 weights
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-6)


def test_first_weights_come_from_a_run(corpus, tmp_path, grid):
    """Into tensor 2; the loss at step 0 is the origin's last one."""
    more = {"model.init_from": f"'{grid.path}'", "train.steps": 1, **LLAMA}
    windlass(*words(corpus, tmp_path / "run", TENSOR, **more))
    first, last = Run(tmp_path / "run").lines("eval")[0], grid.lines("eval")[-1]
    assert first["step"] == 0
    assert first["loss"] == pytest.approx(last["loss"], rel=EXACT)
