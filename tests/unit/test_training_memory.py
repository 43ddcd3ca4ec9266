"""The micro-batch that fits into free memory, with numbers of GPUs that are not here."""

import json
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import hf_fixtures
from windlass.estimate.devices import Device
from windlass.estimate.layouts import memory_rows
from windlass.estimate.memory import memory
from windlass.estimate.micro_batch import layout_on
from windlass.model.build import read_sizes
from windlass.parallel.env import DistEnv
from windlass.parallel.ranks import init_ranks
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.training.rank import batch_of, prepare_device

VOCAB = 50257
GPT2 = Recipe.load("gpt2-124m", ["parallel.device=cpu"])
GPU = Device("", "cuda", None)
BY_TOKENS = 16  # x 1,024


def peak(layout):
    return memory(GPT2.model, VOCAB, layout, GPT2.optim.kind).total


@pytest.mark.parametrize("gigabytes", [12, 24, 40, 80, 141])
@pytest.mark.parametrize("world", [1, 4])
def test_the_largest_of_the_plan_is_chosen(gigabytes, world):
    usable = int(gigabytes * 0.9e9)
    layout = layout_on(GPT2, VOCAB, world, GPU, "bf16", usable)
    # Several ranks cannot repeat the first step, so they leave more room.
    room = usable if world == 1 else int(gigabytes * 0.8e9)
    rows = memory_rows(GPT2.model, VOCAB, "adamw", layout, room)
    [own] = [row for row in rows if row.chosen]
    assert own.fits and layout.micro_batch == own.largest_micro_batch
    samples = GPT2.train.global_batch // world
    assert layout.micro_batch * layout.accumulation == samples
    larger = [n for n in range(layout.micro_batch + 1, samples + 1) if samples % n == 0][:1]
    for n in larger:
        assert peak(replace(layout, micro_batch=n, accumulation=samples // n)) > room
    assert layout.micro_batch > BY_TOKENS or gigabytes < 24


def chosen(ranks, free, run=None, vocab=VOCAB, recipe=GPT2):
    plan = SimpleNamespace(recipe=recipe, run=run, resuming=run is not None)
    return batch_of(plan, ranks, vocab, free).micro_batch


def test_a_resumed_run_keeps_its_micro_batch(tmp_path):
    start = {"kind": "event", "step": 0, "event": "started", "world": 1, "micro_batch": 32}

    def resumed(free=int(60e9), smaller=None, **changes):
        Run(tmp_path).metrics_path.write_text(json.dumps(start | changes) + "\n")
        (tmp_path / "micro_batch.json").write_text(json.dumps(smaller or {}))
        return chosen(ranks, free, Run(tmp_path))

    with init_ranks(DistEnv(), GPT2) as ranks:
        largest = chosen(ranks, int(60e9))
        assert largest > 32
        assert resumed() == resumed(free=None) == 32
        # Samples of another batch, or of other ranks, are divided anew.
        assert resumed(micro_batch=7) == resumed(world=2) == largest
        assert chosen(ranks, int(60e9), vocab=0) == BY_TOKENS  # a user's own model
        # A CPU has the rule by tokens.
        assert chosen(ranks, None) == GPT2.batch(1, "cpu").micro_batch
        assert resumed(smaller={"world": 2, "micro_batch": 8}) == 32
        assert resumed(smaller={"world": 1, "micro_batch": 8}) == 8
        assert resumed(free=None, smaller={"world": 1, "micro_batch": 2}) == 2


def test_a_model_of_transformers_has_the_micro_batch_of_its_size(tmp_path):
    """Its activations are measured by a pass with fake tensors; a failed pass leaves the rule."""
    directory = hf_fixtures.save("llama", tmp_path, num_hidden_layers=2)
    keys = {"model.kind": "hf", "model.name": str(directory), "model.context": 64}
    keys |= {"train.global_batch": 4096, "parallel.device": "cpu", "optim.lr": 1e-4}
    recipe = Recipe().replace(keys)
    vocab = read_sizes(recipe).vocab
    with init_ranks(DistEnv(), recipe) as ranks:
        by_tokens = recipe.batch(1, "cuda").micro_batch
        sizes = [chosen(ranks, int(gb * 1e9), vocab=vocab, recipe=recipe) for gb in (0.2, 2)]
        assert sizes[0] < by_tokens < sizes[1]


@pytest.mark.parametrize("format", ["chat", "text"])
def test_rows_of_varying_length_turn_off_attention_that_plans_for_each_length(format):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with ExitStack() as stack:
        prepare_device(Recipe().replace({"data.format": format}), stack)
        assert torch.backends.cuda.cudnn_sdp_enabled() == (before and format == "text")
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
