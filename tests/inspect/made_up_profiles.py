"""Profiles written by hand, in the form in which JAX writes them: planes, lines, events with their details."""

import json

from jax.profiler import ProfileData


def event(name, begin_us, end_us, **details):
    """An event from one time to another; the details are its stats."""
    return name, begin_us, end_us, details


def kernel(op, begin_us, end_us, *, name="fused_kernel", module="step"):
    """A kernel on a GPU, which names its operation."""
    return event(name, begin_us, end_us, hlo_op=op, hlo_module=module, program_id=7)


def thunk(op, begin_us, end_us, *, run, device=0, module="step", **details):
    """An operation on a CPU device."""
    return event(op, begin_us, end_us, hlo_op=op, hlo_module=module, run_id=run, device_ordinal=device, **details)


def marks(*numbers):
    """The host's plane with steps that it marked."""
    lines = {"jshard": [event("train", 10 * i, 10 * i + 1, step_num=n) for i, n in enumerate(numbers)]}
    return plane("/host:CPU", lines)


def plane(name, lines):
    """A plane with lines of events, as the text of a protocol buffer."""
    events = [e for line in lines.values() for e in line]
    names = {n: i for i, n in enumerate(dict.fromkeys(e[0] for e in events), start=1)}
    keys = {k: i for i, k in enumerate(dict.fromkeys(k for e in events for k in e[3]), start=1)}
    parts = [f"name: {json.dumps(name)}"]
    for line, content in lines.items():
        inside = " ".join(_event(e, names, keys) for e in content)
        parts.append(f"lines {{ name: {json.dumps(line)} timestamp_ns: 0 {inside} }}")
    for kind, table in (("event", names), ("stat", keys)):
        for text, number in table.items():
            entry = f"id: {number} name: {json.dumps(text)}"
            parts.append(f"{kind}_metadata {{ key: {number} value {{ {entry} }} }}")
    return f"planes {{ {' '.join(parts)} }}"


def _event(event, names, keys):
    name, begin_us, end_us, details = event
    stats = " ".join(f"stats {{ metadata_id: {keys[k]} {_value(v)} }}" for k, v in details.items())
    begin, length = round(begin_us * 1e6), round((end_us - begin_us) * 1e6)
    return f"events {{ metadata_id: {names[name]} offset_ps: {begin} duration_ps: {length} {stats} }}"


def _value(value):
    return f"int64_value: {value}" if isinstance(value, int) else f"str_value: {json.dumps(value)}"


def write(path, *planes, program=None):
    """A file of these planes, with the program's text beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace("\n".join(planes)))
    if program is not None:
        (path.parent / "program.txt").write_text(program)
    return path
