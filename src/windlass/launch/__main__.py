"""`python -m windlass.launch WORLD COMMAND...`: a command on local ranks; for the proofs of `verify`."""

import sys

from windlass.launch.local import launch

if __name__ == "__main__":
    sys.exit(launch(sys.argv[2:], int(sys.argv[1])))
