"""How often the body of a compiled loop runs."""

import re

from jshard.inspect.module import Computation, Instruction, Module, tuple_index


def trip_count(module: Module, home: Computation, loop: Instruction) -> int | None:
    """Rounds of a `while`: as the compiler noted them, or from a counter that runs to a constant; None if unknown.

    Args:
        module: the program.
        home: the computation that the loop stands in.
        loop: the instruction.
    """
    noted = re.search(r"known_trip_count\D*(\d+)", loop.attributes)
    if noted:
        return int(noted.group(1))
    condition = module.computations.get(loop.attribute("condition") or "")
    body = module.computations.get(loop.attribute("body") or "")
    if condition is None or body is None or condition.root is None or body.root is None:
        return None
    test = condition.source(condition.root)
    if test is None or test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    start_values = _start_values(home, loop)
    counter = condition.source(condition.operand(test, 0))
    if counter is None or counter.opcode != "get-tuple-element":
        return None
    begin = start_values.get(tuple_index(counter))
    end = _bound(condition, test, body, start_values)
    step = _step(body, tuple_index(counter))
    if begin is None or end is None or step is None:
        return None
    return max(0, -(-(end - begin) // step))


def _start_values(home: Computation, loop: Instruction) -> dict[int, int]:
    """What the loop's state holds before the first round, as far as it is constant: by place in the tuple."""
    state = home.source(home.operand(loop, 0))
    if state is None or state.opcode != "tuple":
        return {}
    sources = [home.source(home.by_name.get(name)) for name in state.operands]
    values = {place: _integer(source) for place, source in enumerate(sources)}
    return {place: value for place, value in values.items() if value is not None}


def _bound(condition: Computation, test: Instruction, body: Computation, start_values: dict[int, int]) -> int | None:
    """What the counter is compared with: a constant, or a part of the state that stays as it began."""
    bound = condition.source(condition.operand(test, 1))
    if bound is None or bound.opcode != "get-tuple-element":
        return _integer(bound)
    place = tuple_index(bound)
    after = _after(body, place)
    stays = after is not None and after.opcode == "get-tuple-element" and tuple_index(after) == place
    return start_values.get(place) if stays else None


def _after(body: Computation, place: int) -> Instruction | None:
    """What a part of the state is at the end of a round."""
    state = body.root
    if state is None or state.opcode != "tuple" or place >= len(state.operands):
        return None
    return body.source(body.by_name.get(state.operands[place]))


def _step(body: Computation, place: int) -> int | None:
    """What a round adds to the counter: an unrolled loop adds 2 or more, perhaps in several additions."""
    value, total = _after(body, place), 0
    while value is not None and value.opcode == "add":
        sides = [body.source(body.operand(value, side)) for side in (0, 1)]
        known = [_integer(side) for side in sides]
        if (known[0] is None) == (known[1] is None):
            return None
        total += next(k for k in known if k is not None)
        value = next(side for side, k in zip(sides, known, strict=True) if k is None)
    counted = value is not None and value.opcode == "get-tuple-element" and tuple_index(value) == place
    return total if counted and total > 0 else None


def _integer(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.inside) if re.fullmatch(r"-?\d+", instruction.inside.strip()) else None
