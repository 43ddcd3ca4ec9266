"""The stages of a pipeline, its timetable and its messages.

`test_parallel_equivalence.py` has trainings: micro-batches have different lengths there, and a tied
table, which two stages hold, counts once in the gradient's norm.
"""

import itertools

import pytest
from equivalence import VOCAB, settings
from harness import run_ranks

from windlass.errors import UserError
from windlass.model.build import build_model
from windlass.model.size import stage_layers
from windlass.parallel.parallelize import parallelize
from windlass.parallel.pipeline import Task, timetable
from windlass.recipe.network import ModelSettings


def rejected(join):
    recipe = settings("fp64", "ddp", 2, 4, pipeline=2, model__layers=5, model__tie_head=False)
    frozen = ["blocks.[0-2].*", "embedding.*", "positions.*"]
    assert stage_layers(recipe.model, VOCAB, 2)[0] == 3
    with join(recipe) as ranks, pytest.raises(UserError, match=r"model\.freeze.*stage 0 of 2"):
        recipe = recipe.replace({"model.freeze": frozen})
        parallelize(build_model(recipe, VOCAB), ranks, recipe)


@pytest.mark.dist
def test_models_without_stages_are_rejected():
    run_ranks(rejected, 2)


def needs(task: Task, stages: int) -> set[Task]:
    """The tasks whose results a task takes."""
    before = task.stage + 1 if task.backward else task.stage - 1
    needed = {task._replace(stage=before)} if 0 <= before < stages else set()
    return needed | ({task._replace(backward=False)} if task.backward else set())


def test_timetables_have_each_task_once_after_what_it_needs():
    for stages, count in itertools.product((2, 3, 4, 8), range(1, 18)):
        ticks, done, held, most = timetable(stages, count), set(), 0, 0
        assert len(ticks) == 2 * (count + stages - 1)  # no waiting but the bubble
        for tasks in ticks:
            assert len({task.stage for task in tasks}) == len(tasks)
            assert all(needs(task, stages) <= done for task in tasks) and not done & set(tasks)
            done |= set(tasks)
            held += sum(-1 if task.backward else 1 for task in tasks if task.stage == 0)
            most = max(most, held)
        assert len(done) == 2 * stages * count
        assert most == min(stages, count)  # inputs that the first stage holds


def test_blocks_are_divided_by_their_cost():
    even = ModelSettings(layers=8, width=64, heads=4, context=64, vocab=100)
    assert stage_layers(even, 100, 2) == [4, 4]
    assert stage_layers(even, 100, 3) == [3, 3, 2]
    assert stage_layers(even.model_copy(update={"layers": 7}), 100, 3)[0] == 2
    # The head costs as much as 2.4 blocks.
    assert stage_layers(even, 2000, 2) == [5, 3]
    assert stage_layers(even, 2000, 4) == [2, 2, 3, 1]
    assert stage_layers(even, 100, 8) == [1] * 8
    assert all(sum(stage_layers(even, 500, stages)) == 8 for stages in range(1, 9))
