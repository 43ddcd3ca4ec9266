"""`python -m windlass.launch WORLD COMMAND...`: a command on local ranks; for the proofs of `verify`."""

import os
import sys

from windlass.launch.local import launch
from windlass.processes import PARENT, exit_with_parent

if __name__ == "__main__":
    if parent := os.environ.pop(PARENT, ""):
        exit_with_parent(int(parent))
    sys.exit(launch(sys.argv[2:], int(sys.argv[1])))
