"""`python -m windlass` is the command `windlass`."""

import contextlib
import os
import sys

with contextlib.suppress(FileNotFoundError):  # a working directory that was removed
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():
        del sys.path[0]  # a user's random.py there is not the module of that name

from windlass.cli import main

if __name__ == "__main__":
    main()
