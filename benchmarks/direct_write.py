"""What writing past the page cache (O_DIRECT) saves: seconds and processor seconds to hash, write
and sync one rank's file.

    python benchmarks/direct_write.py [--mb 128] [--rounds 30] [--dir DIR]

Both ways are measured in turn, in an order that changes from round to round; medians, and the
fastest round beside them.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import statistics
import tempfile
import time
from pathlib import Path

from windlass.fileio import PIECE_BYTES, Files


def write(path: Path, data: memoryview, direct: bool) -> tuple[float, float]:
    wall, processor, digest = time.perf_counter(), time.thread_time(), hashlib.sha256()
    with Files().create(path, direct) as output:
        for at in range(0, len(data), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            digest.update(piece)
            output.write(piece)
        output.sync()
    times = time.perf_counter() - wall, time.thread_time() - processor
    os.unlink(path)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dir", type=Path, help="where to write: the disk that is measured")
    options = parser.parse_args()
    memory = mmap.mmap(-1, options.mb * 2**20)
    memory.write(os.urandom(2**20) * options.mb)
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for turn in range(options.rounds):
            for direct in (True, False) if turn % 2 else (False, True):
                times[direct].append(write(Path(folder) / "file", memoryview(memory), direct))
    print(
        f"{options.mb} MiB, {options.rounds} rounds{'median s':>14}{'fastest s':>12}{'processor s':>13}"
    )
    for direct, rows in times.items():
        wall, processor = zip(*rows, strict=True)
        name = "O_DIRECT" if direct else "page cache"
        print(
            f"{name:<20}{statistics.median(wall):>17.3f}{min(wall):>12.3f}{statistics.median(processor):>13.3f}"
        )


if __name__ == "__main__":
    main()
