"""The real compiler of XLA:GPU, for a cluster that is not there: it needs the extra `plan-gpu`, and no GPU."""

import pytest

from jshard.cluster.topology import require_compiler
from jshard.errors import MissingExtraError


def _missing() -> str:
    """Why the compiler is not here; empty where it is."""
    try:
        require_compiler("cuda")
    except MissingExtraError as error:
        return str(error)
    return ""


_MISSING = _missing()

needs_gpu_compiler = pytest.mark.skipif(bool(_MISSING), reason=_MISSING.replace("\n", " "))
without_gpu_compiler = pytest.mark.skipif(
    not _MISSING, reason="tests what is printed without the extra plan-gpu; it is here"
)
