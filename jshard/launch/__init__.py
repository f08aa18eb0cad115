"""A run in several processes: finding them, starting them, and reporting the loss of one.

JAX ends the whole process, with a C++ trace and without an exception, when a peer does not come or dies. So a run in
several processes has two kinds of process. A *worker* trains: one per process of the run. A *supervisor* never
requests a device from JAX: it starts the worker (on one machine, all workers), watches it, and reports what happened.
A cluster has one supervisor beside each worker, and those of the other machines are linked to that of process 0 by a
small TCP connection, the roll call.

The roll call is at the port after that of JAX's coordinator (under Slurm and Open MPI 4096 below it), or at
JSHARD_ROLL_CALL_PORT; both ports must be open between the machines. All time-outs are in `Deadlines`. JSHARD_DEBUG=1
shows the stderr of all workers. With `Restarts` a run that loses a process is restarted.

    in the command      supervise(command, processes=2) or supervise(command, cluster=detect())
    in the worker       start_worker(), note(step=..., checkpoint=...), leave(code)
    in any run          with StallWatch().over(...): set_phase("waiting for data"), step_done(12)
"""

from jshard.launch.cluster import Cluster, Deadlines, is_worker, stopped_code
from jshard.launch.detection import ONE_POD, detect
from jshard.launch.restarts import Restarts, previous_attempt
from jshard.launch.stall import StallWatch, set_phase, step_done
from jshard.launch.stop_signal import StopSignal
from jshard.launch.supervisor import supervise
from jshard.launch.worker import END_S, end_within, leave, note, start_worker

__all__ = [
    "END_S",
    "ONE_POD",
    "Cluster",
    "Deadlines",
    "Restarts",
    "StallWatch",
    "StopSignal",
    "detect",
    "end_within",
    "is_worker",
    "leave",
    "note",
    "previous_attempt",
    "set_phase",
    "start_worker",
    "step_done",
    "stopped_code",
    "supervise",
]
