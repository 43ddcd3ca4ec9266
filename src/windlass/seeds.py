"""Seeds: everything random in Windlass is a pure function of a key, for example
`windlass/init/<seed>/<parameter>`."""

from __future__ import annotations

import hashlib


def seed_bytes(key: str, size: int) -> bytes:
    """`size` bytes that depend on the key alone (BLAKE2b, so no release of a library changes
    them)."""
    return hashlib.blake2b(key.encode(), digest_size=size).digest()


def seed_of(key: str) -> int:
    """A seed of 63 bits for torch's generators."""
    return int.from_bytes(seed_bytes(key, 8), "little") >> 1
