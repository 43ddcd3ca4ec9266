"""Token shards that another tool wrote, read in place: nanoGPT's `.bin`, build-nanogpt's `.npy`,
llm.c's `.bin`, Megatron's `.bin` with its `.idx`. Shards at URLs are downloaded first."""

from __future__ import annotations

import hashlib
import io
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from windlass.data.progress import Progress
from windlass.data.records import SourceSpec
from windlass.data.shards import Index, LocalFile, Shard, bad_shard, on_disk
from windlass.data.sources import explained, local_files
from windlass.errors import RunFailed, UserError, first_line, needs
from windlass.recipe import DataSettings

BLOCK_TOKENS = 1 << 21
LLMC_HEADER_BYTES = 1024
LLMC_TYPES = {20240520: "uint16", 20240801: "uint32"}  # by magic number: GPT-2's tokens, Llama 3's
# Megatron's `.idx`: 9 bytes, the version (8 bytes), then the code of the type of the `.bin` beside.
MEGATRON, MEGATRON_TYPES = b"MMIDIDX\x00\x00", {8: "uint16", 4: "uint32"}
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "https": "aiohttp"}  # of schemes


def scan_source(
    spec: SourceSpec, data: DataSettings, directory: Path, index: Index, progress: Progress
) -> Index:
    """Read the shards of a source `shards:...` once; returns the index as written.

    UserError if there are none, or one of them is not whole or has unknown ids.
    """
    is_remote = "://" in spec.path
    places = list_urls(spec.path) if is_remote else list(map(str, local_files(spec)[0]))

    def read(number: int, place: str) -> Shard:
        if not is_remote:
            return scan(Path(place), index.tokenizer.vocab, data)
        name = Path(urllib.parse.urlsplit(place).path).name
        file = directory / f"download-{number:05d}-{name}"
        download(place, file)
        shard = scan(file, index.tokenizer.vocab, data)
        return shard.model_copy(update={"file": file.name})

    with ThreadPoolExecutor(data.workers or None) as pool:
        for shard in pool.map(read, range(len(places)), places):
            index.shards.append(shard)
            progress.update(f"shards of {spec.name}", len(index.shards) / len(places))
    index.complete = True
    return index.save(directory)


def list_urls(pattern: str) -> list[str]:
    """The URLs that match a pattern with `*` or `[`, sorted; any other URL by itself.

    UserError if none matches.
    """
    if "*" not in pattern and "[" not in pattern:
        return [pattern]
    with explained(f"{pattern} cannot be read", UserError):
        files, path = file_system(pattern)
        urls = [str(files.unstrip_protocol(name)) for name in files.glob(path)]
    if not urls:
        raise UserError(f"no file matches {pattern}")
    return sorted(urls)


def download(url: str, target: Path) -> None:
    """Download a file whole, unless an earlier preparation did."""
    remedy = "check the URL, and the credentials of its file system"
    with explained(f"{url} cannot be read; {remedy}", UserError):
        files, path = file_system(url)
        size = files.info(path)["size"]
    if target.is_file() and target.stat().st_size == size:
        return
    partial = target.with_name(f".{target.name}.new")
    with explained(f"the download of {url} broke off; start again to resume", RunFailed):
        files.get_file(path, str(partial))
    if size is not None and partial.stat().st_size != size:
        problem = f"{partial.stat().st_size:,} of {size:,} bytes came"
        raise RunFailed(f"the download of {url} broke off: {problem}; start again to resume")
    partial.replace(target)


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the file's path in it."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError:
        raise UserError(f"{url} {needs(PACKAGES.get(scheme, scheme))}") from None
    except ValueError:
        schemes = ", ".join(f"{one}://" for one in PACKAGES)
        raise UserError(f"{url}: Windlass reads files of {schemes}") from None
    return files, str(path)


def scan(path: Path, vocab: int, data: DataSettings) -> Shard:
    """Read another tool's shard once; UserError if it is truncated or has an id >= `vocab`."""
    file, place = LocalFile(path), str(path)
    head = file.pread(LLMC_HEADER_BYTES, 0)
    magic, _, count = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    dtype, offset, tokens = "", 0, None  # as the file or its `.idx` names them
    if path.suffix == ".npy":
        dtype, offset, tokens = _numpy_header(place, head)
    elif path.suffix != ".bin":
        raise bad_shard(place, "is neither .npy nor .bin")
    elif len(head) == LLMC_HEADER_BYTES and magic in LLMC_TYPES:
        dtype, offset, tokens = LLMC_TYPES[magic], LLMC_HEADER_BYTES, count
    elif (index := path.with_suffix(".idx")).is_file():
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
    for done in range(0, tokens, BLOCK_TOKENS):
        size = min(BLOCK_TOKENS, tokens - done) * kind.itemsize
        raw = file.pread(size, offset + done * kind.itemsize)
        digest.update(raw)
        block = np.frombuffer(raw, kind)
        if int(block.max()) >= vocab:
            at = int(np.argmax(block >= vocab))
            id_ = f"the token id {int(block[at]):,} at place {done + at:,}"
            reason = f"the vocabulary has {vocab:,} ids: it was made with another tokenizer"
            raise bad_shard(place, f"has {id_}, and {reason}")
        zeros = zeros and not block[1::2].any()
    if zeros and tokens > 1 and kind.itemsize == 2 and not dtype:
        remedy = 'set data.shards_dtype="uint32"'
        raise bad_shard(place, f"has 32-bit ids: every second 16 bits are 0; {remedy}")
    return Shard(
        file=str(path.resolve()),
        tokens=tokens,
        sha256=digest.hexdigest(),
        dtype=kind.name,
        offset=offset,
    )


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
