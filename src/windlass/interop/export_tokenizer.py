"""Our tokenizers as a `tokenizer.json`, which `transformers` and the `tokenizers` library read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from windlass.data import bpe
from windlass.data.chat import Template
from windlass.data.tokenizer import END_OF_TEXT, ByteTokenizer, CharTokenizer, Tokenizer
from windlass.errors import UserError


def save_tokenizer(tokenizer: Tokenizer, template: Template, context: int, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; raises UserError for a tokenizer of the user's own."""
    inner = as_json(tokenizer)
    inner.save(str(directory / "tokenizer.json"))
    end = None if tokenizer.eot is None else inner.id_to_token(tokenizer.eot)
    start = getattr(tokenizer, "start", ())
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "bos_token": inner.id_to_token(start[0]) if start else end,
        "eos_token": end,
        "pad_token": end,
        **dict(template.special),
    }
    if template.source:
        config["chat_template"] = template.source
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def as_json(tokenizer: Tokenizer) -> Any:
    """The tokenizer as an object of the `tokenizers` library that gives the same ids."""
    from tokenizers import AddedToken

    if isinstance(tokenizer, bpe.JsonTokenizer):
        return tokenizer._inner
    if isinstance(tokenizer, bpe.Gpt2Tokenizer):
        made = _gpt2(tokenizer)
    elif isinstance(tokenizer, ByteTokenizer):
        made = _bytes()
    elif isinstance(tokenizer, CharTokenizer):
        made = _characters(tokenizer)
    else:
        raise UserError(f"a tokenizer of the kind {type(tokenizer).__name__} cannot be exported")
    if tokenizer.eot is not None:
        made.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
        assert made.token_to_id(END_OF_TEXT) == tokenizer.eot
    return made


def _bytes() -> Any:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    letters = bpe._byte_letters()
    made = Inner(models.BPE(vocab=dict(letters), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def _gpt2(tokenizer: bpe.Gpt2Tokenizer) -> Any:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    letters = {b: c for c, b in bpe._byte_letters().items()}
    ranks = tokenizer._ranks

    def spelled(piece: bytes) -> str:
        return "".join(letters[b] for b in piece)

    merges: list[tuple[str, str]] = []
    for piece in sorted(ranks, key=ranks.__getitem__):
        if len(piece) > 1:
            first, second = _halves(piece, ranks)
            merges.append((spelled(first), spelled(second)))
    made = Inner(models.BPE(vocab={spelled(piece): i for piece, i in ranks.items()}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _halves(piece: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two pieces that were merged into this one: what is left of it when only earlier merges are made."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def _characters(tokenizer: CharTokenizer) -> Any:
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    made = Inner(
        models.WordLevel(vocab={c: i for i, c in enumerate(tokenizer.characters)}, unk_token=tokenizer.characters[0])
    )
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    made.decoder = decoders.Fuse()
    return made
