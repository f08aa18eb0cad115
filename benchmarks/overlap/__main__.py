"""`python -m benchmarks.overlap`."""

import sys

from benchmarks.overlap.command import main

if __name__ == "__main__":
    sys.exit(main())
