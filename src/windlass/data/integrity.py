"""Checks of the files of a data directory: always their sizes, and the SHA-256 of each file once for
each of its states."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.data.shards import Index, bad_shard, prepare_again
from windlass.data.sources import sha256_of
from windlass.errors import UserError
from windlass.fileio import read_json, write_atomic

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks

VERIFIED = "verified.json"


def file_states(directory: Path, index: Index) -> dict[str, list[int | str]]:
    """Size, time of change (ns) and SHA-256 of each local file; UserError for a wrong size."""
    states: dict[str, list[int | str]] = {}
    for shard in index.shards:
        for file, (size, sha256) in {} if shard.is_remote else shard.files(index.row).items():
            path, remedy = directory / file, prepare_again(directory)
            try:
                stat = path.stat()
            except OSError:
                raise bad_shard(path, f"is missing; {remedy}") from None
            if stat.st_size != size:
                raise bad_shard(path, f"has {stat.st_size:,} bytes, not {size:,}; {remedy}")
            states[file] = [stat.st_size, stat.st_mtime_ns, sha256]
    return states


def newest_states(directory: Path, index: Index) -> dict[str, list[int | str]]:
    """As `file_states`, by the newest index: another process may extend the last shard meanwhile,
    and the new shard begins with the tokens of the old one."""
    while True:
        newest = Index.load(directory) or index
        try:
            return file_states(directory, newest)
        except UserError:
            if newest == (Index.load(directory) or index):
                raise


def verify(
    directory: Path, index: Index, tick: Callable[[float], None], ranks: Ranks | None = None
) -> None:
    """Check every shard as `file_states`, and its SHA-256 if it changed since the last check.

    The ranks of a host divide the files, because each host may have its own copy. `tick` gets the
    fraction of this rank's files that is read. UserError on every rank if a shard is damaged.
    """
    states, verified = newest_states(directory, index), read_json(directory / VERIFIED)
    changed = {file: state[2] for file, state in states.items() if verified.get(file) != state}
    rank, world = 0, 1
    if ranks is not None and ranks.world > 1:
        rank, world = ranks.env.local_rank, ranks.env.local_world
        # A late rank may read what another has remembered: all use the first local rank's list.
        lists = ranks.all_gather_object("changed shards", [ranks.env.node, rank, changed])
        if not any(files for _, _, files in lists):
            return
        first = (ranks.env.node, 0)
        changed = next((files for node, r, files in lists if (node, r) == first), changed)
    own, damaged = list(changed)[rank::world], list[Path]()
    with ThreadPoolExecutor(4) as pool:
        digests = pool.map(lambda file: sha256_of(directory / file), own)
        for done, (file, sha256) in enumerate(zip(own, digests, strict=True), 1):
            if sha256 != changed[file] == newest_states(directory, index).get(file, [""])[-1]:
                damaged.append(directory / file)
                break
            tick(done / len(own))
    if world > 1 and ranks is not None:
        damaged = [p for part in ranks.all_gather_object("damaged shards", damaged) for p in part]
    if damaged:
        raise bad_shard(damaged[0], f"is damaged (SHA-256); {prepare_again(directory)}")
    if changed and rank == 0:
        remember(directory, states)


def remember(directory: Path, states: dict[str, list[int | str]]) -> None:
    """Store the states of verified files; in a read-only directory each start verifies."""
    if os.access(directory, os.W_OK):
        write_atomic(directory / VERIFIED, json.dumps(states, indent=1) + "\n")
