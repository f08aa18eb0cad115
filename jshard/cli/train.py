"""`jshard train MODEL`: trains a recipe, or with --dry-run prints its plan; starts the processes if there are several.

With `--max-restarts` and `--min-processes`, the numbers of processes that could continue are known before the start.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from jshard import launch
from jshard._children import module_command
from jshard._text import counted
from jshard.cli import loading
from jshard.cli._arguments import TrainArgs, parse
from jshard.cli._devices import as_option, num_devices, parse_mesh
from jshard.errors import RunError, ShardingError


class ProcessArgs(Protocol):
    """The options of every command that may run in several processes."""

    @property
    def processes(self) -> int:
        """How many to start on this machine."""
        ...

    @property
    def mesh(self) -> str:
        """Degrees of the mesh axes."""
        ...


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard train`."""
    args = parse(TrainArgs, argv, command="jshard train")
    starts_processes = not (args.dry_run or args.print_config or launch.is_worker())
    if starts_processes:
        cluster = launch.detect(command=shlex.join(["jshard", "train", *argv]))
        # Also a single process has a supervisor if it may be restarted.
        if cluster is not None or args.processes != 1 or args.max_restarts:
            return _supervise(args, argv, cluster)
        if "KUBERNETES_SERVICE_HOST" in os.environ and "JAX_NUM_PROCESSES" not in os.environ:
            print(launch.ONE_POD, file=sys.stderr)
    with loading():
        from jshard.cli._training import train  # here: it imports jax, which a launcher does not need

    return train(args)


def _supervise(args: TrainArgs, argv: Sequence[str], cluster: launch.Cluster | None) -> int:
    check_processes(args, cluster)
    return launch.supervise(
        module_command("jshard", "train", *argv),
        # On a cluster each supervisor starts the one worker of its own process.
        processes=args.processes if cluster is None else None,
        cluster=cluster,
        deadlines=launch.Deadlines(init_s=args.init_timeout, peer_s=args.peer_timeout),
        again=args.again(),
        restarts=restarts_of(args, argv, cluster),
    )


def check_processes(args: ProcessArgs, cluster: launch.Cluster | None) -> None:
    """Checks that the requested processes may be started, and can share the devices of the mesh."""
    if cluster is not None and args.processes != 1:
        raise ShardingError(
            "The processes are already started.",
            where=f"--processes {args.processes}",
            why=f"this is process {cluster.process_id} of {cluster.num_processes} ({cluster.kind}).",
            do="leave out --processes on a cluster.",
        )
    devices = num_devices(parse_mesh(args.mesh))
    if cluster is not None:
        return  # there each process has devices of its own
    if args.processes < 1 or devices % args.processes:
        raise ShardingError(
            f"{counted(args.processes, 'process')} cannot share the devices.",
            where=f"--processes {args.processes} --mesh {args.mesh or f'fsdp={devices}'}",
            why=f"the mesh has {counted(devices, 'device')}, and every process simulates the same number.",
            do=f"--processes {_largest_divisor(devices, max(args.processes, 1))}",
        )


def _largest_divisor(number: int, limit: int) -> int:
    """Returns the largest divisor of a number up to a limit."""
    divisor = min(number, limit)
    while number % divisor:
        divisor -= 1
    return divisor


def restarts_of(args: TrainArgs, argv: Sequence[str], cluster: launch.Cluster | None) -> launch.Restarts | None:
    """Returns the restarts requested after a loss; None if a loss ends the run. `argv` are the options as given."""
    if args.max_restarts < 0 or (args.max_restarts == 0 and args.min_processes is not None):
        raise ShardingError(
            "The restart options are not valid.",
            where=f"--max-restarts {args.max_restarts}",
            why="--max-restarts is 0 or more, and --min-processes needs at least 1 restart.",
            do="--max-restarts 3",
        )
    if args.max_restarts == 0:
        return None

    def command(folder: str | None, mesh: str | None) -> list[str]:
        options = args
        if mesh is not None:
            # A plan is for one mesh: a run that continues on another cannot be compared with it.
            options = dataclasses.replace(args, mesh=mesh, expect=None)
        words = options.words(None if folder is None else Path(folder))
        # Without a folder nothing was started: --resume alone could resume an older run.
        if args.resume or folder is not None:
            words = [*words, "--resume"]
        return module_command("jshard", "train", *words)

    meshes = None
    if args.min_processes is not None:
        meshes = _smaller_meshes(args, args.min_processes, argv, cluster)
    return launch.Restarts(
        most=args.max_restarts, command=command, meshes=meshes, keeps_copies=args.keep_in_memory is not None
    )


# With --min-processes: the meshes of fewer processes.

# As text: `jshard.plans.mesh` imports JAX, for which a supervisor would wait.
_KEPT_AXES = ("pipe", "expert", "context", "tensor")
_DATA_AXES = ("replica", "fsdp", "pipe", "expert")  # the batch is divided over them


def shrunk(sizes: Mapping[str, int], *, processes: int, of: int) -> dict[str, int] | None:
    """Returns the degrees of a mesh for so many processes `of` all.

    It has fewer replicas, or if they do not divide, less `fsdp`. None if the degrees that are kept do not divide the
    remaining devices.
    """
    devices = math.prod(sizes.values())
    kept_degree = _degree_over(_KEPT_AXES, sizes)
    remaining = devices // of * processes
    if devices % of or remaining % kept_degree:
        return None
    # Divided among `replica` and `fsdp`. The largest `fsdp` comes first: with fewer shards each is larger.
    data_devices = remaining // kept_degree
    for shards in range(sizes.get("fsdp", 1), 0, -1):
        replicas, rest = divmod(data_devices, shards)
        if rest == 0 and replicas <= sizes.get("replica", 1):
            return {**sizes, "replica": replicas, "fsdp": shards}
    return None


def _smaller_meshes(
    args: TrainArgs, min_processes: int, argv: Sequence[str], cluster: launch.Cluster | None
) -> dict[int, str]:
    """Returns the mesh for each number of processes that could continue; reports which could not."""
    sizes = parse_mesh(args.mesh)
    if cluster is None:
        raise _not_with_fewer(
            [f"--min-processes {min_processes}"],
            why="on one machine all processes are restarted; only on a cluster can a run continue with fewer.",
            do="leave out --min-processes.",
        )
    number = cluster.num_processes
    _check(args, min_processes, number, sizes)
    batch_size, accumulate = _batch(argv)
    meshes: dict[int, str] = {}
    lines: list[str] = []
    for count in range(number - 1, min_processes - 1, -1):
        mesh = shrunk(sizes, processes=count, of=number)
        problem = _problem(mesh, batch_size // accumulate, args)
        if mesh is None or problem is not None:
            lines.append(f"{counted(count, 'process')} cannot continue: {problem}")
            continue
        # `fsdp` stays even with degree 1: an option without it gives it all devices.
        named = {axis: degree for axis, degree in mesh.items() if degree > 1 or axis == "fsdp"}
        meshes[count] = as_option(named)
        lines.append(f"{counted(count, 'process')} can continue: --mesh {meshes[count]}")
    if not meshes and min_processes < number:
        raise ShardingError(
            "No smaller number of processes could continue.",
            where=[f"--min-processes {min_processes} --mesh {args.mesh}", *lines],
            why="the data axes of the mesh shrink with the processes, and the batch must divide over them.",
            do="--set batch_size=N with an N that the smaller meshes divide; or leave out --min-processes.",
        )
    # All processes have computed the same lines; process 0 prints them.
    if cluster.process_id == 0 and lines:
        print("after a loss:", *lines, sep="\n  ", file=sys.stderr, flush=True)
    return meshes


def _degree_over(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Returns the product of the degrees of some axes; an axis that a mesh lacks has degree 1."""
    return math.prod(sizes.get(axis, 1) for axis in axes)


def _problem(mesh: Mapping[str, int] | None, microbatch_size: int, args: TrainArgs) -> str | None:
    """Returns the reason why a run cannot continue on a smaller mesh; None if it can."""
    if mesh is None:
        return f"their devices do not divide into --mesh {args.mesh}"
    shards = _degree_over(_DATA_AXES, mesh)
    if microbatch_size % shards == 0:
        return None
    parts = f"{counted(microbatch_size, 'sequence')} over {counted(shards, 'data shard')}"
    return f"{parts} (--mesh {as_option(mesh)})"


def _check(args: TrainArgs, min_processes: int, number: int, sizes: Mapping[str, int]) -> None:
    """Checks that fewer of this number of processes may continue, and that their meshes are known before the start."""
    where = [f"--min-processes {min_processes}"]
    if not number / 2 < min_processes <= number:
        raise _not_with_fewer(
            where,
            why=f"more than half of {number} must continue, so that a split network never leaves two runs; at most "
            "all.",
            do=f"--min-processes {number // 2 + 1}",
        )
    if args.auto or -1 in sizes.values() or "fsdp" not in sizes:
        auto = " --auto" if args.auto else ""
        raise _not_with_fewer(
            [*where, f"--mesh {args.mesh or '(all devices)'}{auto}"],
            why="the smaller meshes are checked now, not after a loss, so the mesh must be known.",
            do="name all degrees: --mesh fsdp=N, or replica=M,fsdp=N, for all devices.",
        )


def _not_with_fewer(where: list[str], *, why: str, do: str) -> ShardingError:
    return ShardingError("The run could not continue with fewer processes.", where=where, why=why, do=do)


def _batch(argv: Sequence[str]) -> tuple[int, int]:
    """Returns the recipe's `batch_size` and `accumulate`.

    A process of its own reads them, as this one does not import JAX.
    """
    command = module_command("jshard", "train", *argv, "--print-config")
    # It is a command of its own: with these variables it would join the run as a worker.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JSHARD_WORKER")}
    environ["JAX_PLATFORMS"] = "cpu"
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        error = ShardingError if result.returncode == 2 else RunError
        reason = result.stderr.strip() or f"it ended with exit code {result.returncode}"
        raise error(
            "The recipe could not be read.",
            where="--print-config, from which --min-processes reads the batch size",
            why=reason[-2000:],
            do="jshard train ... --print-config  # shows it alone",
        )
    recipe = json.loads(result.stdout)["recipe"]
    return recipe["batch_size"], recipe["accumulate"]
