"""The command `jshard` as a process; `python -m jshard` is the same."""

import atexit
import gc
import os
import sys


def run() -> None:
    """Runs the command, and ends the process with its exit code."""
    # Here, not above: `python -m` has the working folder in sys.path until now.
    from jshard._streams import escape_what_cannot_be_written, open_standard_streams
    from jshard.cli import leave_if_worker, main
    from jshard.cli._signals import end_promptly

    open_standard_streams()
    escape_what_cannot_be_written()
    end_promptly()

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


def _leave_working_folder() -> None:
    """Takes the folder that `python -m` puts first out of `sys.path`: its `random.py` would replace Python's."""
    if not sys.flags.safe_path and sys.path[:1] in ([os.getcwd()], [""]):
        del sys.path[0]


if __name__ == "__main__":  # data workers import the main module again
    _leave_working_folder()
    run()
