"""`jshard init NAME FILE`: copies a model included in jshard, and the files beside it that it imports."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jshard._files import check_may_write
from jshard.cli._arguments import parse
from jshard.errors import RunError, ShardingError
from jshard.recipes import shipped_models


@dataclasses.dataclass(frozen=True)
class InitArgs:
    """Copies a model included in jshard, for you to edit, and the files beside it that it imports.

    No file is overwritten. Exit codes: 0 done, 2 invalid request.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """Name of a model, e.g. gpt; an unknown one lists them all."""
    out: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="FILE.py")] = None
    """File to write, e.g. my_gpt.py; by default NAME.py."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard init`."""
    args = parse(InitArgs, argv, command="jshard init")
    models = shipped_models()
    if args.model not in models:
        # "gpt" stands in where no name is near.
        nearest, *_ = [*difflib.get_close_matches(args.model, models, n=1), "gpt"]
        raise ShardingError(
            f"No model {args.model!r} is included in jshard.",
            where=f"jshard init {args.model}",
            why=f"the models are {', '.join(models)}.",
            do=_command(nearest, args.out),
        )
    out = args.out or Path(f"{args.model}.py")
    neighbours = {out.with_name(file.name): file for file in _neighbours(models[args.model])}
    copies = {out: models[args.model]} | neighbours
    _check_copies(args.model, out, copies, neighbours)
    _check_writable(copies)
    _write(copies)
    print(f"written: {', '.join(map(str, copies))}")
    print(f"train it: {shlex.join(['jshard', 'train', str(out)])}")
    return 0


# The checks. `copies` are the files to write, with the files that they are copies of.


def _check_copies(model: str, out: Path, copies: Mapping[Path, Path], neighbours: Collection[Path]) -> None:
    """Checks the name of the copy, and that no file would be overwritten."""
    taken = []
    for target in copies:
        if target.exists() and not _is_earlier_copy(target, out, copies):
            taken.append(target)
    places = list(map(str, taken or [out]))
    if out.suffix != ".py":
        raise ShardingError(
            "The copy would not be a model file.",
            where=places,
            why="a model file ends in .py.",
            do=_command(model, out.with_suffix(".py")),
        )
    if out in neighbours:
        raise ShardingError(
            "The copy cannot have the name of a file that it imports.",
            where=places,
            why=f"{model} imports {out.stem}, and would import itself.",
            do=_command(model, _free_folder(out) / f"{model}.py"),
        )
    if taken:
        raise ShardingError(
            "Some files exist already, and none is overwritten.",
            where=places,
            why=f"{model} is copied as {', '.join(map(str, copies))}.",
            do=_command(model, _free_folder(out) / out.name),
        )


def _is_earlier_copy(target: Path, out: Path, copies: Mapping[Path, Path]) -> bool:
    """Returns whether a file is a neighbour, and just what would be copied. The model file is there to be edited."""
    return target != out and target.is_file() and target.read_bytes() == copies[target].read_bytes()


def _check_writable(copies: Mapping[Path, Path]) -> None:
    for target in copies:
        try:
            check_may_write(target)
        except OSError as error:
            raise ShardingError(
                "The model file cannot be written.",
                where=str(target),
                why=f"{error.strerror}: {error.filename}.",
                do="name a file in a folder that you may write: jshard init NAME FILE.py",
            ) from error


def _free_folder(out: Path) -> Path:
    """Returns a folder beside the copy which does not exist: my_gpt, my_gpt2, my_gpt3 ..."""
    folder = out.with_suffix("")
    number = 1
    while folder.exists():
        number += 1
        folder = Path(f"{out.with_suffix('')}{number}")
    return folder


def _command(model: str, out: Path | None) -> str:
    words = ["jshard", "init", model]
    if out is not None:
        words.append(str(out))
    return shlex.join(words)


def _write(copies: Mapping[Path, Path]) -> None:
    """Writes all copies, or none: half a model file would be found, and not overwritten, by the next try."""
    created: list[Path] = []
    try:
        for target, file in copies.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():  # a neighbour from an earlier copy stays, whatever happens
                created.append(target)
            target.write_bytes(file.read_bytes())
    except OSError as error:
        for target in created:
            target.unlink(missing_ok=True)
        raise RunError(
            "The model file could not be written.",
            where=str(error.filename or created[-1]),
            why=f"{error.strerror}.",
            do="name a file in a folder that you may write, with room for it: jshard init NAME FILE.py",
        ) from error


# The files that a model file imports.


def _neighbours(file: Path) -> list[Path]:
    """Returns the files beside a model file that it imports, and those that they import."""
    files = [file]
    for importer in files:  # grows while it is walked: also what a neighbour imports is copied
        for module in _imported_modules(importer):
            path = importer.with_name(f"{module}.py")
            if path.is_file() and path not in files:
                files.append(path)
    return files[1:]


def _imported_modules(file: Path) -> Iterator[str]:
    """Yields the first names of the modules that a file imports: "jax" for `jax.numpy`."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:  # model files have no package
            yield node.module.partition(".")[0]
