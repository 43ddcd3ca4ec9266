"""Log-likelihoods of endings, and HellaSwag, against a plain reference of one row at a time."""

import importlib.util
import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.data.tokenizer_kinds import byte_tokenizer
from windlass.errors import UserError
from windlass.evaluation import likelihood
from windlass.evaluation.hellaswag import Item, continuations, evaluate_hellaswag, read_items
from windlass.evaluation.likelihood import Continuation, evaluate_loss
from windlass.evaluation.passes import Passes
from windlass.evaluation.suites import Suites
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.parallel.ranks import alone
from windlass.recipe import Recipe

ALONE = alone("cpu")


def gpt(vocab: int = 257, context: int = 48, seed: int = 1, **settings: Any) -> nn.Module:
    shape = {"layers": 2, "heads": 2, "width": 32, "context": context, "init_std": 0.2, **settings}
    model = build_model(Recipe.model_validate({"model": shape}), vocab, device="cpu")
    initialise(model, seed)
    return model.eval()


@torch.no_grad()
def plain(model: nn.Module, row: Continuation, context: int) -> tuple[float, int, bool]:
    """Token by token, each from all that comes before it in the window."""
    tokens = [*row.context, *row.ending][-(context + 1) :]
    count = min(len(row.ending), len(tokens) - 1)
    total, greedy = 0.0, True
    for place in range(len(tokens) - count, len(tokens)):
        logits: Tensor = model(torch.tensor([tokens[:place]]))[0, -1].double()
        total += float(logits.log_softmax(-1)[tokens[place]])
        greedy &= int(logits.argmax()) == tokens[place]
    return total, count, greedy


def rows(count: int, longest: int) -> list[Continuation]:
    random.seed(4)

    def text() -> list[int]:
        return [random.randrange(257) for _ in range(random.randrange(1, longest))]

    return [Continuation(text(), text()) for _ in range(count)]


@pytest.mark.parametrize(("tokens_per_pass", "logits"), [(1, 1), (100, 10**6), (10**6, 9)])
def test_each_row_has_the_score_of_the_plain_reference(tokens_per_pass, logits, monkeypatch):
    monkeypatch.setitem(likelihood.TOKENS_PER_PASS, "cpu", tokens_per_pass)
    monkeypatch.setattr(likelihood, "LEAST_PER_PASS", logits)
    monkeypatch.setitem(likelihood.LOGITS_PER_PASS, "cpu", logits)
    model, given = gpt(), rows(40, 40)  # some are longer than the context of 48
    greedy = model(torch.tensor([given[0].context])).argmax(-1)[0, -1:].tolist()
    given.append(Continuation(given[0].context, greedy))
    scores = likelihood.log_likelihoods(Passes(model, ALONE), given)
    assert scores[-1].greedy
    assert any(len(r.context) + len(r.ending) > 49 for r in given)
    for row, score in zip(given, scores, strict=True):
        total, *rest = plain(model, row, 48)
        assert score.sum == pytest.approx(total, abs=1e-4) and [score.tokens, score.greedy] == rest


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors; for each it would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_host_does_not_wait_for_each_row() -> None:
    model = gpt()
    with Reads() as reads:
        scores = likelihood.log_likelihoods(Passes(model, ALONE), rows(30, 20))
    assert len(scores) == 30 and reads.count == 0
    for batch in (1, 8):
        with Reads() as reads:
            evaluate_loss(Passes(model, ALONE), Eight(), batch)
        assert reads.count == 1, "the sum, at the end"


class Eight:
    """Samples of four tokens, each its own number."""

    def __len__(self) -> int:
        return 8

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = indices[:, None].repeat(4, axis=1)
        return tokens, np.ones_like(tokens)


def test_accuracies_are_those_of_the_likeliest_ending() -> None:
    """`acc_norm` is per byte of the ending, without the space before it."""
    model, tokenizer = gpt(context=64), byte_tokenizer()
    items = [
        Item(f"No {i}.", ("é" * (2 + i % 3), "abcdef"[: 1 + i % 6], "it is.", "🙂"), i % 4)
        for i in range(40)
    ]
    result = evaluate_hellaswag(Passes(model, ALONE), items, continuations(items, tokenizer))
    right = Counter()
    for item in items:
        rows = [plain(model, row, 64)[:2] for row in continuations([item], tokenizer)]
        pairs = list(zip(rows, item.endings, strict=True))
        scores = {
            "acc": [total for total, _ in rows],
            "acc_norm": [total / len(ending.encode()) for (total, _), ending in pairs],
            "acc_per_token": [total / tokens for total, tokens in rows],
        }
        for name, values in scores.items():
            right[name] += int(np.argmax(values)) == item.label
    assert len(set(right.values())) == 3, "the three differ on these items"
    expected = {name: count / len(items) for name, count in right.items()}
    assert result == expected | {"items": len(items)}


def test_items_are_read_from_lines_and_bad_ones_are_named(tmp_path: Path) -> None:
    good = {"ctx": "A man", "endings": ["a", "b", "c", "d"], "label": 2, "ind": 4}
    path = tmp_path / "h.jsonl"
    path.write_text(json.dumps(good) + "\n\n" + json.dumps({**good, "label": "1"}) + "\n")
    assert read_items(str(path)) == [Item("A man", ("a", "b", "c", "d"), label) for label in (2, 1)]
    assert len(read_items(str(path), limit=1)) == 1
    changes = ({"label": 4}, {"endings": ["a", ""]}, {"ctx": ""})
    for bad in [{"ctx": "x"}, *(good | change for change in changes)]:
        path.write_text(json.dumps(good) + "\n" + json.dumps(bad))
        with pytest.raises(UserError, match="line 2"):
            read_items(str(path))


ROWS = [
    {
        "activity_label": "Roof shingle removal",
        "ctx_a": "A man is sitting on a roof.",
        "ctx_b": "he",
        "endings": ["is using wrap.", " is ripping level tiles off.", "holds a cube.", "x [y]"],
        "label": "3",
    },
    {
        "activity_label": "Food and Entertaining",
        "ctx_a": "[header] How to eat  [title] Buy an item. [substeps] Look for it",
        "ctx_b": "[step]",
        "endings": ["[step] Cut it. [title] Eat.", "b  [z] c", "[step] d", "e"],
        "label": "0",
    },
]


def test_items_are_those_of_the_harness(tmp_path: Path) -> None:
    """Context and endings of its task `hellaswag`: activity, capital letter, no WikiHow tags."""
    file = tmp_path / "h.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    first, second = read_items(str(file))
    roof = "Roof shingle removal: A man is sitting on a roof. He"
    assert (first.context, first.label) == (roof, 3)
    assert first.endings[1] == "is ripping level tiles off."
    assert second.context == "Food and Entertaining: How to eat . Buy an item. Look for it "
    assert second.endings == (" Cut it.. Eat.", "b  c", " d", "e")
    ours = byte_tokenizer()
    for row, ending in zip(continuations([second], ours), second.endings, strict=True):
        assert ours.decode(row.context) == second.context.rstrip()  # the space goes to the ending
        assert ours.decode([*row.context, *row.ending]) == f"{second.context} {ending}"
    if importlib.util.find_spec("sacrebleu"):  # of the harness
        from lm_eval.tasks.hellaswag.utils import process_docs

        docs = process_docs(SimpleNamespace(map=lambda change: list(map(change, ROWS))))
        for item, doc in zip((first, second), docs, strict=True):
            theirs = doc["query"], tuple(doc["choices"]), doc["gold"]
            assert (item.context, item.endings, item.label) == theirs


def test_without_a_validation_set_only_the_loss_is_left_out():
    recipe = Recipe.from_dict({"eval": {"suites": ["loss", "hellaswag"]}})
    assert Suites(recipe, byte_tokenizer(), ALONE).names == ["hellaswag"]
