"""`jshard init NAME FILE`: copies a model included in jshard, and the files beside it that it imports."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
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
    """The command: `argv` are the arguments after `jshard init`."""
    args = parse(InitArgs, argv, command="jshard init")
    models = shipped_models()
    if args.model not in models:
        near = next(iter(difflib.get_close_matches(args.model, models, n=1)), "gpt")
        raise ShardingError(
            f"No model {args.model!r} is included in jshard.",
            where=f"jshard init {args.model}",
            why=f"the models are {', '.join(models)}.",
            do=_command(near, args.out),
        )
    out = args.out or Path(f"{args.model}.py")
    beside = {out.with_name(file.name): file for file in _neighbours(models[args.model])}
    copies = {out: models[args.model]} | beside
    _check(args.model, out, copies, is_beside=out in beside)
    _check_writable(copies)
    _write(copies)
    print(f"written: {', '.join(map(str, copies))}")
    print(f"train it: {shlex.join(['jshard', 'train', str(out)])}")
    return 0


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


def _write(copies: Mapping[Path, Path]) -> None:
    """Writes all copies, or none: half a model file would be found, and not overwritten, by the next try."""
    begun: list[Path] = []
    try:
        for target, file in copies.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            begun += [] if target.exists() else [target]  # a neighbour from an earlier copy is the same
            target.write_bytes(file.read_bytes())
    except OSError as error:
        for target in begun:
            target.unlink(missing_ok=True)
        raise RunError(
            "The model file could not be written.",
            where=str(error.filename or begun[-1]),
            why=f"{error.strerror}.",
            do="name a file in a folder that you may write, with room for it: jshard init NAME FILE.py",
        ) from error


def _check(model: str, out: Path, copies: Mapping[Path, Path], *, is_beside: bool) -> None:
    """Raises if a file would be overwritten; a neighbour from an earlier copy may already exist."""
    same = lambda copy: copy != out and copy.is_file() and copy.read_bytes() == copies[copy].read_bytes()
    taken = [copy for copy in copies if copy.exists() and not same(copy)]
    folders = (Path(f"{out.with_suffix('')}{number}") for number in itertools.chain([""], itertools.count(2)))
    free = next(folder for folder in folders if not folder.exists())
    if out.suffix != ".py":
        what, why, other = "The copy would not be a model file.", "a model file ends in .py.", out.with_suffix(".py")
    elif is_beside:
        what = "The copy cannot have the name of a file that it imports."
        why, other = f"{model} imports {out.stem}, and would import itself.", free / f"{model}.py"
    elif taken:
        what = "Some files exist already, and none is overwritten."
        why, other = f"{model} is copied as {', '.join(map(str, copies))}.", free / out.name
    else:
        return
    raise ShardingError(what, where=list(map(str, taken or [out])), why=why, do=_command(model, other))


def _command(model: str, out: Path | None) -> str:
    return shlex.join(["jshard", "init", model, *([] if out is None else [str(out)])])


def _neighbours(file: Path) -> list[Path]:
    """The files beside a model file that it imports, and those that they import."""
    found = [file]
    for each in found:  # grows
        beside = (each.with_name(f"{name.partition('.')[0]}.py") for name in _imported(each))
        found += [path for path in dict.fromkeys(beside) if path.is_file() and path not in found]
    return found[1:]


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
