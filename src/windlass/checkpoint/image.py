"""A rank's file in host memory: its layout, and the copy of a state into it.

The writer takes either a buffer that every save reuses (`HostBuffer`), which a `Copy` fills beside
the next step, or the state itself, if it does not change meanwhile (`StateFile`).
"""

from __future__ import annotations

import json
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
import torch

from windlass.checkpoint.commit import Save, explain
from windlass.checkpoint.format import REAL
from windlass.checkpoint.state_dict import TYPE_NAMES, Slice
from windlass.fileio import PAGE, PIECE_BYTES


class Copy:
    """A copy of a state to the host, which may not change before `settle` has returned.

    On CUDA it runs on a stream of its own, beside the next forward and backward pass. On the host
    the writer copies, and `settle` copies what is left.
    """

    def __init__(self) -> None:
        self._left = deque[tuple[np.ndarray, np.ndarray]]()  # pieces: where to, where from
        self._lock = threading.Lock()  # held while a piece is copied
        self._end: Any = None  # on CUDA an event
        self._boxes: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a contiguous tensor on the host, in `finish`; NumPy frees Python's lock meanwhile."""
        to, origin = (t.detach().view(-1).view(torch.uint8).numpy() for t in (target, source))
        for start in range(0, len(to), PIECE_BYTES):
            piece = slice(start, start + PIECE_BYTES)
            self._left.append((to[piece], origin[piece]))

    def begin(
        self, stream: torch.cuda.Stream, boxes: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Begin to copy tensors from CUDA, as they are after all that was launched so far."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for target, source in boxes:
                target.copy_(source, non_blocking=True)
            self._end = stream.record_event()
        self._boxes = boxes  # else torch may reuse the memory of a temporary tensor

    def settle(self) -> None:
        """From the return on the state may change: by this thread, or by its CUDA stream."""
        if self._end is not None:
            torch.cuda.current_stream().wait_event(self._end)
        self._copy_left()

    def finish(self) -> None:
        """Return when the host has every byte."""
        self._copy_left()
        if self._end is not None:
            self._end.synchronize()

    def _copy_left(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    return
                to, origin = self._left.popleft()
                to[:] = origin


class HostBuffer:
    """Host memory for a copy of a rank's boxes, which every save reuses.

    For a state on CUDA it is page-locked: mapped here and registered, because `pin_memory=True`
    rounds a size up to a power of two.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        self._can_pin = True
        self._unpin: Callable[[], object] = lambda: None  # unregisters the present memory
        self.warning = ""  # why memory for CUDA is not page-locked, until it was reported

    def reserve(self, size: int, pinned_for: torch.device | None) -> None:
        """Make room for `size` bytes, page-locked for copies from a CUDA device."""
        if self._bytes.numel() >= size:
            return
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)  # frees the smaller memory first
        memory = mmap.mmap(-1, -(-size // PAGE) * PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # touching 2 MiB pages is many times faster
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        if pinned_for is None or not self._can_pin:
            return
        # In a thread: CUDA reports a failure to the next kernel of the thread that saw it.
        address, errors = self._bytes.data_ptr(), list[str]()
        arguments = [address, len(memory), pinned_for, errors.append]
        thread = threading.Thread(target=register, args=arguments, daemon=True)
        thread.start()
        thread.join()
        if errors:  # such memory is scarce (`ulimit -l`); without it the save still works
            self._can_pin = False
            self.warning = f"saves block the step longer: no page-locked memory: {errors[0]}"
            return
        unregister = weakref.finalize(self, lambda: torch.cuda.cudart().cudaHostUnregister(address))
        unregister.atexit = False  # the end of the process frees it
        self._unpin = unregister

    def fill(self, save: Save, slices: Sequence[Slice], passing: Set[str] = frozenset()) -> None:
        """Begin to copy the boxes into the buffer, as the file of a save.

        The tensors named in `passing`, which a forward pass may change, are copied first.
        """
        header, places, size = layout(slices, save.rank)
        device = cuda_device(slices)
        self.reserve(size, device)
        image = memoryview(self._bytes.numpy())[:size]
        image[: len(header)] = header
        copy, on_device = Copy(), list[tuple[torch.Tensor, torch.Tensor]]()
        for box, at in places:
            source = box.tensor
            target = self._bytes[at : at + source.nbytes].view(source.dtype).view(source.shape)
            if box.name in passing or not (source.is_cuda or source.is_contiguous()):
                target.copy_(source, non_blocking=True)
            elif source.is_cuda:
                on_device.append((target, source))
            else:
                copy.add(target, source)
        if device is not None:
            self._stream = self._stream or torch.cuda.Stream(device)
            copy.begin(self._stream, on_device)
        save.image, save.tensors, save.copy = image, describe(places), copy


class StateFile:
    """A rank's file, read from a state on the host that does not change meanwhile.

    A slice lies in memory that the next one overwrites.
    """

    def __init__(self, header: bytes, places: list[tuple[Slice, int]], size: int):
        self._parts = [(0, np.frombuffer(header, np.uint8))]
        for box, at in places:
            flat = box.tensor.detach().contiguous().view(-1).view(torch.uint8)
            self._parts.append((at, flat.numpy()))
        self._size, self._piece = size, np.empty(0, np.uint8)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> memoryview:
        start, stop = part.start, min(part.stop, self._size)
        if len(self._piece) < stop - start:
            pages = mmap.mmap(-1, -(-(stop - start) // PAGE) * PAGE)  # as O_DIRECT needs them
            self._piece = np.frombuffer(pages, np.uint8)
        for at, data in self._parts:
            first, last = max(start, at), min(stop, at + len(data))
            if first < last:
                self._piece[first - start : last - start] = data[first - at : last - at]
        return self._piece[: stop - start].data


def describe(places: list[tuple[Slice, int]]) -> dict[str, dict[str, Any]]:
    """The boxes of a file, as in `Save.tensors`."""
    tensors: dict[str, dict[str, Any]] = {}
    for box, at in places:
        about = {"dtype": TYPE_NAMES[box.tensor.dtype], "shape": list(box.global_shape)}
        chunks = tensors.setdefault(box.name, about | {"chunks": []})["chunks"]
        chunks.append([at, list(box.offsets), list(box.tensor.shape)])
    return tensors


def layout(slices: Sequence[Slice], rank: int) -> tuple[bytes, list[tuple[Slice, int]], int]:
    """The header of the file that holds these boxes, the place of each box, the file's size."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "windlass": f"boxes of rank {rank}"}}
    places, end = list[tuple[Slice, int]](), 0
    for box in sorted(slices, key=lambda box: -box.tensor.element_size()):  # keeps all aligned
        begin, end = end, end + box.tensor.nbytes
        name = box.name  # further boxes of a tensor need names of their own
        while name in header:
            name = f"{box.name}@{','.join(map(str, box.offsets))}"
        dtype, shape = TYPE_NAMES[box.tensor.dtype], list(box.tensor.shape)
        if dtype in REAL:
            dtype, shape = REAL[dtype], [*shape, 2]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        places.append((box, begin))
    text = json.dumps(header, separators=(",", ":")).encode()
    data_at = -(-(8 + len(text)) // PAGE) * PAGE
    text = text.ljust(data_at - 8)  # the format allows spaces after the header's JSON
    places = [(box, data_at + begin) for box, begin in places]
    return len(text).to_bytes(8, "little") + text, places, data_at + end


def cuda_device(slices: Sequence[Slice]) -> torch.device | None:
    """The CUDA device of a state; None if no tensor is on one."""
    return next((box.tensor.device for box in slices if box.tensor.is_cuda), None)


def register(address: int, size: int, device: torch.device, fail: Callable[[str], None]) -> None:
    """Page-lock memory for copies from a CUDA device."""
    try:
        torch.cuda.set_device(device)
        portable = 1
        if code := int(torch.cuda.cudart().cudaHostRegister(address, size, portable)):
            fail(f"cudaHostRegister of {size / 2**20:.0f} MiB failed with error {code}")
    except (AssertionError, RuntimeError) as error:
        fail(explain(error))
