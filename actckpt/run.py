"""`python -m actckpt.run`, for launchers of several processes: the same as `actckpt run`."""

import sys

from actckpt.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
