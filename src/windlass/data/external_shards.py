"""Check and index the token shards that other tools wrote: nanoGPT, build-nanogpt, llm.c, Megatron.
Windlass does not copy them.
"""

from __future__ import annotations

import hashlib
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from windlass.data.files import local_files
from windlass.data.progress import Progress
from windlass.data.recipe_sources import SourceSpec
from windlass.data.remote import RemoteFile, list_urls
from windlass.data.shards import (
    CACHE,
    Index,
    LocalFile,
    Shard,
    bad_shard,
    check_ids,
    smallest_dtype,
)
from windlass.errors import first_line

BLOCK_TOKENS = 1 << 21
LLMC_HEADER_BYTES = 1024
TYPES = {"uint16": "<u2", "uint32": "<u4"}
LLMC_TYPES = {20240520: "<u2", 20240801: "<u4"}  # by magic number: GPT-2's tokens, Llama 3's
# Megatron's `.idx`: 9 bytes, the version (8 bytes), then the code of the type of the `.bin` beside.
MEGATRON, MEGATRON_TYPES = b"MMIDIDX\x00\x00", {8: "<u2", 4: "<u4"}


def index_shards(
    spec: SourceSpec, directory: Path, index: Index, workers: int, progress: Progress
) -> Index:
    """Check the shards of a source `shards:...`; returns the index as written."""
    is_remote = "://" in spec.path
    places = list_urls(spec.path) if is_remote else [str(path) for path in local_files(spec)[0]]
    with ThreadPoolExecutor(workers or None) as pool:
        for shard in pool.map(lambda place: _checked(spec, directory, index, place), places):
            index.shards.append(shard)
            progress.update(f"checking {spec.name}", len(index.shards) / len(places))
    index.complete = True
    index.save(directory)
    return index


def _checked(spec: SourceSpec, directory: Path, index: Index, place: str) -> Shard:
    """A shard, after a check of all ids; of a URL only the first ones are checked."""
    file: LocalFile | RemoteFile
    is_remote, vocab = "://" in place, index.tokenizer.vocab
    if is_remote:
        file = RemoteFile(place, directory.parent / CACHE, spec.cache_bytes)
    else:
        file = LocalFile(Path(place))
    known, offset, tokens = _header(place, file)
    assumed = TYPES.get(spec.shards_dtype) or smallest_dtype(vocab)
    dtype = np.dtype(known or assumed)
    if tokens is None:
        tokens = file.size // dtype.itemsize
    if not tokens or file.size != offset + tokens * dtype.itemsize:
        content = f"{file.size:,} bytes for {tokens:,} tokens of {dtype.name}"
        raise bad_shard(place, f"is truncated or not a shard: {content}")
    digest = hashlib.sha256(file.pread(offset, 0))
    odd_ids_are_0 = not known and dtype.itemsize == 2 and tokens > 1
    for done in range(0, BLOCK_TOKENS if is_remote else tokens, BLOCK_TOKENS):
        size = min(BLOCK_TOKENS, tokens - done) * dtype.itemsize
        raw = file.pread(size, offset + done * dtype.itemsize)
        digest.update(raw)
        ids = np.frombuffer(raw, dtype)
        check_ids(place, ids, vocab, done)
        odd_ids_are_0 = odd_ids_are_0 and not ids[1::2].any()
    if odd_ids_are_0:
        remedy = 'set data.shards_dtype="uint32"'
        raise bad_shard(place, f"has 32-bit ids: every second 16 bits are 0; {remedy}")
    content = digest.hexdigest()
    if isinstance(file, RemoteFile):
        content = file.version
    elif Path(spec.name.partition(":")[2]).expanduser().is_absolute():
        place = os.path.abspath(place)
    else:  # A project that moves takes both directories with it.
        place = os.path.relpath(place, directory)
    return Shard(file=place, tokens=tokens, sha256=content, dtype=dtype.str, offset=offset)


def _header(place: str, file: LocalFile | RemoteFile) -> tuple[str, int, int | None]:
    """The type of the ids, the bytes before them, and their number; '' and None if unknown."""
    path = Path(place.partition("?")[0] if "://" in place else place)
    head = file.pread(LLMC_HEADER_BYTES, 0)
    if path.suffix == ".npy":
        start = io.BytesIO(head)
        try:
            np.lib.format.read_magic(start)
            shape, _, dtype = np.lib.format.read_array_header_1_0(start)
        except ValueError as error:
            raise bad_shard(place, f"is not a whole .npy file: {first_line(error)}") from None
        if dtype.str not in TYPES.values() or len(shape) != 1:
            raise bad_shard(place, f"holds {dtype} of shape {shape}, not a row of uint16 or uint32")
        return dtype.str, start.tell(), shape[0]
    if path.suffix != ".bin":
        raise bad_shard(place, "is neither .npy nor .bin")
    if len(head) == LLMC_HEADER_BYTES:
        magic, _, count = np.frombuffer(head[:12], "<i4").tolist()
        if magic in LLMC_TYPES:
            return LLMC_TYPES[magic], LLMC_HEADER_BYTES, count
    index = path.with_suffix(".idx")
    if "://" not in place and index.is_file():
        megatron = LocalFile(index).pread(18, 0)
        known = MEGATRON_TYPES.get(megatron[-1], "") if megatron.startswith(MEGATRON) else ""
        if not known:
            raise bad_shard(place, f"has a {index.name} that is not Megatron's for token ids")
        return known, 0, None
    return "", 0, None
