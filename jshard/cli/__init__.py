"""The `jshard` command: one module per subcommand, each imported only when it is used.

Exit codes: 0 done, 1 the work failed, 2 an invalid request, 130 Ctrl-C before the work began. An error has
four parts; `--debug` anywhere, or JSHARD_DEBUG=1, shows its traceback as well.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from jshard import __version__, _compat
from jshard._live import at_work, fitted
from jshard.errors import FourPartError, MissingExtraError, RunError, ShardingError, is_request, printable

COMMANDS = {
    "train": "train a recipe of a model file, or of an included model",
    "sample": "generate text with the model of a run",
    "eval": "compute the loss of a run's model on held-out samples",
    "init": "copy an included model, to edit it",
    "plan": "report what a recipe needs, compiled for a cluster that you need not own",
    "trace": "report the steps in a profile: computing, communicating, both, idle",
    "ckpt": "work with checkpoints: ls, inspect, verify, diff, reshard, import, export, timeline",
    "occupancy": "report how many blocks of a kernel fit on an SM, and whether a collective fits beside them",
    "tune": "find the best kernel settings beside a model's collectives: measured, or ranked without a GPU",
}

_NOTE = "--debug anywhere, or JSHARD_DEBUG=1, shows the traceback of an error. --version prints the version."

_DEBUG = "JSHARD_DEBUG"
_PACKAGES = ("tyro", "grain", "matplotlib")  # of the extra "train"
_SHORTENED = ("JAX_TRACEBACK_FILTERING", "grain_py_traceback_filtering")  # in notes that a traceback was shortened

# XLA:CPU aborts the process when simulated devices reach a collective too late, as on a busy machine.
_XLA_CPU_FLAGS = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
    "--xla_cpu_collective_timeout_seconds=1200",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, and prints its error.

    Args:
        argv: the arguments after the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = [argument for argument in argv if argument != "--debug"]
    with _debug_in_environment(len(arguments) < len(argv)):
        try:
            code = _run(arguments)
            with contextlib.suppress(BrokenPipeError):
                print(end="", flush=True)  # now: a full disk is an error of the command
            return code
        except SystemExit:  # of the parser, which has printed the help
            raise
        except BaseException as error:
            code = _report(error, arguments)
            leave_if_worker(code, error)
            return code
        finally:
            _flush_stdout()


def leave_if_worker(code: int, error: BaseException | None = None) -> None:
    """Ends one of several processes: after its peers, or immediately if it has failed."""
    if "JSHARD_WORKER" in os.environ:
        from jshard import launch

        launch.leave(code, error=error)


@contextlib.contextmanager
def _debug_in_environment(debug: bool) -> Iterator[None]:
    """Passes `--debug` on to the processes that the command starts."""
    before = os.environ.get(_DEBUG, "")
    os.environ[_DEBUG] = "1" if debug else before
    try:
        yield
    finally:
        # A program may call `main` several times: the variable is as it was.
        os.environ[_DEBUG] = before


def _run(argv: Sequence[str]) -> int:
    if not argv:
        print(usage("jshard", COMMANDS, _NOTE), file=sys.stderr)
        return 2
    if argv[0] in ("-h", "--help") or list(argv) == ["help"]:
        print(usage("jshard", COMMANDS, _NOTE))
        return 0
    name, *rest = argv
    if name == "help":
        name, *rest = [*rest, "--help"]
    if name in ("version", "--version"):
        print(f"jshard {__version__}")
        return 0
    _set_xla_flags()
    _compat.hide_useless_plugins()
    return _command(name, rest)(rest)


def _set_xla_flags() -> None:
    """Adds our flags to those of the user, who may have set some of them to other values."""
    of_user = os.environ.get("XLA_FLAGS", "")
    # By name, whatever the value: the user's own one counts.
    missing = [flag for flag in _XLA_CPU_FLAGS if flag.partition("=")[0] not in of_user]
    os.environ["XLA_FLAGS"] = " ".join([of_user, *missing]).strip()


def _command(name: str, rest: Sequence[str]) -> Callable[[Sequence[str]], int]:
    if name not in COMMANDS:
        raise no_command("jshard", name, rest, COMMANDS)
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingExtraError(
            f"{', '.join(missing)} is not installed.",
            where=f"jshard {name}",
            why="the library does not need it; this command needs the extra 'train'.",
            do="pip install 'jshard[train]'",
        )
    with loading():
        return importlib.import_module(f"jshard.cli.{name}").run


# Errors.


def _report(error: BaseException, argv: Sequence[str]) -> int:
    """Prints an error; returns its exit code."""
    if isinstance(error, BrokenPipeError) and _nobody_reads():
        return 1
    error = _in_four_parts(error, argv)
    with contextlib.suppress(BrokenPipeError):
        _print_error(error)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if is_request(error) else 1


def _print_error(error: BaseException) -> None:
    is_explained = isinstance(error, FourPartError | KeyboardInterrupt)
    is_debugging = os.environ.get(_DEBUG, "0") not in ("", "0")
    if is_debugging or not is_explained:
        # An error without four parts is one in the user's file or in ours, and needs its traceback.
        print(printable("".join(traceback.format_exception(error)), keep="\n\t"), end="", file=sys.stderr)
    if isinstance(error, FourPartError):
        notes: list[str] = []
        for note in getattr(error, "__notes__", ()):
            if not any(name in note for name in _SHORTENED):
                notes.append(printable(note, keep="\n\t"))
        print(_wrapped(f"{type(error).__name__}: {error}"), *notes, sep="\n", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr)


def _wrapped(text: str) -> str:
    """Returns the text of an error. On a terminal sentences wrap between words; what is to be copied stays whole."""
    lines: list[str] = []
    part = "what"
    for line in text.splitlines():
        head = re.match(r"  (where|why|do): ", line)
        if head is not None:
            part = head[1]
        if part == "what":
            lines.append(fitted(line, sys.stderr))
        elif part == "why":
            lines.append(fitted(line, sys.stderr, indent=" " * 9))
        else:  # places, and lines to paste
            lines.append(line)
    return "\n".join(lines)


def _in_four_parts(error: BaseException, argv: Sequence[str]) -> BaseException:
    """Returns the four-part form of an error; the error itself if it has none."""
    import jax  # here: the processes that read data import this module, too

    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        return _out_of_memory(error, argv)
    return _of_model_file(error) or _of_the_system(error) or error


def _caused_by(error: BaseException, explained: RunError) -> RunError:
    """Returns the four-part form of an error, with the error as its cause, and its notes, such as how to continue."""
    explained.__cause__ = error
    explained.__notes__ = getattr(error, "__notes__", [])
    return explained


def _out_of_memory(error: BaseException, argv: Sequence[str]) -> RunError:
    first_line, *_ = str(error).splitlines()
    explained = RunError(
        "The devices are out of memory.",
        where=shlex.join(["jshard", *argv]),
        why=first_line,
        do="shard over more devices: --mesh fsdp=N with a larger N;\n"
        "or fewer sequences at a time: --set accumulate=2 (the same batch in two microbatches), --set batch_size=N;\n"
        'or keep less for the backward pass: js.fully_shard(block, mesh=mesh, remat="full") in annotate.\n'
        "--dry-run  # prints the bytes that the plan needs",
    )
    return _caused_by(error, explained)


def _of_model_file(error: BaseException) -> RunError | None:
    """Returns the four-part form of an error that the user's model file raised; None for any other."""
    if isinstance(error, FourPartError) or not isinstance(error, Exception):
        return None
    places, is_ours = _places_in_model_file(error)
    if not places or is_ours:
        return None
    explained = RunError(
        "The model file raised an error.",
        where=places,
        why=f"{type(error).__name__}: {error}",
        do="correct it; --debug shows the whole traceback.",
    )
    return _caused_by(error, explained)


def _places_in_model_file(error: BaseException) -> tuple[list[str], bool]:
    """Returns the lines of the model file in a traceback, and whether it ends in this library, which is at fault."""
    from jshard.data.worker_pool import MODEL_FILE  # here: it imports numpy

    places: list[str] = []
    module = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(MODEL_FILE):
            code = frame.f_code
            places.append(f"{code.co_filename}, line {line}, in {code.co_name}")
    return places, module.startswith("jshard.")


def _of_the_system(error: BaseException) -> RunError | None:
    """Returns the four-part form of an error of a disk or file; None for any other."""
    if not isinstance(error, OSError) or isinstance(error, FourPartError | ConnectionError):
        return None
    if error.strerror is None:  # a library raised it with a text of its own
        return None
    explained = RunError(
        "A file could not be read or written.",
        where=str(error.filename or "standard output, or a file without a name"),
        why=f"{error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)}).",
        do="make room on the disk, or name another file; --debug shows where it failed.",
    )
    return _caused_by(error, explained)


# Standard output.


def _nobody_reads() -> bool:
    """Returns whether stdout is a pipe closed by its reader, as in `jshard ... | head`."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _flush_stdout() -> None:
    """Flushes stdout, so that a closed pipe is detected here and not at Python's exit."""
    if sys.stdout is None:  # closed, in a program that calls `main`
        return
    try:
        print(end="", flush=True)
    except OSError:  # also of a full disk, which was reported
        with contextlib.suppress(OSError):  # stdout is not a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Help.


def usage(program: str, commands: Mapping[str, str], note: str) -> str:
    """Returns the help of a program with commands, wrapped between words like that of the commands themselves.

    Args:
        program: its name.
        commands: a summary of each command.
        note: a last sentence.
    """
    margin = max(map(len, commands)) + 4
    lines = [_filled(f"usage: {program} COMMAND [ARGUMENTS], or {program} COMMAND --help", indent=7), "", "commands:"]
    for name, summary in commands.items():
        lines.append(_filled(f"  {name}".ljust(margin) + summary, indent=margin))
    lines += ["", _filled(note, indent=0)]
    return "\n".join(lines)


def _filled(text: str, *, indent: int) -> str:
    """Returns a text wrapped between words, with an indent from its second line on."""
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(text, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def no_command(program: str, name: str, rest: Sequence[str], commands: Iterable[str]) -> ShardingError:
    """Returns the error for an unknown command, with the nearest one."""
    near = difflib.get_close_matches(name, commands, n=1)
    command = [*program.split(), near[0], *rest] if near else [*program.split(), "--help"]
    return ShardingError(
        f"There is no command {name!r}.",
        where=f"{program} {name}",
        why=f"the commands are {', '.join(commands)}.",
        do=shlex.join(command),
    )


def loading() -> contextlib.AbstractContextManager[object]:
    """Shows on a terminal, while the block imports jax and its dependents, that this is in progress."""
    stream = None if "JSHARD_WORKER" in os.environ else sys.stderr
    return at_work("loading jax and Flax", say=lambda line: None, stream=stream)
