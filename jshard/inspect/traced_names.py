"""Names of operations in a compiled program, as the trace gave them: of which unit one is, and of which phase."""

import re

from jshard.engine.moved import Mixing, named_in

_UNIT = re.compile(r"jshard\[([^\]]*)\](/backward)?")


def unit_and_phase(op_name: str) -> tuple[tuple[str, ...], str | None]:
    """The units and the phase that a traced name tells: `.../jshard[blocks/3]/backward/...`."""
    found = [(name, _UNIT.findall(name)) for name in _joined_names(op_name)]
    told = [(name, tags[-1]) for name, tags in found if tags]  # the innermost unit
    units = dict.fromkeys(unit for _, (unit, _) in told)
    marked = [(name, bool(tags and tags[-1][1])) for name, tags in found if tags or named_in(name)]
    phases = {"backward" if is_marked or "transpose(" in name else "forward" for name, is_marked in marked}
    return tuple(units), "both" if len(phases) > 1 else next(iter(phases), None)


def mixing_in(op_name: str) -> tuple[tuple[Mixing, ...], bool]:
    """The lines of the model that mix examples by an operation, and whether all of its names say so."""
    found = [named_in(name) for name in _joined_names(op_name)]
    return tuple(dict.fromkeys(one for ones in found for one in ones)), all(found)


def _joined_names(op_name: str) -> list[str]:
    """The names that the compiler joined into one: `a/(b/c:d/e)` is `a/b/c` and `a/d/e`."""
    prefix, parts, depth = "", [""], 0
    for char in op_name:
        depth += (char == "(") - (char == ")")
        if depth == 1 and char == "(":  # perhaps the joined part begins: what comes before is common
            prefix, parts = prefix + "".join(parts), [""]
        elif depth == 1 and char == ":":
            parts.append("")
        elif depth == 0 and char == ")":
            if len(parts) > 1:
                return [prefix + part for part in parts]
            prefix, parts = f"{prefix}({parts[0]})", [""]
        else:
            parts[-1] += char
    return [op_name]
