"""Where a model of `transformers` came from, kept in the run: which commit, and what is needed to build it again.

`RUN/origin` holds the configuration, the code and the tokenizer's files beside a record (`origin.json`). With it and a
checkpoint a run stands alone: it is resumed, measured, sampled and exported also where its first weights are gone.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import hub
from windlass.errors import UserError
from windlass.recipe.settings import ModelSettings

if TYPE_CHECKING:
    from windlass.model.hf import HfModel

FOLDER, RECORD = "origin", "origin.json"
CONFIGURATION = ("config.json", "generation_config.json")
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip
CODE = "*.py"


def describe(model: Any) -> dict[str, str]:
    """An `HfModel`'s name, the revision asked for, the commit that it was (of the Hub), and its configuration's SHA-256."""
    if known := record(model.directory):
        return known
    config = (model.directory / "config.json").read_bytes()
    return {
        "name": model.settings.name,
        "revision": model.settings.revision,
        "commit": hub.commit_of(model.directory),
        "config_sha256": hashlib.sha256(config).hexdigest(),
    }


def keep(model: Any, run: Path) -> None:
    """Copy what a model is built from into its run, whole or not at all; once, at the run's first start."""
    folder = run / FOLDER
    if model.directory == folder or record(folder):
        return
    partial = run / f".{FOLDER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in (*CONFIGURATION, *TOKENIZER):
        if (model.directory / name).is_file():
            shutil.copyfile(model.directory / name, partial / name)
    for file in model.directory.glob(CODE):
        shutil.copyfile(file, partial / file.name)
    (partial / RECORD).write_text(json.dumps(describe(model), indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def kept(run: Path, settings: ModelSettings) -> Path | None:
    """The folder in a run that holds what its model is built from; None where there is none, or of another model."""
    known = record(run / FOLDER)
    same = known.get("name") == settings.name and known.get("revision") == settings.revision
    return run / FOLDER if known and same else None


def weights(model: HfModel) -> Path:
    """The directory with a model's first weights: beside its configuration, or where its name leads to.

    Raises:
        UserError: They are not to be had, or their configuration is not the one that the run began with.
    """
    folder = model.directory
    if not record(folder) and all((folder / file).is_file() for file in hub.weight_files(folder)):
        return folder
    origin = describe(model)
    found = hub.directory(origin["name"], origin["commit"] or origin["revision"], weights=True)
    config = found / "config.json"
    if not config.is_file() or hashlib.sha256(config.read_bytes()).hexdigest() != origin["config_sha256"]:
        raise UserError(
            f"{config} is not the configuration that this run began with, and there is no checkpoint yet: put it back, or start "
            "anew with --fresh"
        )
    return found


def record(folder: Path) -> dict[str, Any]:
    """What `describe` said of the model that a folder was kept of; empty where it is no such folder."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
