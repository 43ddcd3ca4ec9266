"""`python -m windlass` is the command `windlass`."""

from windlass.cli import main

if __name__ == "__main__":
    main()
