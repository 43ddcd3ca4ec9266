"""Whether the disk has room for what will be saved. Needs no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

RESERVE_BYTES = 16 * 2**20
"""Left free beside a checkpoint, for the ledger, logs and the manifest."""


def free_bytes(path: Path) -> int:
    """Bytes that may still be written under `path`, which need not exist yet."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def needed_bytes(checkpoint_bytes: int, kept: int, present: int = 0) -> int:
    """Bytes that a run will still write: `kept` checkpoints and the next one beside them, less the `present` ones."""
    return max(1, kept + 1 - present) * checkpoint_bytes + RESERVE_BYTES


def shortage(path: Path, needed: int, what: str) -> str:
    """Empty where `needed` bytes are free under `path`, else the message that says what is missing."""
    free = free_bytes(path)
    if free >= needed:
        return ""
    return f"{what} needs {gb(needed)} under {path}, and {gb(free)} are free"


def gb(count: int) -> str:
    """Bytes as people say them (1 GB = 10^9 bytes)."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count} bytes"
