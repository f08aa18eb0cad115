"""What the measurements say, by rules that were written before any of them: numbers in, sentences out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks.overlap.grid import DOT
from benchmarks.overlap.records import KernelTime, Placement, Record, Row
from jshard.occupancy import AmdGpuFacts, Block, GpuFacts, room_beside
from jshard.occupancy.timings import MOST_SLOWER

HIDES, STARVES = 0.78, 0.9
"""Ratios: at most this a load of half the product's time is hidden, and from that on it has waited for it."""
GOAL, PAPER_GAIN, KERNEL_GOAL = 0.72, 0.255, 1.05
PROBE_THREADS = 128
PROBE_REGISTERS = (32, 58, 90, 104, 112)
"""The first must begin beside the long block, and the last wait; what is between decides."""
_LONG = Block(threads=544, registers=96, smem_bytes=104_832)


def long_block(gpu: GpuFacts) -> Block:
    """The block beside which probes begin or not, for want of registers: one is on a multiprocessor at a time."""
    if room_beside(gpu, _LONG, Block(PROBE_THREADS, 32)):
        return _LONG
    return dataclasses.replace(_LONG, smem_bytes=gpu.smem_per_sm_bytes // 2)


def expected(gpu: GpuFacts) -> dict[int, bool]:
    """Which probes begin beside the long block, by the model: warps are spread evenly over the partitions."""
    return {n: room_beside(gpu, Block(PROBE_THREADS, n), long_block(gpu)) > 0 for n in PROBE_REGISTERS}


def placement_verdict(found: Placement, gpu: GpuFacts) -> str:
    """Whether the GPU places blocks as the model assumes."""
    began, wanted = dict(found.began), expected(gpu)
    described = ", ".join(f"{n}: {'began' if did else 'waited'}" for n, did in sorted(began.items()))
    if found.long_sms != gpu.num_sms:
        return (
            f"Placement: void. The long blocks ran on {found.long_sms} of {gpu.num_sms} multiprocessors, and the probes"
            " may have run on the others."
        )
    least, most = PROBE_REGISTERS[0], PROBE_REGISTERS[-1]
    if not began[least] or began[most]:
        return f"Placement: void. The probe of {least} registers must begin, and that of {most} wait ({described})."
    if began == wanted:
        return f"Placement: as assumed (registers of a probe and what it did: {described})."
    return (
        f"Placement: not as assumed ({described}). Where more probes began, the model promises less room than there is."
    )


def sentences(record: Record, gpu: GpuFacts | AmdGpuFacts) -> list[str]:
    """The conclusion."""
    found = _placement_sentences(record, gpu)
    for size in dict.fromkeys(row.size for row in record.all_rows):
        for load in dict.fromkeys(row.load for row in record.all_rows if row.size == size):
            rows = [row for row in record.all_rows if row.size == size and row.load == load]
            found += [f"{size}, {load}: {sentence}" for sentence in of_size(rows)]
    if not record.all_rows:
        found.append("Overlap: not measured.")
    found += kernel_sentences(record.all_kernels)
    if record.failed:
        found.append(f"Not run, or with a wrong result, {len(record.failed)}: {', '.join(record.failed)}.")
    return found


def _placement_sentences(record: Record, gpu: GpuFacts | AmdGpuFacts) -> list[str]:
    if isinstance(gpu, AmdGpuFacts):  # where it cannot be measured
        return []
    if record.placement is None:
        return ["Placement: not measured."]
    return [placement_verdict(record.placement, gpu)]


def of_size(rows: Sequence[Row]) -> list[str]:
    """What the rows of one size beside one load say; most rules are about a load of half the product's time."""
    if not all(row.load.endswith("half") for row in rows):
        return list(filter(None, [best(rows)]))
    found = [starving(rows), priority(rows), kill_rule(rows), shaping(rows), dropped(rows), best(rows)]
    return [sentence for sentence in found if sentence]


def starving(rows: Sequence[Row]) -> str:
    """Whether the load waits for XLA's dot, with nothing done about it."""
    ratios = [row.ratio for row in rows if row.form == DOT and row.mode == "baseline"]
    if not ratios:
        return ""
    ratio = sum(ratios) / len(ratios)
    if ratio >= STARVES:
        return f"beside XLA's dot the load starves (ratio {ratio:.3f}, from {STARVES} on)."
    if ratio <= HIDES:
        return f"XLA's dot hides the load as it is (ratio {ratio:.3f}, up to {HIDES})."
    return f"XLA's dot hides a part of the load (ratio {ratio:.3f})."


def priority(rows: Sequence[Row]) -> str:
    """What a higher priority alone changes."""
    pairs = [
        (row.both_ms, other.both_ms)
        for row in rows
        for other in rows
        if row.mode == "baseline" and other.mode == "baseline + priority" and row.group == other.group
        if row.form == other.form
    ]
    if not pairs:
        return ""
    gains = [1 - high / default for default, high in pairs]
    low, most = min(gains), max(gains)
    verdict = "helps" if most >= 0.05 else "changes nothing" if low > -0.05 else "costs time"
    return f"a higher priority alone {verdict}: {low:+.1%} to {most:+.1%} of the time saved, over unshaped kernels."


def kill_rule(rows: Sequence[Row]) -> str:
    """Whether padding is needless: priority alone serves the kernel whose blocks must drain the most."""
    tiled = [row for row in rows if row.form.startswith("tiled") and not row.pad_bytes]
    tried = [row for row in tiled if row.mode == "baseline + priority" and int(row.drain) > 1]
    if not tried:
        return ""
    row = max(tried, key=lambda row: int(row.drain))
    described = f"{row.form}, drain {row.drain}, high priority: {row.ratio:.3f}"
    if row.ratio <= HIDES:
        helps = "What helps is reserved SMs and the latency statement."
        return f"kill rule: padding is needless here, priority alone is enough ({described}). {helps}"
    return f"kill rule: does not apply, priority alone is not enough ({described}, and needed is {HIDES})."


def shaping(rows: Sequence[Row]) -> str:
    """What leaving room costs the product alone, and what it gains beside the load, each kernel beside itself."""
    described = []
    for row in rows:
        base, plain = baseline_of(row, rows), _first(rows, row.group, row.load, row.form, "baseline + priority")
        if row.mode == "shaped + priority" and base is not None and plain is not None:
            gain = 1 - row.both_ms / plain.both_ms
            described.append(
                f"{row.described}: {row.comp_ms / base.comp_ms:.2f} times as long alone, {gain:+.1%} beside the load"
            )
    return f"shaping beside priority alone: {'; '.join(described)}." if described else ""


def dropped(rows: Sequence[Row]) -> str:
    """Kernels that no overlap can repay."""
    slow = {
        row.described: row.comp_ms / dot.comp_ms for row in rows if (dot := dot_of(row, rows)) and is_slow(row, rows)
    }
    if not slow:
        return ""
    described = "; ".join(f"{name}: {ratio:.2f}" for name, ratio in slow.items())
    return f"dropped, over {MOST_SLOWER} times XLA's dot alone: {described}."


def best(rows: Sequence[Row]) -> str:
    """The setting with the least time for both, and what it gains."""
    kept = [row for row in rows if row.mode != "sequential" and not is_slow(row, rows)]
    if not kept:
        return ""
    row = min(kept, key=lambda row: gain_key(row, rows))
    base = baseline_of(row, rows)
    dot = dot_of(row, rows)
    if base is None or dot is None:
        return f"least time for both: {row.described}, {row.mode}; its baseline was not measured."
    gain, of_dot = 1 - row.both_ms / base.both_ms, 1 - row.both_ms / dot.both_ms
    text = (
        f"least time for both: {row.described}, {row.mode}: ratio {row.ratio:.3f} (perfect {row.perfect:.3f}),"
        f" {gain:+.1%} of its own baseline's time saved, {of_dot:+.1%} of that of XLA's dot."
    )
    high = _first(rows, row.group, row.load, DOT, "baseline + priority")
    if high is not None:
        text += f" With priority, as XLA gives it to collectives by default: {1 - row.both_ms / high.both_ms:+.1%}."
    if not row.load.endswith("half"):
        return text
    text += f" Goal of a ratio of {GOAL}: {'reached' if row.ratio <= GOAL else 'missed'}."
    if dot.ratio < STARVES:
        return f"{text} The goal of {PAPER_GAIN:.1%} is for a baseline that starves, and this one does not."
    met = "reached" if of_dot >= PAPER_GAIN else "missed"
    return f"{text} Goal of {PAPER_GAIN:.1%} below a baseline that starves: {met}."


def kernel_sentences(times: Sequence[KernelTime]) -> list[str]:
    """What kernels take beside XLA's."""
    if not times:
        return ["Kernels alone: not measured."]
    over = [one for one in times if one.ratio > KERNEL_GOAL]
    found = [f"Kernels alone: {len(times) - len(over)} of {len(times)} within {KERNEL_GOAL} times XLA's time."]
    cube = [one for one in times if one.kernel == "matmul" and one.shape == "8192 x 8192 x 8192"]
    for one in cube:
        met = "reached" if one.ratio <= KERNEL_GOAL else "missed"
        found.append(f"matmul {one.shape}, {one.direction}: {one.ratio:.3f} of XLA's dot; goal {KERNEL_GOAL}: {met}.")
    slow = [one for one in times if one.ratio > MOST_SLOWER]
    if slow:
        described = "; ".join(f"{one.kernel} {one.shape}, {one.direction}: {one.ratio:.2f}" for one in slow)
        found.append(f"Over {MOST_SLOWER}, where no overlap repays it: {described}.")
    return found


def dot_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """XLA's dot as it is, measured side by side with a row."""
    return _first(rows, row.group, row.load, DOT)


def baseline_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The same kernel unshaped, at the default priority."""
    return _first(rows, row.group, row.load, row.form)


def is_slow(row: Row, rows: Sequence[Row]) -> bool:
    """Whether it alone takes too long beside XLA's dot."""
    dot = dot_of(row, rows)
    return dot is not None and row.comp_ms > MOST_SLOWER * dot.comp_ms


def gain_key(row: Row, rows: Sequence[Row]) -> float:
    """Time of both over that of XLA's dot of the same group: groups were measured at different times."""
    dot = dot_of(row, rows)
    return row.both_ms / (dot.both_ms if dot else row.both_ms)


def _first(rows: Sequence[Row], group: str, load: str, form: str, mode: str = "baseline") -> Row | None:
    wanted: Mapping[str, str] = {"group": group, "load": load, "form": form, "mode": mode}
    return next((row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())), None)
