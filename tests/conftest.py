"""Eight CPU devices for every test, whatever the machine has; set up before jax starts."""

import atexit
import gc
import os
import pathlib
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator

from tests import crashes, durations
from tests.compiling import XLA_FLAGS

# XLA:CPU aborts the process when a thread comes late to a collective, as on a loaded machine. It must not wait for
# ever, either: there are hangs in it, see crashes.py, and CI has a limit for everything.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_collective_call_terminate_timeout_seconds=400"
    + " --xla_cpu_collective_timeout_seconds=400 "
    + XLA_FLAGS
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The terminals that tests make up are not dumb, whatever the one is that runs them.
os.environ["TERM"] = "xterm-256color"
os.environ.pop("NO_COLOR", None)

# The key of the user who runs the tests stays what it is: see jshard/train/trust.py.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="jshard-tests-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jshard import _compat

jax.config.update("jax_num_cpu_devices", 8)
# Strict dtype promotion is not possible: Flax norms mix bfloat16 with float32 on purpose.
jax.config.update("jax_numpy_rank_promotion", "raise")


class Programs:
    """Compiled programs, on disk: what jax asks of its cache. jax itself writes in place; others would read half."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._path = folder  # under this name jax looks for it

    def get(self, key: str) -> bytes | None:
        path = self._path / key
        return path.read_bytes() if path.exists() else None

    def put(self, key: str, value: bytes) -> None:
        draft = self._path / f"{key}.{os.getpid()}"
        draft.write_bytes(value)
        draft.replace(self._path / key)


def _keep_programs() -> None:
    folder = os.environ[_PROGRAMS]
    _compat.set_program_cache(Programs(pathlib.Path(folder)), folder)


# Most of what tests cost is compiling, and much of that is done again, by another test or another worker of xdist, as
# of operations outside of jit: each program is compiled once in a run of the tests. Programs that differ in names are
# not the same, as units are found by them; on which line they were written makes no difference.
_PROGRAMS = "JSHARD_TESTS_PROGRAMS"
if _PROGRAMS not in os.environ:
    os.environ[_PROGRAMS] = tempfile.mkdtemp(prefix="jshard-tests-")
    atexit.register(shutil.rmtree, os.environ[_PROGRAMS], ignore_errors=True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
jax.config.update("jax_traceback_in_locations_limit", 0)
_keep_programs()

# Tracing makes many objects, and a walk over those of all modules and tests, again and again, is a tenth of the time.
gc.set_threshold(200_000, 20, 50)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds options about time: see tests/durations.py."""
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.txt from this run")
    parser.addoption("--stop-after-s", type=float, default=None, help="skip the tests that have not begun by then")


def pytest_configure(config: pytest.Config) -> None:
    """Registers what needs the reports of all tests in the process that has them: not in a worker of xdist."""
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        config.pluginmanager.register(crashes.Crashes())
    if config.getoption("--record-durations") and not is_worker:
        config.pluginmanager.register(durations.Recorder())
    stop_after_s = config.getoption("--stop-after-s")
    if stop_after_s is not None:
        config.pluginmanager.register(durations.TimeLimit(time.monotonic(), stop_after_s))


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders the files, and marks what `make test` leaves out."""
    has_limit = config.getoption("--stop-after-s") is not None
    durations.order_and_mark(items, long_files_first=not has_limit)


def pytest_collection_finish() -> None:
    """What was imported and collected lives to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _left_by_a_file_is_not_walked() -> Iterator[None]:
    """A read that fails ends with a full collection: of seconds, if it walks over all that other files left."""
    yield
    gc.freeze()


@pytest.fixture
def signals_as_usual() -> Iterator[None]:
    """Signals as a terminal leaves them, here and in child processes: `nohup make test &` ignores two of them."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def no_stored_programs() -> Iterator[None]:
    """A compiler without devices cannot load a program that the tests' cache has kept."""
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    _keep_programs()


@pytest.fixture
def ranks_as_users_have_them() -> Iterator[None]:
    """Arrays of different ranks may be added, as by default in JAX; the other tests refuse it."""
    with jax.numpy_rank_promotion("allow"):
        yield
