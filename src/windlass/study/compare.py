"""Whether the validation losses of several runs can be compared, and by which number.

A loss in nats per token depends on the tokenizer: where tokenizers differ, bits per byte of text are compared. Losses on
other data, or on another part of it, are not compared at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from windlass.checkpoint.retention import LOSS
from windlass.fileio import read_json
from windlass.recipe import Recipe
from windlass.run import Line, Run, last_start

BITS = "loss.bits_per_byte"  # as `checkpoint.best` would name it: the suite, and the field of its `eval` line
TOKENIZER = (
    "data.tokenizer",
    "data.tokenizer_vocab",
    "model.name",
    "model.revision",
)  # settings that choose it
HELD_OUT = (
    "data.source",
    "data.split",
    "data.max_documents",
    "data.max_tokens",
    "data.val_fraction",
    "data.val_shards",
)
"""With `VALIDATION` the settings that choose the validation data, where they are held out from `data.source`."""
VALIDATION = (
    "data.eval_source",
    "data.eval_split",
    "data.eval_size",
    "data.text_key",
    "data.format",
    "data.packing",
)


class Evaluated(NamedTuple):
    """What the validation loss of a run was measured on."""

    tokenizer: str
    data: dict[str, Any]  # the settings that choose it
    tokens: int
    bytes: float | None  # of text in these tokens; None where the tokenizer cannot tell
    text: str = (
        ""  # a hash of the whole validation text, equal for every tokenizer; empty: not known
    )


def evaluated(run: Run, recipe: Recipe, lines: Sequence[Line]) -> Evaluated | None:
    """What the last evaluation of the loss was measured on, by the run's recipe, tokenizer and effective ledger."""
    last = next(
        (x for x in reversed(lines) if x["kind"] == "eval" and x.get("suite", LOSS) == LOSS), None
    )
    if last is None:
        return None
    flat, bits = recipe.flat(), last.get("bits_per_byte")
    saved = read_json(run.path / "tokenizer" / "windlass.json").get("fingerprint")
    own_split = recipe.data.eval_split and recipe.data.sources[0].startswith("hf:")
    held_out = () if recipe.data.eval_source or own_split else HELD_OUT
    tokens = int(last.get("tokens", 0))
    size = (
        float(last["loss"]) * tokens / (math.log(2) * float(bits))
        if bits and math.isfinite(float(bits))
        else None
    )
    name = str(saved or [flat.get(key) for key in TOKENIZER])
    text = last_start(lines).get("data", {}).get("val", {}).get("text", "")
    return Evaluated(
        name, {key: flat.get(key) for key in (*held_out, *VALIDATION)}, tokens, size, text
    )


def common_measure(measured: Sequence[Evaluated | None]) -> tuple[str, str]:
    """By what runs are compared, `loss` or `BITS` (empty: they cannot be compared), and a sentence that says why.

    The sentence is empty where the losses are equal in kind. Runs without an evaluation are left out.
    """
    runs = [one for one in measured if one is not None]
    keys = [
        key for key in HELD_OUT + VALIDATION if len({repr(one.data.get(key)) for one in runs}) > 1
    ]
    tokens = sorted({one.tokens for one in runs})
    sizes = sorted(one.bytes for one in runs if one.bytes is not None)
    if keys:
        return (
            "",
            f"The runs were evaluated on different data ({', '.join(keys)}): no best is named.",
        )
    if len(texts := sorted({one.text for one in runs} - {""})) > 1:
        return (
            "",
            f"The runs were evaluated on different validation texts (hashes {', '.join(texts)}): no best is named.",
        )
    if len({one.tokenizer for one in runs}) < 2:
        if len(tokens) < 2:
            return LOSS, ""
        amounts = f"{tokens[0]:,} to {tokens[-1]:,} tokens (eval.batches x train.global_batch x model.context)"
        return (
            "",
            f"The runs were evaluated on different amounts of the validation data, {amounts}: no best is named.",
        )
    text = "The tokenizers differ, so that losses per token cannot be compared"
    if len(sizes) < len(runs):
        return "", f"{text}, and not every run has its bits per byte: no best is named."
    if not all(one.text for one in runs):
        return (
            "",
            f"{text}, and it is not known whether all runs have the same validation text: no best is named.",
        )
    if sizes[-1] > 1.01 * sizes[0]:
        amounts = f"{sizes[0] / 1e3:,.1f} to {sizes[-1] / 1e3:,.1f} kB"
        return (
            "",
            f"{text}. Bits per byte were measured on {amounts} of the validation text; set eval.batches = 0: no best is named.",
        )
    return BITS, f"{text}: bits per byte are (loss / ln 2 x tokens / bytes of the validation data)."
