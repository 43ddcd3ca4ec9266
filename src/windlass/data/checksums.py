"""Check the shards of a data directory by their SHA-256, each again only after it has changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.data.shards import Index, bad_shard, prepare_again
from windlass.errors import UserError
from windlass.fileio import read_json, sha256_of, write_atomic

if TYPE_CHECKING:
    from windlass.parallel.ranks import Ranks

VERIFIED = "verified.json"
# Of each file that was checked: its size, time of change (ns) and SHA-256.
States = dict[str, list[int | str]]


def verify(
    directory: Path, index: Index, tick: Callable[[float], None], ranks: Ranks | None = None
) -> None:
    """Check each file that changed since the last check; the ranks of a host divide them."""
    rank, world = (ranks.env.local_rank, ranks.env.local_world) if ranks else (0, 1)
    verified: States = read_json(directory / VERIFIED)
    states, problem = verified, ""
    while True:
        try:
            states = file_states(directory, index)
            files = [
                file for file in list(states)[rank::world] if verified.get(file) != states[file]
            ]
            with ThreadPoolExecutor(4) as pool:
                digests = pool.map(lambda file: sha256_of(directory / file), files)
                for done, (file, sha256) in enumerate(zip(files, digests, strict=True), 1):
                    if sha256 != states[file][2]:
                        remedy = prepare_again(directory)
                        raise bad_shard(directory / file, f"is damaged (SHA-256); {remedy}")
                    tick(done / len(files))
        except UserError as error:
            newest = Index.load(directory) or index
            if newest != index:  # another process has extended the directory meanwhile
                index = newest
                continue
            problem = str(error)
        break
    if ranks:
        problem = next(filter(None, ranks.all_gather_object("damaged shards", problem)), "")
    if problem:
        raise UserError(problem)
    if rank == 0 and states != verified:
        remember(directory, states)


def file_states(directory: Path, index: Index) -> States:
    """The state of each local file; UserError for a wrong size."""
    states: States = {}
    for shard in index.shards:
        for file, (size, sha256) in shard.files(index.row).items():
            path = directory / file
            if not path.is_file() or (stat := path.stat()).st_size != size:
                raise bad_shard(path, f"has not {size:,} bytes; {prepare_again(directory)}")
            states[file] = [size, stat.st_mtime_ns, sha256]
    return states


def remember(directory: Path, states: States) -> None:
    """Record that the files were checked, or written, in these states."""
    if os.access(directory, os.W_OK):
        write_atomic(directory / VERIFIED, json.dumps(states, indent=1) + "\n")
