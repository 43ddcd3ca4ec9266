"""Check and index the token shards that other tools wrote: nanoGPT, build-nanogpt, llm.c, Megatron.
Windlass does not copy them.
"""

from __future__ import annotations

import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from windlass.data.files import local_files
from windlass.data.progress import Progress
from windlass.data.recipe_sources import SourceSpec
from windlass.data.remote import RemoteFile, list_urls
from windlass.data.shards import CACHE, Index, LocalFile, Shard, bad_shard, check_ids, on_disk
from windlass.errors import first_line

BLOCK_TOKENS = 1 << 21
LLMC_HEADER_BYTES = 1024
LLMC_TYPES = {20240520: "uint16", 20240801: "uint32"}  # by magic number: GPT-2's tokens, Llama 3's
# Megatron's `.idx`: 9 bytes, the version (8 bytes), then the code of the type of the `.bin` beside.
MEGATRON, MEGATRON_TYPES = b"MMIDIDX\x00\x00", {8: "uint16", 4: "uint32"}


def index_shards(
    spec: SourceSpec, directory: Path, index: Index, workers: int, progress: Progress
) -> Index:
    """Check the shards of a source `shards:...`; returns the index as written."""
    is_remote = "://" in spec.path
    places = list_urls(spec.path) if is_remote else [str(path) for path in local_files(spec)[0]]
    with ThreadPoolExecutor(workers or None) as pool:
        for shard in pool.map(lambda place: _checked(spec, directory, index, place), places):
            index.shards.append(shard)
            progress.update(f"shards of {spec.name}", len(index.shards) / len(places))
    index.complete = True
    return index.save(directory)


def _checked(spec: SourceSpec, directory: Path, index: Index, place: str) -> Shard:
    """A shard, after a check of all ids; of a URL only the first ones are checked."""
    file: LocalFile | RemoteFile
    if "://" in place:
        file = RemoteFile(place, directory.parent / CACHE, spec.cache_bytes)
    else:
        file = LocalFile(Path(place))
    vocab = index.tokenizer.vocab
    dtype, offset, tokens = _header(place, file)
    smallest = "uint16" if vocab <= 1 << 16 else "uint32"
    kind = on_disk(dtype or (smallest if spec.shards_dtype == "auto" else spec.shards_dtype))
    if tokens is None:
        tokens = file.size // kind.itemsize
    if not tokens or file.size != offset + tokens * kind.itemsize:
        content = f"{file.size:,} bytes for {tokens:,} tokens of {kind.name}"
        raise bad_shard(place, f"is truncated or not a shard: {content}")
    digest = hashlib.sha256(file.pread(offset, 0))
    odd_ids_are_0 = True
    read = min(tokens, BLOCK_TOKENS) if isinstance(file, RemoteFile) else tokens
    for done in range(0, read, BLOCK_TOKENS):
        size = min(BLOCK_TOKENS, tokens - done) * kind.itemsize
        raw = file.pread(size, offset + done * kind.itemsize)
        digest.update(raw)
        ids = np.frombuffer(raw, kind)
        check_ids(place, ids, vocab, done)
        odd_ids_are_0 = odd_ids_are_0 and not ids[1::2].any()
    if odd_ids_are_0 and tokens > 1 and kind.itemsize == 2 and not dtype:
        remedy = 'set data.shards_dtype="uint32"'
        raise bad_shard(place, f"has 32-bit ids: every second 16 bits are 0; {remedy}")
    name, content = str(Path(place).resolve()), digest.hexdigest()
    if isinstance(file, RemoteFile):
        name, content = place, file.version
    return Shard(file=name, tokens=tokens, sha256=content, dtype=kind.name, offset=offset)


def _header(place: str, file: LocalFile | RemoteFile) -> tuple[str, int, int | None]:
    """The type of the ids, the bytes before them, and their number; '' and None if unknown."""
    path = Path(place)
    head = file.pread(LLMC_HEADER_BYTES, 0)
    if path.suffix == ".npy":
        start = io.BytesIO(head)
        try:
            np.lib.format.read_magic(start)
            shape, _, dtype = np.lib.format.read_array_header_1_0(start)
        except ValueError as error:
            raise bad_shard(place, f"is not a whole .npy file: {first_line(error)}") from None
        if dtype.str not in ("<u2", "<u4") or len(shape) != 1:
            raise bad_shard(place, f"holds {dtype} of shape {shape}, not a row of uint16 or uint32")
        return dtype.name, start.tell(), shape[0]
    if path.suffix != ".bin":
        raise bad_shard(place, "is neither .npy nor .bin")
    if len(head) == LLMC_HEADER_BYTES:
        magic, _, count = np.frombuffer(head[:12], "<i4").tolist()
        if magic in LLMC_TYPES:
            return LLMC_TYPES[magic], LLMC_HEADER_BYTES, count
    index = path.with_suffix(".idx")
    if isinstance(file, LocalFile) and index.is_file():
        megatron = LocalFile(index).pread(18, 0)
        code = MEGATRON_TYPES.get(megatron[-1], "") if megatron.startswith(MEGATRON) else ""
        if not code:
            raise bad_shard(place, f"has a {index.name} that is not Megatron's for token ids")
        return code, 0, None
    return "", 0, None
