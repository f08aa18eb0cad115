"""`jshard train MODEL`: trains a recipe, or with --dry-run prints its plan; in several processes, starts them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jshard import launch
from jshard.cli import loading
from jshard.cli._arguments import TrainArgs, num_devices, parse, parse_mesh
from jshard.errors import ShardingError


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard train`."""
    args = parse(TrainArgs, argv, command="jshard train")
    if not (args.dry_run or args.print_config or launch.is_worker()):
        cluster = launch.detect(command=shlex.join(["jshard", "train", *argv]))
        if cluster is not None or args.processes != 1 or args.max_restarts:
            return _supervise(args, argv, cluster)
        if "KUBERNETES_SERVICE_HOST" in os.environ and "JAX_NUM_PROCESSES" not in os.environ:
            print(launch.ONE_POD, file=sys.stderr)
    with loading():
        from jshard.cli._training import train  # here: it brings jax, and whoever only starts others does without

    return train(args)


def _supervise(args: TrainArgs, argv: Sequence[str], cluster: launch.Cluster | None) -> int:
    if args.processes != 1 and cluster is not None:
        raise ShardingError(
            "There are processes already.",
            where=f"--processes {args.processes}",
            why=f"this is process {cluster.process_id} of {cluster.num_processes} ({cluster.kind}).",
            do="leave out --processes on a cluster.",
        )
    if args.max_restarts < 0:
        raise ShardingError(
            "The restarts make no sense.",
            where=f"--max-restarts {args.max_restarts}",
            why="a run is restarted 0 times or more often.",
            do="--max-restarts 3",
        )
    devices = num_devices(parse_mesh(args.mesh))
    if cluster is None and (args.processes < 1 or devices % args.processes):
        raise ShardingError(
            f"{args.processes} processes cannot share the devices.",
            where=f"--processes {args.processes} --mesh {args.mesh or f'fsdp={devices}'}",
            why=f"the mesh has {devices} devices, and each process simulates as many as the others.",
            do=f"--processes {next(n for n in range(min(devices, max(args.processes, 1)), 0, -1) if devices % n == 0)}",
        )
    program = [sys.executable, "-m", "jshard", "train"]

    def resumed(folder: str | None) -> list[str]:
        # Without a folder nothing was begun: --resume alone could take up an older run.
        words = args.words(None if folder is None else Path(folder))
        return [*program, *words, *(["--resume"] if args.resume or folder is not None else [])]

    return launch.supervise(
        [*program, *argv],
        processes=args.processes if cluster is None else None,
        cluster=cluster,
        deadlines=launch.Deadlines(init_s=args.init_timeout, peer_s=args.peer_timeout),
        again=args.again(),
        max_restarts=args.max_restarts,
        resumed=resumed,
    )
