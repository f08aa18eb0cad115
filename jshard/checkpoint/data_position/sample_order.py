"""What the order of samples of a Grain pipeline depends on, as plain data that a restore compares.

A position counts samples. With other weights of a mixture, or sources in another order, the same count stands for other
samples: some would repeat and others would be skipped, without an error.

A description has no addresses or ids: a pipeline that is built again, in another process, has an equal one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NotRequired, TypedDict

from jshard import _compat
from jshard._types import Json
from jshard.checkpoint.data_position.sample_digest import PipelineNode, samples_passing, source_digests, text_digest
from jshard.checkpoint.data_position.step_settings import is_of_grain, settings_of


class Step(TypedDict):
    """A step of a pipeline."""

    step: str  # its name
    settings: dict[str, Json]
    length: NotRequired[int]  # if it is known
    of: NotRequired[list[Step]]  # the steps before it
    samples: NotRequired[list[str] | None]  # of a source: digests of some samples; None if they cannot be read


class Description(TypedDict):
    """A pipeline."""

    grain: str  # the version of Grain that it was built with
    pipeline: Step  # the last step


# Steps that change what samples hold, or when they are read, and not which sample is the next.
_NOT_IN_ORDER = frozenset(
    "Map RandomMap MapWithIndex WithSeed WithOptions Output "
    "Prefetch ThreadPrefetch MpContext Cache InMemoryCache".split()
)
# The attributes in which Grain's steps have the steps before them.
_BEFORE = ("_parents", "_source", "_map_parent", "_ds", "_datasets", "_maybe_nonnative_parent", "_iter_parent")
_MOST_SOURCES = 64  # whose samples are read, and whose descriptions are kept one by one


def describe(pipeline: PipelineNode) -> Description | None:
    """Returns the steps of a Grain dataset or iterator that its order of samples depends on; None for anything else."""
    if not _is_step(pipeline):
        return None
    version = _compat.versions(["grain"])["grain"]
    return {"grain": version or "unknown", "pipeline": _PipelineWalk().describe(pipeline)}


def differences(saved: Description | None, here: Description | None) -> list[str]:
    """Returns what differs between two descriptions, a line each; none if one of them is not known."""
    # Not known is not different: a position of an earlier version, or of data of another library, has no description.
    if saved is None or here is None:
        return []
    has_same_names = saved["grain"] == here["grain"]  # another version may name its steps otherwise
    return list(_step_differences(saved["pipeline"], here["pipeline"], "", has_same_names=has_same_names))


def agreed(descriptions: Sequence[Description | None]) -> Description | None:
    """Returns the description that all processes have; without the samples of its sources where those differ."""
    if _are_equal(descriptions):
        return descriptions[0]
    without_samples = [_without_samples(description) for description in descriptions]
    if _are_equal(without_samples):
        return without_samples[0]
    return None


def _are_equal(descriptions: Sequence[Description | None]) -> bool:
    return all(description == descriptions[0] for description in descriptions)


# ---- the steps of a pipeline


class _PipelineWalk:
    """One walk over a pipeline, from its last step to its sources.

    Args:
        most_sources: of how many sources samples are read, which takes time.
    """

    def __init__(self, *, most_sources: int = _MOST_SOURCES) -> None:
        self._sources_to_read = most_sources

    def describe(self, node: PipelineNode) -> Step:
        """Returns a step and those before it; steps that do not count are left out."""
        nodes_before = _nodes_before(node)
        name = _step_name(node)
        if len(nodes_before) == 1 and is_of_grain(node) and _is_left_out(node, name):
            return self.describe(nodes_before[0])

        step: Step = {"step": name, "settings": settings_of(node, name)}
        length = _length_of(node)
        if length is not None:
            step["length"] = length
        has_random_access = hasattr(node, "__getitem__")
        if "<lambda>" in step["settings"].get("filter", "") and has_random_access:
            step["settings"]["passes"] = samples_passing(node)

        if nodes_before:
            self._add_steps_before(step, nodes_before)
        elif length and name != "Range" and has_random_access:
            step["samples"] = self._samples_of(node, length)
        return step

    def _add_steps_before(self, step: Step, nodes: Sequence[PipelineNode]) -> None:
        if len(nodes) <= _MOST_SOURCES:
            step["of"] = [self.describe(node) for node in nodes]
            return
        # A description of each would make every position, and so every manifest, long.
        # Without samples of the sources, which would take long to read.
        steps = [_PipelineWalk(most_sources=0).describe(node) for node in nodes]
        step["settings"]["parts"] = text_digest(json.dumps(steps, sort_keys=True))

    def _samples_of(self, source: PipelineNode, length: int) -> list[str] | None:
        if self._sources_to_read <= 0:
            return None
        self._sources_to_read -= 1
        return source_digests(source, length)


def _is_step(value: object) -> bool:
    grain = sys.modules.get("grain")  # not imported: without it, nothing is one of its steps
    names = ("MapDataset", "IterDataset", "DatasetIterator")
    classes = tuple(getattr(grain, name) for name in names if hasattr(grain, name))
    is_elastic_iterator = is_of_grain(value) and hasattr(value, "_ds")
    return isinstance(value, classes) or is_elastic_iterator


def _nodes_before(node: PipelineNode) -> list[PipelineNode]:
    """Returns the steps before one, each once: several attributes may have the same."""
    nodes: dict[int, PipelineNode] = {}
    for attribute in _BEFORE:
        value = vars(node).get(attribute)
        candidates = value if isinstance(value, list | tuple) else [value]
        for candidate in candidates:
            if _is_step(candidate):
                nodes[id(candidate)] = candidate
    return list(nodes.values())


def _step_name(node: object) -> str:
    name = type(node).__name__.lstrip("_")
    for ending in ("MapDataset", "IterDataset", "DatasetIterator", "Iterator", "Dataset"):
        if name.endswith(ending) and name != ending:
            return name.removesuffix(ending)
    return name


def _is_left_out(node: object, name: str) -> bool:
    """Returns whether the order does not depend on a step."""
    if name == "Batch":
        # A batch of an iterator counts samples, that of a dataset with numbers counts batches.
        return not hasattr(node, "__getitem__")
    return name in _NOT_IN_ORDER


def _length_of(node: PipelineNode) -> int | None:
    try:
        length = len(node)
    except Exception:  # iterators have none, and some sources cannot say
        return None
    if length >= sys.maxsize:  # endless
        return None
    return int(length)


# ---- comparison


def _step_differences(saved: Step, here: Step, place: str, *, has_same_names: bool) -> Iterator[str]:
    """Yields what differs between two steps and those before them; `place` is the way to them from the last step."""
    saved_parts = saved.get("of", [])
    parts_here = here.get("of", [])
    if saved["step"] != here["step"] or len(saved_parts) != len(parts_here):
        if has_same_names:
            yield f"{place or 'step'}  saved {_summary(saved)}  here {_summary(here)}"
        return
    step = f"{place}{saved['step'].lower()}"
    if saved.get("length") != here.get("length"):
        yield f"{step} length  saved {saved.get('length', 'unknown')}  here {here.get('length', 'unknown')}"
    yield from _setting_differences(saved["settings"], here["settings"], step)
    saved_samples = saved.get("samples")
    samples_here = here.get("samples")
    are_known = saved_samples is not None and samples_here is not None
    if are_known and saved_samples != samples_here:
        yield f"{step} samples  saved {_shown(saved_samples)}  here {_shown(samples_here)}"
    for number, (saved_part, part_here) in enumerate(zip(saved_parts, parts_here, strict=True)):
        inner = f"{step}[{number}] of " if len(saved_parts) > 1 else f"{step} of "
        yield from _step_differences(saved_part, part_here, inner, has_same_names=has_same_names)


def _setting_differences(saved: Mapping[str, object], here: Mapping[str, object], step: str) -> Iterator[str]:
    for name, saved_value in saved.items():
        if name not in here:
            continue  # a version of Grain or jshard does not have it
        value_here = here[name]
        is_unread = name == "passes" and (saved_value is None or value_here is None)
        if saved_value != value_here and not is_unread:
            yield f"{step} {name}  saved {_shown(saved_value)}  here {_shown(value_here)}"


def _summary(step: Step) -> str:
    num_parts = len(step.get("of", []))
    name = step["step"].lower()
    return f"{name} of {num_parts} datasets" if num_parts > 1 else name


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def _without_samples(description: Description | None) -> Description | None:
    if description is None:
        return None
    return {"grain": description["grain"], "pipeline": _step_without_samples(description["pipeline"])}


def _step_without_samples(step: Step) -> Step:
    step = step.copy()
    step.pop("samples", None)
    if "of" in step:
        step["of"] = [_step_without_samples(part) for part in step["of"]]
    return step
