"""What of a compiled program's arguments lies in host memory, read off its own text."""

import math
import re

from jshard._shard_plan import ShardPlan
from jshard.inspect.differences import Difference
from jshard.inspect.module import item_bytes
from jshard.inspect.tables import human_bytes

_ENTRY = re.compile(r"entry_computation_layout=\{\((.*?)\)->")
_ON_HOST = re.compile(r"(\w+)\[([\d,]*)\]\{[^}]*S\(5\)[^}]*\}")  # XLA's memory space 5 is the host's


def host_arguments_bytes(text: str) -> int:
    """Bytes of a program's arguments that lie in host memory, for one device."""
    layout = _ENTRY.search(text)
    found = _ON_HOST.findall(layout[1]) if layout else []
    return sum(math.prod(int(n) for n in dims.split(",") if n) * round(item_bytes(dtype)) for dtype, dims in found)


def host_differences(text: str, plan: ShardPlan) -> tuple[Difference, ...]:
    """Whether the parameters that are planned in host memory are there in the program."""
    planned = sum(leaf.placement.bytes_per_device for leaf in plan.leaves if leaf.placement.on_host)
    compiled = host_arguments_bytes(text) if planned else 0
    if compiled >= planned:
        return ()
    words = (
        f"{human_bytes(planned)} of parameters are planned in host memory; {human_bytes(compiled)} of arguments are."
    )
    return (Difference(words, None, None, ()),)
