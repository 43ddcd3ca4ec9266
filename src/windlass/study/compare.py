"""Whether the validation losses of several runs compare, and by which number.

A loss in nats per token depends on the tokenizer, so runs with different tokenizers are compared by
bits per byte of text. Losses on different data, or on different parts of it, do not compare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from windlass.checkpoint.retention import LOSS
from windlass.fileio import read_json
from windlass.recipe import Recipe
from windlass.run import Line, Run, last_start

BITS = "loss.bits_per_byte"  # as in `checkpoint.best`: the suite, and the field of its `eval` line
# Settings that choose the tokenizer.
TOKENIZER = ("data.tokenizer", "data.tokenizer_vocab", "model.name", "model.revision")
# Settings that choose the validation data, and further ones if it is held out from `data.source`.
VALIDATION = tuple(
    f"data.{name}"
    for name in ("eval_source", "eval_split", "eval_size", "text_key", "format", "packing")
)
HELD_OUT = tuple(
    f"data.{name}"
    for name in ("source", "split", "max_documents", "max_tokens", "val_fraction", "val_shards")
)


class Evaluated(NamedTuple):
    """The tokenizer and data of a run's validation loss."""

    tokenizer: str
    data: dict[str, Any]  # the settings that choose it
    tokens: int
    bytes: float | None  # of text in these tokens; None if the tokenizer cannot tell
    text: str = ""  # a hash of the validation text, equal for every tokenizer; empty: unknown


def evaluated(run: Run, recipe: Recipe, lines: Sequence[Line]) -> Evaluated | None:
    """The tokenizer and data of the last evaluation of the loss, from a run's effective ledger."""
    losses = [x for x in lines if x["kind"] == "eval" and x.get("suite", LOSS) == LOSS]
    if not losses:
        return None
    last, flat = losses[-1], recipe.flat()
    saved = read_json(run.path / "tokenizer" / "windlass.json").get("fingerprint")
    own_split = recipe.data.eval_split and recipe.data.sources[0].startswith("hf:")
    held_out = () if recipe.data.eval_source or own_split else HELD_OUT
    tokens, bits, size = int(last.get("tokens", 0)), last.get("bits_per_byte"), None
    if bits and math.isfinite(bits):
        size = last["loss"] * tokens / (math.log(2) * bits)
    tokenizer = str(saved or [flat.get(key) for key in TOKENIZER])
    text = last_start(lines).get("data", {}).get("val", {}).get("text", "")
    data = {key: flat.get(key) for key in (*held_out, *VALIDATION)}
    return Evaluated(tokenizer, data, tokens, size, text)


def common_measure(measured: Sequence[Evaluated | None]) -> tuple[str, str]:
    """The measure that compares runs, LOSS or BITS (empty: none), and a sentence that says why.

    The sentence is empty if the losses compare. Runs without an evaluation are left out.
    """
    runs = [one for one in measured if one is not None]
    keys = [k for k in HELD_OUT + VALIDATION if len({repr(one.data.get(k)) for one in runs}) > 1]
    tokens, texts = sorted({one.tokens for one in runs}), sorted({one.text for one in runs} - {""})
    problem = ""
    if keys:
        problem = f"The runs were evaluated on different data ({', '.join(keys)})"
    elif len(texts) > 1:
        problem = f"The runs were evaluated on different texts (hashes {', '.join(texts)})"
    elif len({one.tokenizer for one in runs}) > 1:
        return _common_bits(runs)
    elif len(tokens) > 1:
        amounts = f"{tokens[0]:,} to {tokens[-1]:,} tokens"
        cause = "eval.batches x train.global_batch x model.context"
        problem = f"The runs were evaluated on {amounts} of the validation data ({cause})"
    return ("", f"{problem}, so there is no best run.") if problem else (LOSS, "")


def _common_bits(runs: Sequence[Evaluated]) -> tuple[str, str]:
    """The result of `common_measure` for runs with different tokenizers."""
    why = "The tokenizers differ, so losses per token do not compare"
    sizes = sorted(one.bytes for one in runs if one.bytes is not None)
    problem = ""
    if len(sizes) < len(runs):
        problem = "Some runs lack their bits per byte"
    elif not all(one.text for one in runs):
        problem = "It is not known whether all runs have the same validation text"
    elif sizes[-1] > 1.01 * sizes[0]:
        amounts = f"{sizes[0] / 1e3:,.1f} to {sizes[-1] / 1e3:,.1f} kB"
        problem = f"Bits per byte cover {amounts} of the validation text (set eval.batches = 0)"
    if problem:
        return "", f"{why}. {problem}, so there is no best run."
    formula = "loss / ln 2 x tokens / bytes of the validation data"
    return BITS, f"{why}; bits per byte do ({formula})."
