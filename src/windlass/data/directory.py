"""Name, lock and check the directory of a source's tokens under `data.dir`. Recipes share it if the
settings that determine the tokens are equal: its name has a hash of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data.recipe_sources import SourceSpec, members_of, root_of
from windlass.data.shards import Index, bad_shard, prepare_again
from windlass.data.tokenizer_kinds import is_learned
from windlass.errors import UserError
from windlass.fileio import LockHeld, acquire_lock, locked, read_json, sha256_of, write_atomic
from windlass.recipe import Recipe

if TYPE_CHECKING:
    from windlass.parallel.ranks import Ranks

LOCK, VERIFIED = ".lock", "verified.json"
# Of each file that was checked: its size, time of change (ns) and SHA-256.
States = dict[str, list[int | str]]


def data_dirs(recipe: Recipe) -> list[Path]:
    """The directories of all sources of a recipe, prepared or not."""
    specs = [spec for member in members_of(recipe) for spec in member.sources]
    return list(dict.fromkeys(directory_of(spec, recipe) for spec in specs))


def directory_of(spec: SourceSpec, recipe: Recipe) -> Path:
    return root_of(recipe) / f"{spec.slug}-{hash_of_key(source_key(spec, recipe))}"


def source_key(spec: SourceSpec, recipe: Recipe) -> dict[str, Any]:
    """The settings that determine the tokens of a source."""
    data = recipe.as_written.data
    key = tokenizer_key(recipe) | {"source": spec.key}
    if spec.format == "chat" and data.chat_template:
        key["chat_template"] = data.chat_template
    if spec.format == "chat" and data.chat_template_kwargs:
        key["chat_template_kwargs"] = data.chat_template_kwargs
    return key


def tokenizer_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that determine the tokenizer; a learned one depends on its sources, too."""
    data = recipe.as_written.data
    key: dict[str, Any] = {"tokenizer": recipe.as_written.tokenizer}
    if data.add_tokens:
        key["add_tokens"] = data.add_tokens
    if is_learned(data.tokenizer):
        members = members_of(recipe)
        key["train"] = [spec.key for member in members for spec in member.train]
        key["val"] = [spec.key for member in members for spec in member.val]
        if data.tokenizer == "bpe":
            key["vocab"] = data.tokenizer_vocab
            key["held_out"] = [member.held_fraction for member in members]
    return key


def hash_of_key(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]


def lock_directory(directory: Path, notify: Callable[[str], None]) -> AbstractContextManager[Any]:
    """Hold a directory's lock, which the kernel releases when the process ends."""
    try:
        return acquire_lock(directory / LOCK, seconds=1) or contextlib.nullcontext()
    except LockHeld:
        notify(f"waiting for another process that prepares or checks {directory}")
        return locked(directory / LOCK)
    except OSError as error:
        problem = f"{directory} cannot be written ({error.strerror})"
        raise UserError(f"{problem}; give another data.dir") from None


def verify(
    directory: Path, index: Index, tick: Callable[[float], None], ranks: Ranks | None = None
) -> None:
    """Check each file that changed since the last check; the ranks of a host divide them."""
    rank, world = (ranks.env.local_rank, ranks.env.local_world) if ranks else (0, 1)
    verified: States = read_json(directory / VERIFIED)
    problem = ""
    try:
        states = file_states(directory, index)
        own = [file for file in list(states)[rank::world] if verified.get(file) != states[file]]
        with ThreadPoolExecutor(4) as pool:
            digests = pool.map(lambda file: sha256_of(directory / file), own)
            for done, (file, sha256) in enumerate(zip(own, digests, strict=True), 1):
                # another process may have extended the file meanwhile
                if sha256 != states[file][2] == file_states(directory, index).get(file, [""])[-1]:
                    remedy = prepare_again(directory)
                    raise bad_shard(directory / file, f"is damaged (SHA-256); {remedy}")
                tick(done / len(own))
    except UserError as error:
        problem = str(error)
    if ranks:
        problem = next(filter(None, ranks.all_gather_object("damaged shards", problem)), "")
    if problem:
        raise UserError(problem)
    if rank == 0 and states != verified:
        remember(directory, states)


def file_states(directory: Path, index: Index) -> States:
    """The state of each local file; UserError for a wrong size."""
    states: States = {}
    newest = Index.load(directory) or index
    for shard in newest.shards:
        for file, (size, sha256) in shard.files(newest.row).items():
            path = directory / file
            if path.is_file() and (stat := path.stat()).st_size == size:
                states[file] = [size, stat.st_mtime_ns, sha256]
                continue
            if newest != (Index.load(directory) or index):
                return file_states(directory, index)
            raise bad_shard(path, f"has not {size:,} bytes; {prepare_again(directory)}")
    return states


def remember(directory: Path, states: States) -> None:
    """Record that the files were checked, or written, in these states."""
    if os.access(directory, os.W_OK):
        write_atomic(directory / VERIFIED, json.dumps(states, indent=1) + "\n")
