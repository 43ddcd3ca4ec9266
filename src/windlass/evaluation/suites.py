"""The suites that a recipe can ask for besides the loss, by name: what each needs is read here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data.squad import HUB_NAME as SQUAD_HUB
from windlass.data.squad import asked_source
from windlass.errors import UserError
from windlass.evaluation.hellaswag import HUB_NAME as HELLASWAG_HUB
from windlass.parallel.parallelize import resolve_precision
from windlass.recipe.settings import HELLASWAG_SUITE, LOSS_SUITE, SQUAD_SUITE

if TYPE_CHECKING:
    import torch

    from windlass.data.tokenizer import Tokenizer
    from windlass.parallel.dist import Ranks
    from windlass.recipe import Recipe

HARNESS = "lm-eval:"


def run_suite(
    suite: str,
    model: Any,
    tokenizer: Tokenizer,
    recipe: Recipe,
    ranks: Ranks,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    poll: Callable[[], bool] | None = None,
    keep: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Measure one of `hellaswag`, `squad` and `lm-eval:TASKS`; all ranks call it together.

    Args:
        suite: Its name.
        model: The model, wrapped or bare.
        tokenizer: Its tokenizer.
        recipe: the section `eval` (`hellaswag_file`, `squad_items`, ...) and the section `data` say what is measured on.
        ranks: The process group.
        autocast: Makes the context of the forward pass's arithmetic.
        poll: Asked between passes whether to stop.
        keep: Gets what is worth a file of its own: `predictions` of SQuAD.

    Returns:
        The fields of an `eval` line; None where `poll` cut it short.
    """
    if suite == HELLASWAG_SUITE:
        from windlass.evaluation.hellaswag import evaluate_hellaswag, read_items

        items = read_items(recipe.eval.hellaswag_file, recipe.eval.hellaswag_items)
        return evaluate_hellaswag(model, tokenizer, items, ranks, autocast=autocast, poll=poll)
    if suite == SQUAD_SUITE:
        from windlass.data.squad import eval_questions
        from windlass.evaluation.squad import evaluate_squad

        measured = evaluate_squad(model, tokenizer, eval_questions(recipe), ranks, autocast=autocast, poll=poll)
        if measured is None:
            return None
        if keep is not None:
            keep["predictions"] = measured[1]
        return measured[0]
    if suite.startswith(HARNESS):
        from windlass.evaluation.lm_eval import run_harness

        return run_harness(suite.removeprefix(HARNESS), model, tokenizer, ranks, autocast=autocast, poll=poll)
    raise UserError(f"there is no suite {suite!r}; there are loss, hellaswag, squad and lm-eval:TASKS")


CHOSEN = ("data.eval_size", "run.seed")
HELD_OUT = ("data.source", "data.eval_source", "data.val_fraction")
SETTINGS = {
    LOSS_SUITE: (*HELD_OUT, *CHOSEN, "eval.batches", "train.global_batch"),
    HELLASWAG_SUITE: ("eval.hellaswag_file", "eval.hellaswag_items"),
    SQUAD_SUITE: (*HELD_OUT, *CHOSEN, "eval.squad_file", "eval.squad_items"),
}
"""What says which items a suite is measured on."""


def measured_on(suite: str, recipe: Recipe, device: torch.device, fingerprint: str = "") -> dict[str, Any]:
    """What the numbers of a suite depend on besides the model.

    Args:
        suite: Its name.
        recipe: The recipe that it was measured with.
        device: Where.
        fingerprint: Of the validation loss: that of the prepared data.

    Returns:
        `settings` (key → value; the precision is the one used), and, as the suite has them, `files` (path → SHA-256), `hub` (the
        data set's name there), `data` (the prepared data's fingerprint), `lm_eval` (the harness's version).
    """
    keys = ("model.context", *SETTINGS.get(suite, ()))
    settings = {
        key: getattr(getattr(recipe, section), name) for key in keys for section, _, name in [key.partition(".")]
    }
    found: dict[str, Any] = {
        "settings": {"train.precision": resolve_precision(recipe.train.precision, device), **settings}
    }
    if suite == LOSS_SUITE:
        return {**found, "data": fingerprint}
    if suite.startswith(HARNESS):
        return {**found, "lm_eval": metadata.version("lm_eval")}
    if suite == HELLASWAG_SUITE:
        return found | _place(recipe.eval.hellaswag_file, HELLASWAG_HUB)
    return found | _place((asked_source(recipe) or recipe.data.source).partition(":")[2], SQUAD_HUB)


def _place(file: str, hub: str) -> dict[str, Any]:
    if not file:
        return {"hub": hub}
    with Path(file).open("rb") as content:
        return {"files": {file: hashlib.file_digest(content, "sha256").hexdigest()}}


def merged(before: Mapping[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The record of a step with new results added to those that it has.

    A suite that was measured on something else, or on another model, is not lost: it goes to `earlier`.

    Args:
        before: The record as it was, empty where there is none.
        now: `model`, `step`, `results` (suite → numbers) and `measured` (suite → `measured_on`).
    """
    same_model = before.get("model") == now["model"]
    results, measured = dict(now["results"]), dict(now["measured"])
    old = []
    for suite, numbers in before.get("results", {}).items():
        on = before.get("measured", {}).get(suite)
        if same_model and suite not in results:
            results[suite] = numbers
            if on is not None:
                measured[suite] = on
        else:
            old.append({"model": before.get("model"), "suite": suite, "results": numbers, "measured": on})
    current = {(now["model"], suite): on for suite, on in measured.items()}
    earlier = [
        one
        for one in [*before.get("earlier", ()), *old]
        if current.get((one["model"], one["suite"])) != one["measured"]
    ]
    # Of two that were measured on the same the newer one counts.
    kept = [one for i, one in enumerate(earlier) if not any(_same(one, later) for later in earlier[i + 1 :])]
    return {**now, "results": results, "measured": measured, **({"earlier": kept} if kept else {})}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("model", "suite", "measured"))
