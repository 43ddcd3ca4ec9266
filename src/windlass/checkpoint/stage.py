"""The host's copy of a rank's share: a buffer that holds the file as it will be written, header first.

One buffer serves every save of a run: the pages are touched once, and the memory that a save takes is known. On CUDA it is
page-locked, and the copies are put on the current stream, so that they see the weights of this step and none of the next;
an event says when they are done, and only the writer waits for it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from windlass.checkpoint.format import ITEM_BYTES
from windlass.checkpoint.reshard import Slice

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
TOUCH_BYTES = 64 * 2**20
ALIGN = 4096
"""The data begin at a page, as direct I/O and typed views of the buffer want it."""


@dataclass(frozen=True)
class Staged:
    """A file's bytes in the buffer, and what lies where."""

    image: memoryview
    """The whole file: 8 bytes of header length, the header, the data."""
    tensors: dict[str, dict[str, Any]]
    """By name: `dtype`, `shape` of the whole tensor, and `chunk` (offset in the file, first row, rows)."""
    event: Any
    """Done when the copies from the device are; None where they are already."""

    def ready(self) -> None:
        """Return when the bytes are there."""
        if self.event is not None:
            self.event.synchronize()


class Stage:
    """A reused buffer on the host."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @property
    def capacity(self) -> int:
        """Bytes that the buffer holds now."""
        return self._bytes.numel()

    def reserve(self, size: int, pinned: bool) -> None:
        """Have a buffer of at least `size` bytes whose pages are there; a smaller one is given up first."""
        if self.capacity >= size and self._bytes.is_pinned() == pinned:
            return
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if pinned:
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return
        memory = mmap.mmap(-1, -(-size // ALIGN) * ALIGN)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # touching 2 MiB pages is many times faster than 4 KiB ones
        with contextlib.suppress(OSError), open("/dev/zero", "rb", buffering=0) as zeros:
            view = memoryview(memory)  # the system touches the pages, on one core and without the interpreter's lock
            for at in range(0, len(view), TOUCH_BYTES):
                zeros.readinto(view[at : at + TOUCH_BYTES])
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def fill(self, slices: Mapping[str, Slice], rank: int) -> Staged:
        """Copy the slices into the buffer, after the header that describes them."""
        order = sorted(slices, key=lambda name: -slices[name].tensor.element_size())
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", "windlass": f"rows of rank {rank}"}}
        spans: dict[str, tuple[int, int]] = {}
        at = 0
        for name in order:
            size = slices[name].tensor.numel() * slices[name].tensor.element_size()
            dtype, shape = NAMES[slices[name].tensor.dtype], list(slices[name].tensor.shape)
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            spans[name] = (at, at + size)
            at += size
        header = json.dumps(entries, separators=(",", ":")).encode()
        data_at = -(-(8 + len(header)) // ALIGN) * ALIGN
        header = header.ljust(data_at - 8)  # the format allows spaces after the header's JSON
        on_cuda = any(s.tensor.is_cuda for s in slices.values())
        self.reserve(data_at + at, on_cuda)
        image = memoryview(self._bytes.numpy())[: data_at + at]
        image[:data_at] = len(header).to_bytes(8, "little") + header
        for name, (first, last) in spans.items():
            tensor = slices[name].tensor
            target = self._bytes[data_at + first : data_at + last].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=True)
        event = None
        if on_cuda:
            event = torch.cuda.Event()
            event.record()
        tensors = {
            name: {
                "dtype": NAMES[s.tensor.dtype],
                "shape": list(s.global_shape),
                "chunk": [data_at + spans[name][0], s.start, s.rows],
            }
            for name, s in slices.items()
        }
        return Staged(image, tensors, event)


assert set(ITEM_BYTES) == set(DTYPES) and all(DTYPES[n].itemsize == size for n, size in ITEM_BYTES.items())
