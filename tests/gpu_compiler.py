"""The real compiler of XLA:GPU, for a cluster that is not there: it needs the extra `plan-gpu`, and no GPU."""

import pytest

from jshard._errors import MissingExtraError
from jshard.cluster.topology import require_compiler


def _missing() -> str:
    try:
        require_compiler("gpu")
    except MissingExtraError as error:
        return str(error)
    return ""


MISSING = _missing()
"""Why the compiler is not here; empty where it is."""

needs_gpu_compiler = pytest.mark.skipif(bool(MISSING), reason=MISSING.replace("\n", " ") or "the compiler is here")
