"""`python -m actckpt`."""

import sys

from actckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
