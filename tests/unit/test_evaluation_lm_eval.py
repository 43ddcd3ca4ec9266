"""EleutherAI's harness: a task of our own, and the adapter without the harness."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "dist"))

from harness import Join, recipe, run_ranks

import tokenizer_fixtures
from helpers import refused
from windlass.data.chat import Template, prompt_tokens, rendered_tokens
from windlass.data.tokenizer_kinds import byte_tokenizer, hf_tokenizer
from windlass.errors import UserError
from windlass.evaluation.harness import adapter, generate_until, run_harness
from windlass.evaluation.likelihood import Continuation, log_likelihoods
from windlass.evaluation.passes import Interrupted, Passes
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.parallel.parallelize import parallelize
from windlass.parallel.ranks import alone
from windlass.recipe import Recipe
from windlass.recipe.settings import EvalSettings

ALONE = alone("cpu")
DEFAULT = EvalSettings()
BYTES = byte_tokenizer()
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is an extra, not installed here"
)
pytestmark = pytest.mark.filterwarnings("ignore")
SHAPE = {"layers": 1, "heads": 2, "width": 16, "context": 32, "init_std": 0.3}


def model(device: str = "cpu") -> Any:
    """A small GPT; with weights where the device has any."""
    gpt = build_model(Recipe.model_validate({"model": SHAPE}), 257, device=device)
    if device == "cpu":
        initialise(gpt, 1)
    return gpt.eval()


def passes_of(ranks: Any = ALONE, tokenizer: Any = BYTES, **more: Any) -> Passes:
    return Passes(model(), ranks, tokenizer, **more)


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
        return run_harness(Passes(gpt, ranks, BYTES), "parity", DEFAULT, manager)


@pytest.mark.dist
@needs_harness
def test_a_task_has_the_same_scores_on_one_rank_and_on_two_of_a_sharded_model(tmp_path):
    passes, right = passes_of(), 0
    numbers = run_harness(passes, "parity", DEFAULT, parity(tmp_path / "alone"))
    for row in ROWS:
        question, choices = row["q"].encode(), [choice.encode() for choice in row["choices"]]
        pairs = [Continuation([*question], [*choice]) for choice in choices]
        scores = [one.sum for one in log_likelihoods(passes, pairs)]
        right += scores.index(max(scores)) == row["gold"]
    assert numbers["parity/acc"] == pytest.approx(right / 9) and not passes.model.training
    for one in run_ranks(on_a_rank, 2, tmp_path):
        assert one["parity/acc"] == numbers["parity/acc"]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for the harness, which calls the adapter as in the list."""
    calls: list[Any] = []

    def simple_evaluate(model: Any, tasks: list[str], **_: Any) -> dict[str, Any]:
        if tasks == ["unknown"]:
            raise KeyError("unknown")
        metrics = {f"{i},none": call(model) for i, call in enumerate(calls)}
        return {"results": {"task": metrics | {"alias": "task"}}}

    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=simple_evaluate))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", SimpleNamespace(TemplateLM=Scorer))  # type: ignore[arg-type]
    return calls


class Scorer:
    """What the adapter inherits from the harness: it cuts a request into tokens."""

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        pairs = [request.args for request in requests]
        cut = [(BYTES.prompt(text), BYTES.encode(end).tolist()) for text, end in pairs]
        rows = [(pair, *row) for pair, row in zip(pairs, cut, strict=True)]
        return self._loglikelihood_tokens(rows)  # type: ignore[attr-defined]


def test_a_stop_cuts_the_harness_short(harness):
    harness.append(lambda lm: lm.loglikelihood([SimpleNamespace(args=("Is it?", " yes"))])[0][0])
    score = Continuation([*b"Is it?"], [*b" yes"])
    with pytest.raises(Interrupted):
        run_harness(passes_of(poll=lambda: True), "task", DEFAULT)
    numbers = run_harness(passes_of(poll=lambda: False), "task", DEFAULT)
    assert numbers == {"task/0": log_likelihoods(passes_of(), [score])[0].sum}
    with pytest.raises(UserError, match="unknown"):
        run_harness(passes_of(), "unknown", DEFAULT)


def test_a_text_ends_before_a_stop_text(harness: list[Any]) -> None:
    passes, how = passes_of(), {"until": [], "max_gen_toks": 12}
    lm = adapter(passes)
    (whole,) = lm.generate_until([SimpleNamespace(args=("the", how))])
    (cut,) = lm.generate_until([SimpleNamespace(args=("the", {**how, "until": [whole[3:5]]}))])
    assert whole and cut == whole[: whole.index(whole[3:5])]
    passes.stop = BYTES.ends | {ord(whole[3])}
    (cut,) = generate_until(passes, [("the", how)], BYTES.prompt)
    assert cut == whole[: whole.index(whole[3])], "and before each token of stop"


@needs_harness
def test_rolling_scores() -> None:
    lm = adapter(passes_of())
    text = "the cat sat on the mat, and then it slept until noon"
    (rolling,) = lm.loglikelihood_rolling([SimpleNamespace(args=(text,))])
    pieces = [
        Continuation([256], [*text[:32].encode()]),
        Continuation([*text[19:32].encode()], [*text[32:].encode()]),
    ]
    expected = sum(one.sum for one in log_likelihoods(passes_of(), pieces))
    assert rolling == pytest.approx(expected, rel=1e-5)


def test_texts_of_one_call_are_those_of_one_call_each() -> None:
    how = (
        {"until": "e", "max_gen_toks": 9},
        {"max_gen_toks": 5, "do_sample": True, "temperature": 0.7, "top_k": 9},
    )
    prompts = ["the", "a much longer prompt", "", "a cat", "x", "of mice and men"]
    asked = [(prompt, how[i % 2]) for i, prompt in enumerate(prompts)]
    together = generate_until(passes_of(), asked, BYTES.prompt)
    apart = [generate_until(passes_of(), [one], BYTES.prompt)[0] for one in asked[::2]]
    assert together[::2] == apart and all(together[1::2])
    assert together == generate_until(passes_of(), asked, BYTES.prompt)
    assert not any("e" in text for text in together[::2])
    with pytest.raises(Interrupted):
        generate_until(passes_of(poll=lambda: True), asked, BYTES.prompt)


@needs_harness
def test_settings_reach_the_harness_and_its_tasks(tmp_path: Path, monkeypatch: Any) -> None:
    from windlass.evaluation import harness

    parity(tmp_path)
    folder = tokenizer_fixtures.save("chatml", tmp_path / "tokenizer")
    tokenizer, template = hf_tokenizer(str(folder)), Template.of_directory(folder)
    rows = list[Continuation]()

    def scores(_: Any, asked: list[Continuation]) -> list[Any]:
        rows.extend(asked)
        return [SimpleNamespace(sum=-float(i % 3), greedy=False) for i in range(len(asked))]

    monkeypatch.setattr(harness, "log_likelihoods", scores)
    own = {"lm_eval_tasks": str(tmp_path), "lm_eval_limit": 2, "lm_eval_few_shot": 0}
    settings = EvalSettings.model_validate(own | {"lm_eval_chat": True})
    passes = passes_of(tokenizer=tokenizer, template=template)
    assert run_harness(passes, "parity", settings) == {"parity/acc": 0.5}
    assert len(rows) == 6  # three endings each
    from transformers import AutoTokenizer

    whole = AutoTokenizer.from_pretrained(folder)
    for row, item in zip(rows[::3], ROWS, strict=False):
        talk = [{"role": "user", "content": item["q"]}]
        asked = whole.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
        text = whole.decode([*row.context, *row.ending])
        assert [*row.context, *row.ending][: len(asked)] == asked, text
    with refused("eval.lm_eval_tasks", "nowhere"):
        missing = settings.model_copy(update={"lm_eval_tasks": "nowhere"})
        run_harness(passes, "parity", missing)


def test_a_conversation_is_asked_in_the_tokens_of_its_template(
    tmp_path: Path, harness: list[Any]
) -> None:
    """The text of a special token in a message stays text."""
    folder = tokenizer_fixtures.save("chatml", tmp_path)
    tokenizer, template = hf_tokenizer(str(folder)), Template.of_directory(folder)
    lm = adapter(passes_of(tokenizer=tokenizer, template=template), chat=True)
    talk = [{"role": "user", "content": "the <|im_end|> cat"}]
    text, wanted = lm.apply_chat_template(talk), prompt_tokens(talk, template, tokenizer)
    assert rendered_tokens(text, tokenizer) == wanted


REQUESTS = [
    ("Who are you? I am", " a cat."),
    ("The cat sat on the mat, and ", "the dog ran"),
    ("Question: 3 + 4?\nAnswer:", " seven"),
    ("naïve façade\n\n", "über"),
    ("the ca", "t and the dog"),  # the last token of the context changes
    ("", "Hello world"),
]


@needs_harness
@pytest.mark.parametrize("kind", ["gpt2", *tokenizer_fixtures.KINDS])
def test_texts_have_the_tokens_that_the_harness_gives_them(kind, tmp_path, data_files, monkeypatch):
    """As the harness's own model of `transformers` encodes requests, with BOS if it writes one."""
    from lm_eval.api.model import CacheHook
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if kind == "gpt2":
        file = str(data_files / "gpt2" / "gpt2-tokenizer.json")
        end = "<|endoftext|>"
        whole = PreTrainedTokenizerFast(tokenizer_file=file, bos_token=end, eos_token=end)
        ours = hf_tokenizer(file)
    else:
        place = tokenizer_fixtures.save(kind, tmp_path)
        whole = AutoTokenizer.from_pretrained(place)
        (place / "config.json").write_text(json.dumps({"bos_token_id": whole.bos_token_id}))
        ours = hf_tokenizer(str(place))
    asked, window = list[Any](), 24

    class Reference(HFLM):
        def __init__(self) -> None:
            self.tokenizer, self.backend, self.add_bos_token = whole, "causal", None
            self.custom_prefix_token_id, self.batch_size_per_gpu = None, 1
            self._max_length, self._rank, self._world_size = window, 0, 1
            self.cache_hook, self.enable_thinking = CacheHook(None), None

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            asked.extend((context, ending) for _, context, ending in requests)
            return [(0.0, True)] * len(requests)

    seen = list[Any]()

    def record(_: Any, rows: list[Continuation]) -> list[Any]:
        seen.extend((list(row.context), list(row.ending)) for row in rows)
        return [SimpleNamespace(sum=0.0, greedy=True) for _ in rows]

    monkeypatch.setattr("windlass.evaluation.harness.log_likelihoods", record)
    lm = adapter(Passes(SimpleNamespace(context=window), ALONE, ours))
    pairs = [SimpleNamespace(args=pair) for pair in REQUESTS]
    texts = [SimpleNamespace(args=(a + b,)) for a, b in REQUESTS]
    texts.append(SimpleNamespace(args=(tokenizer_fixtures.TEXT,)))
    for one in (lm, Reference()):
        one.loglikelihood(pairs, disable_tqdm=True)
        one.loglikelihood_rolling(texts, disable_tqdm=True)
    assert len(seen) > len(REQUESTS) * 2 and seen == asked
