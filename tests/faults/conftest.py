import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def scratch() -> Iterator[Path]:
    """An empty folder, in memory if possible: fault tests save thousands of times, and a kill asks
    for no real disk.
    """
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(
        prefix="windlass-test-", dir=memory, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)
