"""Runs a benchmark, prints its table, and writes table and figures into a folder.

    python benchmarks/run.py                 # what there is
    python benchmarks/run.py dispatch        # into benchmarks/results/
    python benchmarks/run.py dispatch --quick --out /tmp/figures

The figures stand for the machine that they were measured on; what can be compared are the ratios within a table.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

CASES = {
    "checkpoint": "saving and restoring, beside Orbax as it is, PyTorch's distributed checkpoints, and plain files",
    "dispatch": "host work per step, beside nnx.jit and nnx.cached_partial",
    "memory": "memory of a step, estimated and compiled for GPU clusters; needs the extra plan-gpu, and no GPU",
}
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tensorboardX", "torch")
_QUIET_LOAD = 0.25  # per core


def main() -> None:
    """Reads the command line and runs what it asks for."""
    cases = "\n".join(f"  {name:<12}{what}" for name, what in CASES.items())
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py", epilog=f"cases:\n{cases}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", nargs="?", choices=CASES, help="what to measure; nothing lists the cases")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds: only to see that it works")
    args = parser.parse_args()
    if args.case is None:
        parser.print_help()
        return
    jax.config.update("jax_num_cpu_devices", 8)
    report = measure(args.case, quick=args.quick)
    for path in write(report, args.out):
        print(path)
    print("\n" + markdown(report))


def measure(case: str, *, quick: bool) -> dict[str, Any]:
    """The figures of a case, with what is needed to judge them."""
    module = importlib.import_module(case)
    before = _load()
    result = module.run(quick=quick)
    return {
        "case": case,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "quick": quick,
        "machine": _machine(),
        "load_per_core_before": before,
        "versions": _versions(),
        **result,
        "lines": [f"# {module.TITLE}", "", *_remarks(module, quick, before), "", *module.table(result)],
    }


def write(report: dict[str, Any], out: Path) -> tuple[Path, Path]:
    """Writes <date>_<case>.json and .md; those of an earlier run on the same day make way."""
    out.mkdir(parents=True, exist_ok=True)
    stem = f"{report['date'][:10]}_{report['case']}"
    figures, text = out / f"{stem}.json", out / f"{stem}.md"
    figures.write_text(json.dumps({k: v for k, v in report.items() if k != "lines"}, indent=1) + "\n")
    text.write_text(markdown(report))
    return figures, text


def markdown(report: dict[str, Any]) -> str:
    """The table, and what it was measured on."""
    machine, versions = report["machine"], report["versions"]
    facts = [
        f"Measured {report['date']} on {machine['cores']} cores of {machine['processor']} ({machine['system']}),",
        f"load per core before: {report['load_per_core_before']:.2f};",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
    ]
    return "\n".join([*report["lines"], "", *facts]) + "\n"


def _remarks(module: ModuleType, quick: bool, load: float) -> list[str]:
    remarks = []
    if quick:
        remarks.append("**Quick run: shows that the benchmark works, its figures mean nothing.**")
    if not module.MEASURES_TIME:
        return [*remarks, "Compiled and estimated; nothing was run, and no time is measured."]
    if load > _QUIET_LOAD:
        remarks.append("**Measured under load: other programs had the cores too, so all figures are too large.**")
    return remarks or ["Measured on a quiet machine."]


def _machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "an unknown processor"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "an unknown one")


def _load() -> float:
    """Programs that want a core, per core, over the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _versions() -> dict[str, str]:
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    found = {name: installed[name.lower()] for name in _PACKAGES if name.lower() in installed}
    return {"python": platform.python_version()} | found


if __name__ == "__main__":
    main()
