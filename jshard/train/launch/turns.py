"""How the threads of CPU processes share the cores of a machine."""

import contextlib
import os


def take_turns() -> None:
    """Lets no thread of this process take a core from another one that runs, if its devices are CPUs (Linux only).

    Gloo has a thread that asks the kernel for what has arrived, and asks again at once while another thread holds the
    lock of the connection. Woken while that one sends, it takes its core, and spins until the kernel's next tick:
    measured on two cores, up to 4 ms for a small all-reduce, which otherwise takes 0.2.

    To be called when JAX has opened its devices; threads that start later are treated likewise.
    """
    import jax  # here: a supervisor does without

    if not hasattr(os, "SCHED_BATCH") or jax.default_backend() != "cpu":
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended, or a sandbox forbids it: then all is as it was
            os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))
