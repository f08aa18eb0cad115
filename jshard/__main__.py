"""The command `jshard` as a process; `python -m jshard` is the same."""

import atexit
import gc
import sys
from typing import NoReturn

from jshard.cli import leave_if_worker, main


def run() -> NoReturn:
    """Runs the command, and ends the process with its exit code."""
    # Tracing creates millions of objects, few of them garbage: garbage collection takes a tenth of a short run, and its
    # last pass, at the end of Python, half a second.
    gc.set_threshold(200_000, 20, 50)
    atexit.register(gc.freeze)
    code = main()
    leave_if_worker(code)
    if sys.argv[1:2] == ["train"]:
        from jshard.launch import END_S, end_within

        end_within(END_S, code)
    sys.exit(code)


if __name__ == "__main__":  # data workers import the main module again
    run()
