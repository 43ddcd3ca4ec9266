"""The suites that a recipe can ask for besides the loss, by name: what each needs is read here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from windlass.errors import UserError
from windlass.recipe.settings import HELLASWAG_SUITE, SQUAD_SUITE

if TYPE_CHECKING:
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
