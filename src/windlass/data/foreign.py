"""Token shards that another tool wrote, read in place: nanoGPT's `.bin`, build-nanogpt's `.npy`,
llm.c's `.bin`, Megatron's `.bin` with its `.idx`; on this machine, or by URL."""

from __future__ import annotations

import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from windlass.data.progress import Progress
from windlass.data.remote import RemoteFile, list_urls
from windlass.data.shards import CACHE, Index, LocalFile, Shard, bad_shard, on_disk, unknown_id
from windlass.data.sources import SourceSpec, find_files
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
    place = spec.place.removeprefix("shards:")
    if "://" in place:
        places = list_urls(place)
    else:
        places = [str(path) for path in find_files(place, spec.setting)]
    read = partial(
        scan,
        vocab=index.tokenizer.vocab,
        dtype=data.shards_dtype,
        cache=directory / CACHE,
        cache_bytes=int(data.cache_gb * 1e9),
    )
    with ThreadPoolExecutor(data.workers or None) as pool:
        for shard in pool.map(read, places):
            index.shards.append(shard)
            progress.update(f"shards of {spec.name}", len(index.shards) / len(places))
    index.complete = True
    return index.save(directory)


def scan(place: str, vocab: int, dtype: str, cache: Path, cache_bytes: int) -> Shard:
    """Read another tool's shard once; UserError if it is truncated or has an id >= `vocab`.

    Of a URL only the beginning is read; its ids are checked when they are used. `dtype`: the type
    of ids in a file that does not name it (`data.shards_dtype`).
    """
    path = Path(place)
    file = RemoteFile(place, cache, cache_bytes) if "://" in place else LocalFile(path)
    size = file.size if isinstance(file, RemoteFile) else path.stat().st_size
    dtype = dtype if dtype != "auto" else "uint16" if vocab <= 1 << 16 else "uint32"
    offset, tokens, named = 0, size // on_disk(dtype).itemsize, False
    head = file.pread(min(size, LLMC_HEADER_BYTES), 0)
    if path.suffix == ".npy":
        dtype, offset, tokens, named = *_numpy_header(place, head), True
    elif path.suffix != ".bin":
        raise bad_shard(place, "is neither .npy nor .bin")
    elif (
        len(head) == LLMC_HEADER_BYTES
        and (header := np.frombuffer(head, "<i4").tolist())[0] in LLMC_TYPES
    ):
        dtype, offset, tokens, named = LLMC_TYPES[header[0]], LLMC_HEADER_BYTES, header[2], True
    elif "://" not in place and (index := path.with_suffix(".idx")).is_file():
        with index.open("rb") as opened:
            head = opened.read(18)
        dtype = MEGATRON_TYPES.get(head[17] if head.startswith(MEGATRON) else 0, "")
        if not dtype:
            raise bad_shard(place, f"has a {index.name} that is not Megatron's for token ids")
        tokens, named = size // on_disk(dtype).itemsize, True
    kind = on_disk(dtype)
    if not tokens or size != offset + tokens * kind.itemsize:
        found = f"{size:,} bytes for {tokens:,} tokens of {dtype}"
        raise bad_shard(place, f"is truncated or not a shard: {found}")
    digest, done, zeros = hashlib.sha256(file.pread(offset, 0)), 0, True
    while done < (min(tokens, BLOCK_TOKENS) if "://" in place else tokens):
        count = min(BLOCK_TOKENS, tokens - done)
        raw = file.pread(count * kind.itemsize, offset + done * kind.itemsize)
        digest.update(raw)
        block = np.frombuffer(raw, kind)
        if int(block.max()) >= vocab:
            raise unknown_id(place, block, vocab, done)
        zeros = zeros and not block[1::2].any()
        done += count
    if zeros and tokens > 1 and dtype == "uint16" and not named:
        raise bad_shard(
            place, 'has 32-bit ids: every second 16 bits are 0; set data.shards_dtype="uint32"'
        )
    name, content = str(path.resolve()), digest.hexdigest()
    if isinstance(file, RemoteFile):
        name, content = place, file.version
    return Shard(file=name, tokens=tokens, sha256=content, dtype=dtype, offset=offset)


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
