"""Token shards that others wrote, read as they are: nanoGPT's .bin, build-nanogpt's .npy, llm.c's .bin with its header."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from windlass.data.shards import Shard, on_disk
from windlass.errors import UserError

LLMC_HEADER_BYTES = 1024
LLMC_KINDS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""llm.c's magic numbers: GPT-2's tokens as version 1 in 16 bits, Llama 3's as version 7 in 32 bits."""
NPY_MAGIC = b"\x93NUMPY"
BLOCK_TOKENS = 1 << 21
VALIDATION = re.compile(r"(^|[^a-z])val(idation)?([^a-z]|$)")


@dataclass(frozen=True)
class Layout:
    """How the tokens lie in a file."""

    dtype: str
    offset: int
    tokens: int


def is_validation(path: Path) -> bool:
    """Whether a shard's name says that it is for validation: `val.bin`, `edufineweb_val_000000.npy`."""
    return VALIDATION.search(path.name.lower()) is not None


def layout(path: Path) -> Layout:
    """How the tokens lie in a shard; raises UserError where it is no shard, or truncated."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(LLMC_HEADER_BYTES)
            if head.startswith(NPY_MAGIC):
                file.seek(0)
                return _npy(path, file, size)
    except OSError as error:
        raise UserError(f"the shard {path} cannot be read: {error}") from None
    if path.suffix == ".npy":
        raise UserError(f"the shard {path} is no .npy file: it does not begin like one")
    if path.suffix != ".bin":
        raise UserError(f"the shard {path} is neither .npy nor .bin")
    if len(head) == LLMC_HEADER_BYTES and int(np.frombuffer(head, "<i4", 1)[0]) in LLMC_KINDS:
        return _llmc(path, head, size)
    if size == 0 or size % 2:
        raise UserError(f"the shard {path} has {size:,} bytes, which is no whole number of 16-bit tokens: truncated?")
    return Layout("uint16", 0, size // 2)


def _llmc(path: Path, head: bytes, size: int) -> Layout:
    magic, version, tokens = (int(x) for x in np.frombuffer(head, "<i4", 3))
    known, dtype = LLMC_KINDS[magic]
    if version != known:
        raise UserError(f"the shard {path} has llm.c's header of version {version}; version {known} can be read")
    there = (size - LLMC_HEADER_BYTES) // on_disk(dtype).itemsize
    if tokens < 1 or size != LLMC_HEADER_BYTES + tokens * on_disk(dtype).itemsize:
        raise UserError(f"the shard {path} should hold {tokens:,} tokens by its header, and has {there:,}: truncated?")
    return Layout(dtype, LLMC_HEADER_BYTES, tokens)


def _npy(path: Path, file: object, size: int) -> Layout:
    try:
        version = np.lib.format.read_magic(file)  # type: ignore[arg-type]
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(f"the shard {path} has a damaged .npy header: {error}") from None
    offset = file.tell()  # type: ignore[attr-defined]
    if dtype not in (on_disk("uint16"), on_disk("uint32")) or len(shape) != 1 or not shape[0]:
        raise UserError(f"the shard {path} holds {dtype} of shape {shape}; tokens are a row of uint16 or uint32")
    if size != offset + shape[0] * dtype.itemsize:
        there = max(0, size - offset) // dtype.itemsize
        raise UserError(f"the shard {path} should hold {shape[0]:,} tokens, and has {there:,}: truncated?")
    return Layout(dtype.newbyteorder("=").name, offset, shape[0])


def scan(path: Path, vocab: int, tick: Callable[[int], None]) -> Shard:
    """Read a shard once: its SHA-256, its largest token; raises UserError naming the first id that is no token."""
    how = layout(path)
    dtype = on_disk(how.dtype)
    digest, largest, done = hashlib.sha256(), 0, 0
    with path.open("rb") as file:
        digest.update(file.read(how.offset))
        while raw := file.read(BLOCK_TOKENS * dtype.itemsize):
            digest.update(raw)
            tokens = np.frombuffer(raw, dtype)
            if int(tokens.max()) >= vocab:
                place = int(np.argmax(tokens >= vocab))
                raise UserError(
                    f"the shard {path} holds the token id {int(tokens[place]):,} at place {done + place:,}, and the "
                    f"vocabulary has {vocab:,}: it was made with another tokenizer, or is no token shard"
                )
            largest = max(largest, int(tokens.max()))
            done += len(tokens)
            tick(len(tokens))
    size = how.offset + how.tokens * dtype.itemsize
    return Shard(str(path.resolve()), how.tokens, 0, size, digest.hexdigest(), largest, how.dtype, how.offset)


def scan_all(paths: list[Path], vocab: int, workers: int, tick: Callable[[int, int], None]) -> list[Shard]:
    """Scan shards side by side, in the order of their names; `tick(done, total)` counts tokens."""
    total, done = sum(layout(path).tokens for path in paths), 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        tick(done, total)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda path: scan(path, vocab, count), paths))
