"""XLA's real compilers for GPUs, for a cluster that is not there: they need an extra, and no GPU."""

import pytest

from jshard.cluster.topology import require_compiler
from jshard.errors import MissingExtraError


def _missing(compiler: str) -> str:
    """Why a compiler is not here; empty where it is."""
    try:
        require_compiler(compiler)
    except MissingExtraError as error:
        return str(error)
    return ""


def _needs(compiler: str) -> pytest.MarkDecorator:
    missing = _missing(compiler)
    return pytest.mark.skipif(bool(missing), reason=missing.replace("\n", " "))


needs_gpu_compiler = _needs("cuda")
needs_rocm_compiler = _needs("rocm")
without_gpu_compiler = pytest.mark.skipif(
    not _missing("cuda"), reason="tests what is printed without the extra plan-gpu; it is here"
)
