"""What is advised where nothing fits: every way is held against the memory it would take."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from windlass.estimate.devices import Device, find_device, low_precision
from windlass.estimate.memory import Layout, memory
from windlass.estimate.plan import Facts, Setting, recommendation_part
from windlass.estimate.recommend import options, recommend, shortened, sized
from windlass.recipe import Recipe

GPT2 = Recipe.load("gpt2-124m").model
VOCAB = 50304
BASE = Layout("ddp", 8, precision="fp32", device="cuda", micro_batch=16)
CASES = [
    (layers, width, world, micro, share, room, low)
    for layers, width in ((24, 1024), (48, 4096))
    for world in (1, 8)
    for micro, share in ((0, 64), (16, 64), (1, 1))
    for room in (4, 20)
    for low in ("fp16", "")
]


def laid_out(way, base, share):
    """The layout, model changes and share that a way describes, read from its words."""
    settings = dict(re.findall(r"([a-z_.]+)=(\S+?)(?:[;,]|\s|$)", way))
    ranks = re.match(r"(\d+) ranks", way)
    world = int(ranks[1]) if ranks else base.world
    strategy = settings["parallel.strategy"]
    shard = {"ddp": 1, "single": 1, "hybrid_shard": int(settings.get("parallel.shard_size", 0))}.get(strategy, world)
    if not ranks and "model.context" not in way and "train.micro_batch" not in settings:
        micro = max(1, base.micro_batch)
    else:
        micro = 1
    layout = replace(
        base, world=world, strategy=strategy, shard=shard, offload=settings.get("parallel.offload") == "true",
        precision=settings.get("train.precision", base.precision).strip('"'),
        checkpointing=settings.get("parallel.activation_checkpointing", "none"),
    )  # fmt: skip
    return sized(layout, micro, max(1, share * base.world // world)), int(settings.get("model.context", 0))


@pytest.mark.parametrize("case", CASES)
def test_every_way_that_is_named_fits(case):
    layers, width, world, micro, share, room_gb, low = case
    model, room = GPT2.model_copy(update={"layers": layers, "width": width, "heads": 16}), int(room_gb * 1e9)
    base = replace(BASE, world=world, micro_batch=micro)
    found = recommend(model, VOCAB, base, share, room, "adamw", low)
    if found.fit is not None:
        assert found.fit.memory.total <= room
        assert ("host's memory" in found.why) == found.fit.layout.offload
        return
    ways = found.why.split("Try ", 1)[1].split("; or ")
    for way in ways[:-1]:
        layout, context = laid_out(way, base, share)
        network = shortened(model, context) if context else model
        assert memory(network, VOCAB, layout).total <= room, way
        assert share * world % (layout.world * layout.micro_batch) == 0, way
        assert layout.precision in ("fp32", low), way
    least = float(re.search(r"the least is ([\d.]+) GB", found.why)[1]) * 1e9
    true = min(memory(model, VOCAB, sized(o, max(1, micro), max(1, micro, share))).total for o in options(base))
    assert least == pytest.approx(true, rel=0.01) and true > room


def test_low_precision_is_the_device_s_own():
    assert low_precision(find_device("V100-32GB")) == low_precision(find_device("T4")) == "fp16"
    assert low_precision(find_device("A100-80GB")) == low_precision(Device("Cerebras", "cuda", None)) == "bf16"
    assert low_precision(find_device("cpu")) == ""
    recipe = Recipe.load(
        "gpt2-124m", ["model.layers=48", "model.width=2304", "train.micro_batch=16", "train.precision=fp32"]
    )
    found = recommendation_part(Setting(recipe, 8, find_device("V100-32GB"), "fp32", Facts()))
    assert "bf16" not in found["why"]


def test_hybrid_sharding_is_tried_before_gathering_among_all_ranks():
    order = [o.strategy for o in options(replace(BASE, world=16)) if o.checkpointing == "none" and not o.offload]
    assert order == ["ddp", "shard_grad_op", "hybrid_shard", "full_shard"]
    assert [o.strategy for o in options(replace(BASE, world=2))][:3] == ["ddp", "shard_grad_op", "full_shard"]
    model = GPT2.model_copy(update={"layers": 36, "width": 2560, "heads": 20})
    fits = {}
    for option in options(replace(BASE, world=16, precision="bf16")):
        fits.setdefault(option.strategy, memory(model, VOCAB, sized(option, 2, 2)).total)
    room = fits["hybrid_shard"] + 1
    assert min(fits["ddp"], fits["shard_grad_op"]) > room
    found = recommend(model, VOCAB, replace(BASE, world=16, precision="bf16", micro_batch=2), 2, room)
    assert found.fit.layout.strategy == "hybrid_shard"
    assert found.fit.settings()["parallel.shard_size"] == found.fit.layout.shard == 8
