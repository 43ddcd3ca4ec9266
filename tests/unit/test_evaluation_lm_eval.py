"""EleutherAI's harness: a task of our own, and the adapter without the harness."""

import importlib.util
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "dist"))

from harness import Join, recipe, run_ranks

from windlass.data.tokenizer import byte_tokenizer
from windlass.errors import UserError
from windlass.evaluation.likelihood import Continuation, log_likelihoods
from windlass.evaluation.lm_eval import (
    Interrupted,
    adapter,
    encode_request,
    generate_until,
    run_harness,
)
from windlass.evaluation.source import alone
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.parallel.parallelize import parallelize
from windlass.recipe import Recipe

ALONE = alone("cpu")
BYTES = byte_tokenizer()
INSTALLED = importlib.util.find_spec("lm_eval") is not None


SHAPE = {"layers": 1, "heads": 2, "width": 16, "context": 32, "init_std": 0.3}


def model(device: str = "cpu") -> Any:
    """A small GPT; with weights where the device has any."""
    gpt = build_model(Recipe.model_validate({"model": SHAPE}), 257, device=device)
    if device == "cpu":
        initialise(gpt, 1)
    return gpt.eval()


ROWS = [
    {"q": f"Number {i} is", "choices": [" odd", " even", " a cat"], "gold": i % 2} for i in range(9)
]


def parity(folder: Path) -> Any:
    from lm_eval.tasks import TaskManager

    folder.mkdir(exist_ok=True)
    (folder / "rows.json").write_text("\n".join(json.dumps(row) for row in ROWS))
    (folder / "parity.yaml").write_text(
        "task: parity\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
        f"{folder / 'rows.json'}\ntest_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: gold\ndoc_to_choice: choices\ntarget_delimiter: ''\n"
        "metric_list:\n  - metric: acc\n"
    )
    # not its thousands of files
    return TaskManager(include_path=str(folder), include_defaults=False)


def on_a_rank(join: Join, folder: Path) -> dict[str, Any] | None:
    sharded = recipe(parallel__strategy="full_shard")
    with join(sharded) as ranks:
        gpt = parallelize(model("meta"), ranks, sharded)
        initialise(gpt, 1)
        os.environ["LOCAL_RANK"] = str(ranks.rank)  # as under a launcher
        manager = parity(folder / str(ranks.rank))
        return run_harness("parity", gpt, BYTES, ranks, task_manager=manager)


@pytest.mark.dist
@pytest.mark.skipif(not INSTALLED, reason="lm-eval is an extra, not installed here")
@pytest.mark.filterwarnings("ignore")
def test_a_task_has_the_same_scores_on_one_rank_and_on_two_of_a_sharded_model(tmp_path):
    gpt, right = model(), 0
    numbers = run_harness("parity", gpt, BYTES, ALONE, task_manager=parity(tmp_path / "alone"))
    for row in ROWS:
        question, choices = row["q"].encode(), [choice.encode() for choice in row["choices"]]
        pairs = [Continuation([*question], [*choice]) for choice in choices]
        scores = [one.sum for one in log_likelihoods(gpt, pairs, ALONE)]
        right += scores.index(max(scores)) == row["gold"]
    assert numbers["parity/acc"] == pytest.approx(right / 9) and not gpt.training
    for one in run_ranks(on_a_rank, 2, tmp_path):
        assert one["parity/acc"] == numbers["parity/acc"]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for the harness: it seeds the generators and calls the adapter as in the list."""
    calls: list[Any] = []

    def simple_evaluate(model: Any, tasks: list[str], **_: Any) -> dict[str, Any]:
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        if tasks == ["unknown"]:
            raise KeyError("unknown")
        metrics = {f"{i},none": call(model) for i, call in enumerate(calls)}
        return {"results": {"task": metrics | {"alias": "task"}}}

    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=simple_evaluate))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", SimpleNamespace(LM=object))  # type: ignore[arg-type]
    return calls


def test_a_stop_cuts_the_harness_short_and_the_random_numbers_are_as_they_were(harness):
    harness.append(lambda lm: lm.loglikelihood([SimpleNamespace(args=("Is it? ", "yes"))])[0][0])

    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before, score = states(), Continuation([*b"Is it?"], [*b" yes"])
    assert run_harness("task", model(), BYTES, ALONE, poll=lambda: True) is None
    numbers = run_harness("task", model(), BYTES, ALONE, poll=lambda: False)
    assert numbers is not None and set(numbers) == {"task/0"}
    assert numbers["task/0"] == log_likelihoods(model(), [score], ALONE)[0].sum
    assert states() == before
    with pytest.raises(UserError, match="unknown"):
        run_harness("unknown", model(), BYTES, ALONE)


def test_rolling_scores_and_texts(harness: list[Any]) -> None:
    assert encode_request(BYTES, [256], "Is it? ", "yes") == Continuation([*b"Is it?"], [*b" yes"])
    assert encode_request(BYTES, [256], "", "yes") == Continuation([256], [*b"yes"])
    lm = adapter(model(), BYTES, ALONE)
    text = "the cat sat on the mat, and then it slept until noon"
    (rolling,) = lm.loglikelihood_rolling([SimpleNamespace(args=(text,))])
    pieces = [
        Continuation([256], [*text[:32].encode()]),
        Continuation([*text[31:32].encode()], [*text[32:].encode()]),
    ]
    expected = sum(one.sum for one in log_likelihoods(model(), pieces, ALONE))
    assert rolling == pytest.approx(expected, rel=1e-5)
    how = {"until": [], "max_gen_toks": 12}
    (whole,) = lm.generate_until([SimpleNamespace(args=("the", how))])
    (cut,) = lm.generate_until([SimpleNamespace(args=("the", {**how, "until": [whole[3:5]]}))])
    assert whole and cut == whole[: whole.index(whole[3:5])]


def test_texts_of_one_call_are_those_of_one_call_each() -> None:
    how = (
        {"until": "e", "max_gen_toks": 9},
        {"max_gen_toks": 5, "do_sample": True, "temperature": 0.7, "top_k": 9},
    )
    prompts = ["the", "a much longer prompt", "", "a cat", "x", "of mice and men"]
    asked = [(prompt, how[i % 2]) for i, prompt in enumerate(prompts)]
    together = generate_until(model(), BYTES, ALONE, asked)
    assert together[::2] == [generate_until(model(), BYTES, ALONE, [one])[0] for one in asked[::2]]
    assert together == generate_until(model(), BYTES, ALONE, asked) and all(together[1::2])
    assert not any("e" in text for text in together[::2])
    with pytest.raises(Interrupted):
        generate_until(model(), BYTES, ALONE, asked, poll=lambda: True)
