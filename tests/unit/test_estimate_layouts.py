"""The layouts of several ranks: memory and bytes by hand, and which layouts are proposed."""

from dataclasses import replace
from itertools import pairwise

import pytest

from windlass.estimate.devices import find_device
from windlass.estimate.inputs import PlanInputs
from windlass.estimate.layouts import layout_rows, layouts, settings_of, variants
from windlass.estimate.memory import memory
from windlass.estimate.plan import plan
from windlass.estimate.rank import Layout, layout_of, ranks_of
from windlass.estimate.step import Collective, Links, work_of
from windlass.model.size import count, stage_layers, unit_blocks
from windlass.recipe import ModelSettings, Recipe

VOCAB, L, D, F, T, B = 64, 4, 32, 128, 16, 2
MODEL = ModelSettings(layers=L, heads=4, width=D, context=T)
BLOCK_CUT = 4 * D * D + 3 * D + 2 * D * F + F  # matrices, and biases of qkv and up
BLOCK_WHOLE = 2 * D + 2 * 2 * D  # biases of out and down, two norms
BLOCK = BLOCK_CUT + BLOCK_WHOLE
CUT, WHOLE = VOCAB * D + L * BLOCK_CUT, T * D + 2 * D + L * BLOCK_WHOLE


def test_parameters_of_a_rank():
    assert count(MODEL, VOCAB).total == CUT + WHOLE
    for t in (1, 2, 4):
        [rank] = ranks_of(MODEL, VOCAB, Layout("ddp", t, tensor=t))
        assert (rank.total, rank.replicated) == (CUT // t + WHOLE, WHOLE)
        peak = memory(MODEL, VOCAB, Layout("ddp", t, tensor=t))
        assert (peak.parameters, peak.optimizer) == (4 * rank.total, 8 * rank.total)
    # ranks of `cp` hold all of it, and share the state of a sharding strategy
    assert memory(MODEL, VOCAB, Layout("ddp", 2, context=2)).parameters == 4 * (CUT + WHOLE)
    shape = {"layers": L, "heads": 4, "width": D, "context": T}
    recipe = Recipe().replace({"model": shape, "parallel.context": 2})
    sharded = recipe.replace("parallel.strategy=full_shard", "train.global_batch=4")
    assert layout_of(sharded, 4).shard == 4 and layout_of(recipe, 2).shard == 1
    # the embedding is on the first stage, the tied head on the last one too
    first, last = ranks_of(MODEL, VOCAB, Layout("ddp", 2, pipeline=2, accumulation=2))
    assert first.total == VOCAB * D + T * D + first.layers * BLOCK
    assert last.total == VOCAB * D + 2 * D + last.layers * BLOCK
    assert [unit_blocks(8, 8 * size) for size in (2**10, 2**18, 2**21)] == [8, 4, 1]
    assert stage_layers(MODEL, 0, 3) == [1, 1, 2]  # the later stages hold fewer micro-batches
    assert stage_layers(MODEL, VOCAB, 3) == [1, 2, 1]  # the head takes time, too


def test_activations_of_a_rank():
    """The stream, norms and head's chunk by hand, without attention's details."""
    settings = MODEL.model_copy(update={"position": "none", "final_norm": False})
    wide, n = replace(Layout("ddp", 4), micro_batch=B), B * T

    def peak(**changes):
        return memory(settings, 50_000, replace(wide, **changes))

    # one logit of each token, its gradient, the gradients of the head and its input
    cut = 2 * n * 12_500 * 4 + 12_500 * D * 4 + n * D * 4
    assert peak(tensor=4).logits == cut
    [rank] = ranks_of(settings, VOCAB, replace(wide, tensor=4))
    assert (rank.tokens, rank.stream_tokens, rank.heads) == (n, n // 4, 1)
    [part] = ranks_of(settings, VOCAB, replace(wide, context=4))
    assert (part.tokens, part.stream_tokens, part.heads) == (n // 4, n // 4, 4)
    one, four = (memory(MODEL, VOCAB, replace(wide, world=c, context=c)) for c in (1, 4))
    assert one.activations / four.activations == pytest.approx(4, rel=0.05)


def test_bytes_of_tensor_parallelism_in_bf16():
    """Products are in bf16, the embedding in fp32; tests/dist/test_estimate_bytes.py counts fp32."""
    whole, once = B * T * D * 4, WHOLE * 4 + 6 * 2 * B * T * 4
    how = {"tensor": 2, "precision": "bf16", "micro_batch": B, "accumulation": 6}
    [rank] = ranks_of(MODEL, VOCAB, Layout("ddp", 2, **how))
    sent = work_of(rank).collectives
    assert {one.link for one in sent} == {"tp"}
    size = sum(one.calls * one.size for one in sent)
    assert size == 6 * ((8 * L + 2) * whole // 2 + 2 * whole) + once


def test_the_links_of_a_collective():
    links = Links(100e9, 10e9, per_host=8)
    inner = Collective("all_gather", 8e9, 1, 8, "tp")
    message = Collective("send_recv", 1e9, 2, 4, "pp", stride=4)
    assert (links.bandwidth(inner), links.bandwidth(message)) == (100e9, 10e9)
    # the 2 ranks of a host send together
    four = Collective("all_gather", 8e9, 1, 4, "dp", stride=4)
    assert links.bandwidth(four) == 20e9
    assert Links(100e9, 10e9).bandwidth(four) == 100e9  # one host


GPT2 = Recipe.load("gpt2-124m")


def inputs(world, gigabytes, recipe=GPT2):
    device = replace(find_device("A100-40GB"), memory_bytes=int(gigabytes * 1e9 / 0.9))
    return PlanInputs(recipe, world, device, "bf16", 50304)


@pytest.mark.parametrize("world", [2, 6])
def test_every_layout_is_a_valid_recipe(world):
    recipe = GPT2.replace("train.global_batch=96", "model.kv_heads=4", "model.layers=6")
    every = list(layouts(inputs(world, 40, recipe)))
    for layout in every:
        own = recipe.replace(settings_of(layout))
        assert layout_of(own, world, "cuda", "bf16") == replace(layout, workspace=0)
        assert layout.accumulation >= layout.pipeline and layout.pipeline <= 6
        assert 12 % layout.tensor == 0 and layout.model_ranks * layout.data_world == world
    assert any(layout.model_ranks == world for layout in every)
    assert {layout.tensor for layout in every} <= {1, 2, 4}  # they divide 4 heads


def test_settings_of_a_sharding_group_count_no_parts_of_a_sequence():
    recipe = GPT2.replace("parallel.context=2", "train.micro_batch=1")
    layouts = list(variants(layout_of(recipe, 8, "cuda", "bf16")))
    assert "hybrid_shard" in {layout.strategy for layout in layouts}
    for layout in layouts:
        assert layout_of(recipe.replace(settings_of(layout)), 8, "cuda", "bf16") == layout


def test_layouts_are_sorted_by_time_and_fit():
    for gigabytes in (2, 5, 40):
        rows, why = layout_rows(inputs(8, gigabytes))
        assert rows and not why and len(rows) <= 8
        seconds = [row.seconds for row in rows]
        assert all(a < 1.03 * b for a, b in pairwise(seconds))
        assert all(row.memory.total <= gigabytes * 1e9 for row in rows)
        divisions = [(r.layout.tensor, r.layout.context, r.layout.pipeline) for r in rows]
        assert len(set(divisions)) == len(divisions)
    # with room for everything, data parallelism without any cost
    assert rows[0].settings == {"train.micro_batch": 64}


def test_nothing_fits():
    rows, text = layout_rows(inputs(2, 0.5))
    assert not rows and "2 ranks" in text
    odd, _ = layout_rows(inputs(7, 40))  # for 512 sequences, 12 heads and layers
    divisions = {(row.layout.tensor, row.layout.context, row.layout.pipeline) for row in odd}
    assert divisions == {(1, 7, 1), (1, 1, 7)}


def test_the_plan_lists_layouts():
    result = plan("gpt2-124m", world=8, device="A100-40GB")
    text, plain = repr(result), result.as_dict()["layouts"]
    assert "tp cp pp" in text and "First row: train.micro_batch=64" in text
    assert "train.micro_batch=64" in text.partition("Layouts of 8 ranks")[2]
    assert plain[0]["memory"]["total"] == result.layouts[0].memory.total
    assert not plan("gpt2-124m", device="A100-40GB").layouts  # one rank
    small = plan("gpt2-124m", world=2, device="A100-40GB", memory_bytes=10**9)
    assert not small.layouts and small.layouts_advice in repr(small)
