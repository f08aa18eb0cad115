"""Runs a benchmark, prints its table, and writes table, figures and pictures into a folder.

    python -m benchmarks.run                 # what there is
    python -m benchmarks.run step            # into benchmarks/results/
    python -m benchmarks.run step --quick --out /tmp/figures
    python -m benchmarks.run merge FILES     # of the processes of a cluster, into one report

The figures are valid for the machine on which they were measured; only ratios within a table can be compared.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if not __package__:  # started as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.cases import CASES
from benchmarks.reports import markdown, measure, merge, write

_RESULTS = Path(__file__).parent / "results"
_OVERLAP = "kernels beside a collective, on GPUs; its options are its own: python -m benchmarks.overlap --help"


def main() -> None:
    """Reads the command line and runs the request."""
    parser, first = _parser(), sys.argv[1:2]
    if not first:
        parser.print_help()
        return
    if first == ["overlap"]:
        from benchmarks.overlap.command import main as overlap

        sys.exit(overlap(sys.argv[2:]))
    if first[0] in CASES:
        _add_options(parser, first[0])
    args = vars(parser.parse_args())
    case, out, files = args.pop("case"), args.pop("out"), args.pop("files")
    reports = iter([merge([Path(file) for file in files])]) if case == "merge" else measure(case, **args)
    for report in reports:
        paths = write(report, out)  # of a case that grows each one: what there is survives the end of this process
    for path in paths:
        print(path)
    print("\n" + markdown(report))


def _parser() -> argparse.ArgumentParser:
    others = {"overlap": _OVERLAP, "merge": "the reports of several processes, as one"}
    whats = {name: case.what for name, case in CASES.items()} | others
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        epilog="\n".join(["cases:", *(f"  {name:<12}{what}" for name, what in whats.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("case", choices=whats, metavar="CASE", help="what to measure; nothing lists them")
    parser.add_argument("files", nargs="*", metavar="FILE", help="for merge: the JSON files")
    parser.add_argument("--out", type=Path, default=_RESULTS, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds: only to see that it works")
    parser.add_argument("--note", default="", metavar="TEXT", help="what else a reader of the report must know")
    return parser


def _add_options(parser: argparse.ArgumentParser, case: str) -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    add = getattr(CASES[case].load(), "arguments", None)
    if add is not None:
        add(parser.add_argument_group(f"options of {case}"))


if __name__ == "__main__":
    main()
