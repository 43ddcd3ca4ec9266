"""A tokenizer as `transformers` reads it: `tokenizer.json` and its configuration, with the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from windlass.data.chat import Template
from windlass.data.tokenizer import Tokenizer


def save_tokenizer(tokenizer: Tokenizer, template: Template, context: int, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    inner = tokenizer.inner
    inner.save(str(directory / "tokenizer.json"))
    end = None if tokenizer.eot is None else inner.id_to_token(tokenizer.eot)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "bos_token": inner.id_to_token(tokenizer.bos[0]) if tokenizer.bos else end,
        "eos_token": end,
        "pad_token": end,
        **dict(template.special),
    }
    if template.source:
        config["chat_template"] = template.source
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
