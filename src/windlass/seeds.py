"""Seeds: all randomness is a pure function of a key such as `windlass/init/<seed>/<parameter>`."""

from __future__ import annotations

import hashlib


def seed_bytes(key: str, size: int) -> bytes:
    """`size` bytes of BLAKE2b, which no release of a library changes."""
    return hashlib.blake2b(key.encode(), digest_size=size).digest()


def seed_of(key: str) -> int:
    """A seed of 63 bits for torch's generators."""
    return int.from_bytes(seed_bytes(key, 8), "little") >> 1
