"""The kernels of `js.kernels`: errors beside float64, forward and backward, and times beside XLA's own."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.first_gpu.references import both_ways, exact, relative_error
from benchmarks.first_gpu.worker import Figures, Work
from benchmarks.overlap import kernel_times
from benchmarks.overlap.programs import MOST_ERROR
from benchmarks.overlap.session import alive
from benchmarks.tables import markdown_table
from jshard import kernels
from jshard.errors import FourPartError

_ROUNDS = 7
_QUICK_ROUNDS = 1
_LEAST_S = 20.0  # a case is not begun with less: it has to be compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
    """A kernel on small arrays, which a CPU computes in float64, too."""

    kernel: str
    shapes: Mapping[str, tuple[int, ...]]
    form: str  # of the kernel on a GPU
    form_on_cpu: str = "xla"  # the interpreter takes long to compile products
    settings: Mapping[str, bool | str] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Returns the kernel and its largest arrays, in words."""
        shapes = dict.fromkeys(shape for shape in self.shapes.values() if len(shape) > 1)
        return f"{self.kernel}, {' and '.join('x'.join(map(str, shape)) for shape in shapes)}"


def _cases(*, quick: bool) -> list[_Case]:
    """Returns what is compared with float64; a size that is no multiple of the tiles among it."""
    least = 16 if quick else 1
    wide = 2048 // least
    odd = 1000 // least
    rows = (odd, wide)
    square = (wide, wide)
    line = (wide,)
    mlp = {"x": rows, "w_up": square, "w_down": square, "w_gate": square}
    heads = (1 if quick else 2, 1024 // least, 2 if quick else 8, 64)
    return [
        _Case(kernel="matmul", shapes={"x": rows, "w": square}, form="mosaic"),
        _Case(kernel="mlp", shapes=mlp, form="mosaic", settings={"activation": "silu"}),
        _Case(kernel="rms_norm", shapes={"x": rows, "scale": line}, form="mosaic", form_on_cpu="interpret"),
        _Case(kernel="layer_norm", shapes={"x": rows, "scale": line, "bias": line}, form="mosaic"),
        _Case(
            kernel="attention",
            shapes={"q": heads, "k": heads, "v": heads},
            form="cudnn",
            settings={"is_causal": True},
        ),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """The errors of a kernel beside float64, and those of XLA's form of it."""

    kernel: str
    form: str
    result: str  # "y", or an argument whose gradient it is
    error: float
    plain_error: float

    @property
    def is_near(self) -> bool:
        """Returns whether the error is one of rounding; False for NaN."""
        return self.error <= MOST_ERROR


def measure(work: Work) -> None:
    """Measures the errors of all kernels, and then as many times as there is time for."""
    errors: list[ErrorRow] = []
    work.keep(errors=[], times=[])
    for case in _cases(quick=work.setup.quick):
        try:
            errors += _errors(case, on_cpu=work.setup.device == "cpu")
        except Exception as error:
            _leave_out_failed(work, case.name, error)
        work.keep(errors=[dataclasses.asdict(row) for row in errors])
    _measure_times(work)


def _measure_times(work: Work) -> None:
    rounds = _QUICK_ROUNDS if work.setup.quick else _ROUNDS
    times: list[kernel_times.KernelTime] = []
    for case in _timed_cases(work):
        if work.left_s < _LEAST_S:
            work.leave_out(case.name, "its times: no time was left")
            continue
        print(case.name, flush=True)
        try:
            times += kernel_times.measure(case, rounds=rounds)
        except Exception as error:
            _leave_out_failed(work, f"{case.name}, times", error)
        work.keep(times=[dataclasses.asdict(row) for row in times])


def _timed_cases(work: Work) -> tuple[kernel_times.Case, ...]:
    if work.setup.device == "gpu":
        return kernel_times.cases(quick=work.setup.quick)
    shapes = {"x": (8, 128), "scale": (128,)}
    return (kernel_times.Case(kernel="rms_norm", shape="8 x 128", arrays=shapes, backend="interpret"),)


def _leave_out_failed(work: Work, name: str, error: Exception) -> None:
    """Notes why a kernel is left out: on a card that it never ran on, an error of any kind costs only itself.

    Raises:
        Exception: the same, if the device runs nothing any more, as after an access to memory that is not there.
    """
    work.leave_out(name, reason(error))
    if not alive():
        raise error


def reason(error: Exception) -> str:
    """Returns why something could not run, in one line."""
    if isinstance(error, FourPartError):
        return f"{error.what} {' '.join(error.why.split())}"
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _errors(case: _Case, *, on_cpu: bool) -> list[ErrorRow]:
    """Returns a row for the result and for each gradient of a kernel."""
    form = case.form_on_cpu if on_cpu else case.form
    arrays, dy = _arrays(case)
    reference = exact(case.kernel, {name: np.asarray(array) for name, array in arrays.items()}, np.asarray(dy))
    ours = _results(case, form, arrays, dy)
    plain = _results(case, "xla", arrays, dy)
    rows = []
    for name, exact_array in reference.items():
        rows.append(
            ErrorRow(
                kernel=case.name,
                form=form,
                result=name,
                error=relative_error(ours[name], exact_array),
                plain_error=relative_error(plain[name], exact_array),
            )
        )
    return rows


def _arrays(case: _Case) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns normal random numbers, and as many for the gradient of the result; matrices have variance 1 / K."""
    random = np.random.default_rng(0)
    arrays = {}
    for name, shape in case.shapes.items():
        scale = 1 / math.sqrt(shape[0]) if name.startswith("w") else 1.0
        arrays[name] = jnp.asarray(scale * random.standard_normal(shape), jnp.bfloat16)
    # Every result has the shape of the first argument: the products are with square matrices.
    first = next(iter(case.shapes.values()))
    return arrays, jnp.asarray(random.standard_normal(first), jnp.bfloat16)


def _results(case: _Case, form: str, arrays: Mapping[str, jax.Array], dy: jax.Array) -> dict[str, jax.Array]:
    kernel = functools.partial(getattr(kernels, case.kernel), **case.settings, backend=form)
    return jax.jit(functools.partial(both_ways, kernel))(arrays, dy)


# ---- the report


def table(figures: Figures) -> list[str]:
    """Returns the lines of the report."""
    rows = [ErrorRow(**row) for row in figures.get("errors", [])]
    lines = [
        "Measured: relative errors of result and gradients in bfloat16, beside the formulas in float64 on the CPU, and"
        f" the same of XLA's own form. *near* is at most {MOST_ERROR:g}.",
        "",
    ]
    cells = []
    for row in rows:
        what = "y" if row.result == "y" else f"d {row.result}"
        near = "yes" if row.is_near else "**no**"
        cells.append([row.kernel, row.form, what, near, f"{row.error:.1e}", f"{row.plain_error:.1e}"])
    lines += markdown_table(["kernel", "form", "", "near", "error", "XLA's error"], cells, num_words=4)
    times = [kernel_times.KernelTime(**row) for row in figures.get("times", [])]
    if not times:
        return lines
    lines += ["", "Measured: the time of a call, median of rounds, beside XLA's own; *both* is with all gradients.", ""]
    cells = []
    for time in times:
        ratio = f"{time.ratio:.2f}"
        cells.append([time.kernel, time.shape, time.direction, f"{time.ours_ms:.4f}", f"{time.plain_ms:.4f}", ratio])
    head = ["kernel", "shape", "direction", "ms", "XLA's ms", "ratio"]
    return [*lines, *markdown_table(head, cells, num_words=3)]
