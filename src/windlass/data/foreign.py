"""Token shards that another tool wrote, read in place: nanoGPT's `.bin`, build-nanogpt's `.npy`,
llm.c's `.bin`, Megatron's `.bin` with its `.idx`; on this machine, or by URL."""

from __future__ import annotations

import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from windlass.data.corpus import CACHE, LocalFile
from windlass.data.files import local_files
from windlass.data.locate import SourceSpec
from windlass.data.progress import Progress
from windlass.data.remote import RemoteFile, list_urls
from windlass.data.shards import Index, Shard, bad_shard, on_disk, unknown_id
from windlass.errors import first_line
from windlass.recipe import DataSettings

BLOCK_TOKENS = 1 << 21
LLMC_HEADER_BYTES = 1024
LLMC_TYPES = {20240520: "uint16", 20240801: "uint32"}  # by magic number: GPT-2's tokens, Llama 3's
# Megatron's `.idx`: 9 bytes, the version (8 bytes), then the code of the type of the `.bin` beside.
MEGATRON, MEGATRON_TYPES = b"MMIDIDX\x00\x00", {8: "uint16", 4: "uint32"}


def scan_source(
    spec: SourceSpec, data: DataSettings, directory: Path, index: Index, progress: Progress
) -> Index:
    """Read the shards of a source `shards:...` once; returns the index as written.

    UserError if there are none, or one of them is not whole or has unknown ids.
    """
    is_remote = "://" in spec.path
    places = list_urls(spec.path) if is_remote else [str(file) for file in local_files(spec)[0]]
    read = partial(scan, vocab=index.tokenizer.vocab, data=data, cache=directory / CACHE)
    with ThreadPoolExecutor(data.workers or None) as pool:
        for shard in pool.map(read, places):
            index.shards.append(shard)
            progress.update(f"shards of {spec.name}", len(index.shards) / len(places))
    index.complete = True
    return index.save(directory)


def scan(place: str, vocab: int, data: DataSettings, cache: Path) -> Shard:
    """Read another tool's shard once; UserError if it is truncated or has an id >= `vocab`.

    Windlass reads only the beginning of a URL, and checks its ids when it uses them.
    """
    path, is_remote = Path(place), "://" in place
    file = RemoteFile(place, cache, int(data.cache_gb * 1e9)) if is_remote else LocalFile(path)
    head = file.pread(LLMC_HEADER_BYTES, 0)
    magic, _, count = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    dtype, offset, tokens = "", 0, None  # as the file or its `.idx` names them
    if path.suffix == ".npy":
        dtype, offset, tokens = _numpy_header(place, head)
    elif path.suffix != ".bin":
        raise bad_shard(place, "is neither .npy nor .bin")
    elif len(head) == LLMC_HEADER_BYTES and magic in LLMC_TYPES:
        dtype, offset, tokens = LLMC_TYPES[magic], LLMC_HEADER_BYTES, count
    elif not is_remote and (index := path.with_suffix(".idx")).is_file():
        about = LocalFile(index).pread(18, 0)
        dtype = MEGATRON_TYPES.get(about[-1], "") if about.startswith(MEGATRON) else ""
        if not dtype:
            raise bad_shard(place, f"has a {index.name} that is not Megatron's for token ids")
    guess = "uint16" if vocab <= 1 << 16 else "uint32"
    kind = on_disk(dtype or (guess if data.shards_dtype == "auto" else data.shards_dtype))
    tokens = file.size // kind.itemsize if tokens is None else tokens
    if not tokens or file.size != offset + tokens * kind.itemsize:
        content = f"{file.size:,} bytes for {tokens:,} tokens of {kind.name}"
        raise bad_shard(place, f"is truncated or not a shard: {content}")
    digest, zeros = hashlib.sha256(file.pread(offset, 0)), True
    for done in range(0, min(tokens, BLOCK_TOKENS) if is_remote else tokens, BLOCK_TOKENS):
        size = min(BLOCK_TOKENS, tokens - done) * kind.itemsize
        raw = file.pread(size, offset + done * kind.itemsize)
        digest.update(raw)
        block = np.frombuffer(raw, kind)
        if int(block.max()) >= vocab:
            raise unknown_id(place, block, vocab, done)
        zeros = zeros and not block[1::2].any()
    if zeros and tokens > 1 and kind.itemsize == 2 and not dtype:
        remedy = 'set data.shards_dtype="uint32"'
        raise bad_shard(place, f"has 32-bit ids: every second 16 bits are 0; {remedy}")
    name, content = str(path.resolve()), digest.hexdigest()
    if isinstance(file, RemoteFile):
        name, content = place, file.version
    return Shard(file=name, tokens=tokens, sha256=content, dtype=kind.name, offset=offset)


def _numpy_header(place: str, head: bytes) -> tuple[str, int, int]:
    """Type, bytes of header, and number of the ids of a `.npy` file."""
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        shape, _, dtype = (read if version == (1, 0) else np.lib.format.read_array_header_2_0)(file)
    except ValueError as error:
        raise bad_shard(place, f"is not a whole .npy file: {first_line(error)}") from None
    if dtype.str not in ("<u2", "<u4") or len(shape) != 1:
        content = f"{dtype} of shape {shape}, not a row of uint16 or uint32"
        raise bad_shard(place, f"holds {content}")
    return dtype.name, file.tell(), shape[0]
