"""Whether runs compare: the tokenizer and the data of their evaluations, and the measure that they
have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from windlass.fileio import read_json
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.study.numbers import BITS, RunNumbers
from windlass.telemetry.measures import LOSS

# Settings that choose the tokenizer.
TOKENIZER = ("data.tokenizer", "data.tokenizer_vocab", "model.name", "model.revision")
# Settings that choose the validation data, and further ones if it is held out from `data.source`.
VALIDATION = (
    *("data.eval_source", "data.eval_split", "data.eval_size", "data.text_key"),
    *("data.format", "data.packing", "data.document_mask"),
)
HELD_OUT = ("data.source", "data.split", "data.max_tokens", "data.val_fraction", "data.val_shards")


class ValidationData(NamedTuple):
    tokenizer: str
    data: dict[str, Any]  # the settings that choose it
    tokens: int
    bytes: float | None  # of text in these tokens; None if the tokenizer cannot tell
    text: str = ""  # a hash of the validation text, equal for every tokenizer; empty: unknown


def validation_settings(recipe: Recipe) -> dict[str, Any]:
    flat = recipe.flat()
    if recipe.data.mix:  # its weights do not change the validation data
        weights = {"name", "weight"}
        flat["data.source"] = [part.model_dump(exclude=weights) for part in recipe.data.mix]
    own_split = recipe.data.eval_split and recipe.data.sources[0].startswith("hf:")
    held_out = () if recipe.data.eval_source or own_split else HELD_OUT
    return {key: flat.get(key) for key in (*VALIDATION, *held_out)}


def validation_data(run: Run, recipe: Recipe, numbers: RunNumbers) -> ValidationData | None:
    """The tokenizer and data of a run's last evaluation of the loss."""
    losses = numbers.suites.get(LOSS)
    if not losses:
        return None
    last, flat = losses[-1], recipe.flat()
    saved = read_json(run.path / "tokenizer" / "windlass.json").get("fingerprint")
    tokens, bits, size = int(last.get("tokens", 0)), last.get("bits_per_byte"), None
    if bits and math.isfinite(bits):
        size = last["loss"] * tokens / (math.log(2) * bits)
    tokenizer = str(saved or [flat.get(key) for key in TOKENIZER])
    text = numbers.start.get("data", {}).get("val", {}).get("text", "")
    return ValidationData(tokenizer, validation_settings(recipe), tokens, size, text)


def common_measure(measured: Sequence[ValidationData | None]) -> tuple[str, str]:
    """The measure that compares runs, LOSS or BITS (empty: none), and a remark unless LOSS."""
    runs = [one for one in measured if one is not None]
    keys = [k for k in HELD_OUT + VALIDATION if len({repr(one.data.get(k)) for one in runs}) > 1]
    tokens, texts = sorted({one.tokens for one in runs}), sorted({one.text for one in runs} - {""})
    several = len({one.tokenizer for one in runs}) > 1
    sizes = sorted(one.bytes for one in runs if one.bytes is not None)
    why = "The tokenizers differ, so losses per token do not compare"
    problem = ""
    if keys:
        problem = f"The runs were evaluated on different data ({', '.join(keys)})"
    elif len(texts) > 1:
        problem = f"The runs were evaluated on different texts (hashes {', '.join(texts)})"
    elif several and not all(one.text and one.bytes for one in runs):
        problem = f"{why}. Some runs lack bits per byte or the hash of their validation text"
    elif several and sizes[-1] > 1.01 * sizes[0]:
        amounts = f"{sizes[0] / 1e3:,.1f} to {sizes[-1] / 1e3:,.1f} kB"
        problem = f"{why}. Bits per byte cover {amounts} of the validation text"
        problem += " (set eval.batches = 0)"
    elif len(tokens) > 1 and not several:
        amounts = f"{tokens[0]:,} to {tokens[-1]:,} tokens"
        cause = "eval.batches x train.global_batch x model.context"
        problem = f"The runs were evaluated on {amounts} of the validation data ({cause})"
    if problem:
        return "", f"{problem}, so Windlass names no best run."
    formula = "loss / ln 2 x tokens / bytes of the validation data"
    return (BITS, f"{why}; bits per byte do ({formula}).") if several else (LOSS, "")
