"""Memory for every strategy, world, precision, recomputation and offload."""

from __future__ import annotations

import json
from itertools import product

import pytest

from windlass.estimate.devices import Device, find_device
from windlass.estimate.grid import PARTS, memory_grid, precisions_of, worlds_of
from windlass.estimate.memory import Layout, memory
from windlass.estimate.plan import Facts, Setting, memory_part
from windlass.recipe import Recipe
from windlass.reports.memory_grid import best_of, grid_table


def setting_of(name="gpt2-124m", world=8, device="A100-40GB", precision="bf16", overrides=()):
    return Setting(Recipe.load(name, list(overrides)), world, find_device(device), precision, Facts(vocab=65))


def test_every_combination_is_there_once():
    table = memory_grid(setting_of())
    found = {(r["world"], r["precision"], r["strategy"], r["checkpointing"], r["offload"]) for r in table}
    sharded = ["shard_grad_op", "hybrid_shard", "full_shard"]
    wanted = set(product([4, 8, 16], ["bf16", "fp32"], sharded, ["none", "selective", "full"], [False, True]))
    wanted |= set(product([2, 4, 8, 16], ["bf16", "fp32"], ["ddp"], ["none", "selective", "full"], [False]))
    assert wanted < found and len(found) == len(table) == 2 * (3 + 15 + 3 * 21)


def test_each_row_is_what_memory_says_of_its_layout():
    setting = setting_of()
    for row in memory_grid(setting)[::7]:
        layout = Layout(**{key: row[key] for key in Layout.__dataclass_fields__})
        taken = memory(setting.recipe.model, setting.vocab, layout)
        assert row["total_bytes"] == taken.total == sum(row[f"{part}_bytes"] for part in PARTS)
        assert row["host_bytes"] == taken.host and row["fits"] == (taken.total <= setting.device.usable_bytes)
        assert (taken.host > 0) == layout.offload
        assert layout.micro_batch * layout.accumulation * layout.world == setting.recipe.train.global_batch


@pytest.mark.parametrize("name", ["quickstart", "c4-30m", "gpt2-124m"])
def test_the_plan_s_own_table_is_a_part_of_it(name):
    setting = setting_of(name, world=4)
    grid = {
        (r["strategy"], r["checkpointing"]): r["total_bytes"]
        for r in memory_grid(setting)
        if (r["world"], r["precision"], r["offload"]) == (4, "bf16", False)
    }
    for row in memory_part(setting):
        assert grid[row["strategy"], row["checkpointing"]] == row["total_bytes"]


def test_worlds_and_precisions():
    assert worlds_of(setting_of("quickstart", world=1)) == [1, 2, 4, 8]
    assert worlds_of(setting_of("quickstart", world=1, overrides=["train.global_batch=6"])) == [1, 2]
    assert precisions_of(setting_of(device="V100-32GB", precision="fp16")) == ["fp16", "fp32"]
    assert precisions_of(setting_of(device="cpu", precision="fp32")) == ["fp32", "bf16"]
    assert not any(r["offload"] for r in memory_grid(setting_of(device="cpu", precision="fp32")))


def test_ranks_on_a_cpu_share_its_memory():
    """A room for one rank is half of that for each of two, and so on; a GPU is each rank's own."""
    setting = Setting(Recipe.load("c4-30m"), 1, Device("CPU", "cpu", int(2.0e9 / 0.9)), "fp32", Facts())
    fits = {
        r["world"]: r["fits"] for r in memory_grid(setting) if r["precision"] == "fp32" and r["checkpointing"] == "none"
    }
    assert fits == {1: True, 2: False, 4: False, 8: False}


def test_the_best_is_the_first_that_fits_and_else_the_smallest():
    table = memory_grid(setting_of())
    assert best_of(table, 8, "bf16", offload=False)["strategy"] == "ddp"
    tight = Setting(Recipe.load("gpt2-124m"), 8, Device("small", "cuda", int(4.0e9 / 0.9)), "bf16", Facts())
    best = best_of(memory_grid(tight), 8, "bf16", offload=False)
    assert best["fits"] and best["checkpointing"] == "full" and best["strategy"] != "ddp"
    tiny = Setting(Recipe.load("gpt2-124m"), 8, Device("tiny", "cuda", 10**9), "bf16", Facts())
    rows = [r for r in memory_grid(tiny) if (r["world"], r["precision"], r["offload"]) == (8, "bf16", True)]
    least = best_of(rows, 8, "bf16", offload=True)
    assert not least["fits"] and least["total_bytes"] == min(r["total_bytes"] for r in rows)


def test_the_short_table_has_a_row_a_world_and_precision():
    head, rows, _ = grid_table(json.loads(json.dumps(memory_grid(setting_of()))))
    assert len(rows) == 5 * 2 and {len(row) for row in rows} == {len(head)} == {9}
    assert len(grid_table(memory_grid(setting_of("quickstart", 1, "cpu", "fp32")))[0]) == 5
