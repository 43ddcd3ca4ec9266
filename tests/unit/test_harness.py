"""The hand-over to EleutherAI's harness: its absence is said; where it is installed, a task of our own is scored through it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from windlass.data.tokenizer import ByteTokenizer
from windlass.errors import UserError
from windlass.evaluate.harness import _pair, adapter, run_harness
from windlass.evaluate.likelihood import Continuation, log_likelihoods
from windlass.model.build import build_model
from windlass.model.init import initialise
from windlass.parallel.env import World
from windlass.parallel.mesh import Ranks
from windlass.recipe import Recipe

ALONE = Ranks(World(), torch.device("cpu"), "single")
BYTES = ByteTokenizer()
INSTALLED = importlib.util.find_spec("lm_eval") is not None


def model():
    shape = {"layers": 1, "heads": 2, "width": 16, "context": 32, "init_std": 0.3}
    made = build_model(Recipe.model_validate({"model": shape}), 257, device="cpu")
    initialise(made, 1)
    return made.eval()


def test_a_contexts_trailing_space_belongs_to_the_ending() -> None:
    assert _pair(BYTES, [256], "Is it? ", "yes") == Continuation([*b"Is it?"], [*b" yes"])
    assert _pair(BYTES, [256], "", "yes") == Continuation([256], [*b"yes"])


@pytest.mark.skipif(INSTALLED, reason="lm-eval is installed")
def test_without_the_harness_one_sentence_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"pip install 'windlass\[lm-eval\]'"):
        run_harness("arc_easy", model(), BYTES, ALONE)


@pytest.mark.skipif(not INSTALLED, reason="lm-eval is an extra, not installed here")
@pytest.mark.filterwarnings("ignore")
def test_a_task_is_scored_through_the_harness(tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    rows = [{"q": f"Number {i} is", "choices": [" odd", " even", " a cat"], "gold": i % 2} for i in range(9)]
    (tmp_path / "rows.json").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "parity.yaml").write_text(
        "task: parity\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
        f"{tmp_path / 'rows.json'}\ntest_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: gold\ndoc_to_choice: choices\ntarget_delimiter: ''\n"
        "metric_list:\n  - metric: acc\n"
    )
    made = model()
    found = run_harness("parity", made, BYTES, ALONE, task_manager=TaskManager(include_path=str(tmp_path)))
    right = 0
    for row in rows:
        pairs = [Continuation([*row["q"].encode()], [*choice.encode()]) for choice in row["choices"]]
        scores = log_likelihoods(made, pairs, ALONE).sums
        right += scores.index(max(scores)) == row["gold"]
    assert found["parity/acc"] == pytest.approx(right / 9)


@pytest.mark.skipif(not INSTALLED, reason="lm-eval is an extra, not installed here")
def test_rolling_scores_and_texts() -> None:
    made = adapter(model(), BYTES, ALONE)
    text = "the cat sat on the mat, and then it slept until noon"
    (rolling,) = made.loglikelihood_rolling([SimpleNamespace(args=(text,))])
    pieces = [Continuation([256], [*text[:32].encode()]), Continuation([*text[31:32].encode()], [*text[32:].encode()])]
    assert rolling == pytest.approx(sum(log_likelihoods(model(), pieces, ALONE).sums), rel=1e-5)
    how = {"until": [], "max_gen_toks": 12}
    (whole,) = made.generate_until([SimpleNamespace(args=("the", how))])
    (cut,) = made.generate_until([SimpleNamespace(args=("the", {**how, "until": [whole[3:5]]}))])
    assert whole and cut == whole[: whole.index(whole[3:5])]
