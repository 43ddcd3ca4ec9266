"""Token shards that others wrote, read as they are: nanoGPT's .bin, build-nanogpt's .npy, llm.c's .bin with its header."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from windlass.data.shards import Shard, on_disk
from windlass.errors import UserError

LLMC_HEADER_BYTES = 1024
LLMC_KINDS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""llm.c's magic numbers: GPT-2's tokens as version 1 in 16 bits, Llama 3's as version 7 in 32 bits."""
BLOCK_TOKENS = 1 << 21
VALIDATION = re.compile(r"(^|[^a-z])val(idation)?([^a-z]|$)")
"""In a file's name: the shard is for validation, as `val.bin`, `edufineweb_val_000000.npy`."""


def layout(path: Path) -> tuple[str, int, int]:
    """(type, bytes of header, tokens) of a shard; raises UserError where it is no shard, or truncated."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(LLMC_HEADER_BYTES)
    except OSError as error:
        raise UserError(f"the shard {path} cannot be read: {error}") from None
    if path.suffix == ".npy" or head.startswith(b"\x93NUMPY"):
        try:
            with path.open("rb") as file:
                npy = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if npy == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, numpy_type = read(file)  # the header alone: an array of objects would run code when loaded
                offset = file.tell()
        except ValueError as error:
            raise UserError(f"the shard {path} has no whole .npy header: {error}") from None
        if numpy_type not in (on_disk("uint16"), on_disk("uint32")) or len(shape) != 1 or not shape[0]:
            raise UserError(
                f"the shard {path} holds {numpy_type} of shape {shape}; tokens are a row of uint16 or uint32"
            )
        dtype, tokens = numpy_type.newbyteorder("=").name, shape[0]
    elif path.suffix != ".bin":
        raise UserError(f"the shard {path} is neither .npy nor .bin")
    elif len(head) == LLMC_HEADER_BYTES and int(np.frombuffer(head, "<i4", 1)[0]) in LLMC_KINDS:
        magic, version, tokens = (int(x) for x in np.frombuffer(head, "<i4", 3))
        expected, dtype = LLMC_KINDS[magic]
        offset = LLMC_HEADER_BYTES
        if version != expected:
            raise UserError(f"the shard {path} has llm.c's header of version {version}; version {expected} can be read")
    else:
        if size == 0 or size % 2:
            raise UserError(
                f"the shard {path} has {size:,} bytes, which is no whole number of 16-bit tokens: truncated?"
            )
        return "uint16", 0, size // 2
    width = on_disk(dtype).itemsize
    if tokens < 1 or size != offset + tokens * width:
        present = max(0, size - offset) // width
        raise UserError(f"the shard {path} should hold {tokens:,} tokens, and has {present:,}: truncated?")
    return dtype, offset, tokens


def scan(path: Path, vocab: int, tick: Callable[[int], None]) -> Shard:
    """Read a shard once, for its SHA-256; raises UserError naming the first id that is no token."""
    name, offset, tokens = layout(path)
    dtype = on_disk(name)
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        digest.update(file.read(offset))
        while raw := file.read(BLOCK_TOKENS * dtype.itemsize):
            digest.update(raw)
            block = np.frombuffer(raw, dtype)
            if int(block.max()) >= vocab:
                place = int(np.argmax(block >= vocab))
                raise UserError(
                    f"the shard {path} holds the token id {int(block[place]):,} at place {done + place:,}, and the "
                    f"vocabulary has {vocab:,}: it was made with another tokenizer, or is no token shard"
                )
            done += len(block)
            tick(len(block))
    return Shard(
        file=str(path.resolve()), tokens=tokens, documents=0, bytes=offset + tokens * dtype.itemsize,
        sha256=digest.hexdigest(), dtype=name, offset=offset,
    )  # fmt: skip


def scan_all(paths: list[Path], vocab: int, workers: int, tick: Callable[[int, int], None]) -> list[Shard]:
    """Scan shards side by side, in the order of their names; `tick(done, total)` counts tokens."""
    total, done = sum(layout(path)[2] for path in paths), 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        tick(done, total)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda path: scan(path, vocab, count), paths))
