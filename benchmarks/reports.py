"""A report: the figures of a case, with the information to judge them; written, and merged from several machines."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.cases import CASES

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tensorboardX", "torch")
_QUIET_LOAD = 0.25  # per core


def measure(case: str, *, quick: bool, note: str = "", **options: Any) -> Iterator[dict[str, Any]]:
    """The figures of a case, with the information needed to judge them; of a case whose results grow after each."""
    module = CASES[case].load()
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")  # one for all of them: it names the file
    before = _load()
    results = module.run(quick=quick, **options)
    for result in results if isinstance(results, Iterator) else [results]:
        yield {
            "case": case,
            "date": date,
            "quick": quick,
            "note": note,
            "machine": _machine(),
            "load_per_core_before": before,
            "versions": _versions() | result.get("worker_versions", {}),
            **result,
        }


def write(report: dict[str, Any], out: Path) -> list[Path]:
    """Writes <date>_<case>.json, .md and pictures; those of an earlier run on the same day are replaced.

    For a session that measured some of a cluster's processes, the names end in the first of these.
    """
    out.mkdir(parents=True, exist_ok=True)
    module, stem = CASES[report["case"]].load(), f"{report['date'][:10]}_{report['case']}"
    mine = report.get("measured_processes")
    if mine is not None and len(mine) < report["processes"]:
        stem += f"_process{mine[0]}"
    figures, text = out / f"{stem}.json", out / f"{stem}.md"
    figures.write_text(json.dumps(report, indent=1) + "\n")
    text.write_text(markdown(report))
    draw = getattr(module, "pictures", None)
    return [figures, text, *(draw(report, out, stem) if draw else [])]


def markdown(report: dict[str, Any]) -> str:
    """The table, and the machine that it was measured on."""
    module, machine, versions = CASES[report["case"]].load(), report["machine"], report["versions"]
    devices = f", {', '.join(report['devices'])}" if report.get("device") == "gpu" else ""
    host = f"{machine['cores']} cores of {machine['processor']} ({machine['system']}){devices}"
    facts = [
        f"Measured {report['date']} on {host},",
        f"load per core of other programs before: {report['load_per_core_before']:.2f};",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
    ]
    return "\n".join([f"# {module.TITLE}", "", *_remarks(module, report), "", *module.table(report), "", *facts]) + "\n"


def merge(files: Sequence[Path]) -> dict[str, Any]:
    """One report from the separate reports of a cluster's processes."""
    reports = [json.loads(file.read_text()) for file in files]
    if not reports:
        sys.exit("merge: which files? python -m benchmarks.run merge results/*_step_process*.json")
    cases = {report["case"] for report in reports}
    join = getattr(CASES[cases.pop()].load(), "merged", None) if len(cases) == 1 else None
    if join is None:
        sys.exit("merge: the files must be of one case whose processes are measured apart: step")
    return join(reports)


def _remarks(module: ModuleType, report: dict[str, Any]) -> list[str]:
    remarks = []
    if report["quick"]:
        remarks.append("**Quick run: shows that the benchmark works, its figures mean nothing.**")
    if not module.MEASURES_TIME:
        remarks.append("No time is measured.")
    elif report["load_per_core_before"] > _QUIET_LOAD:
        remarks.append("**Measured under load: other programs had the cores too, so all figures are too large.**")
    remarks = remarks or ["Measured on a quiet machine."]
    return [*remarks, report["note"]] if report["note"] else remarks


def _machine() -> dict[str, Any]:
    import jax

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
    """Runnable programs per core, over the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _versions() -> dict[str, str]:
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    found = {name: installed[name.lower()] for name in _PACKAGES if name.lower() in installed}
    return {"python": platform.python_version()} | found
