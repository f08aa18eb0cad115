"""jshard: fully sharded training of annotated Flax models, with visible communication.

The public names are listed in `__init__.pyi`; errors are in `jshard.errors`, data in `jshard.data`.

Example:
    >>> import jshard as js
"""

from jshard._lazy import attach as _attach

_MOVED = {
    "jshard.cluster.strategies": "Strategy strategies",
    "jshard.errors": "AnnotationError CallError MeshError RunError",
    "jshard.inspect.explain": "Explanation",
    "jshard.plans.plan": "LeafPlan UnitPlan",
}

_UNLISTED = {
    # Removed functions, which warn when they are called.
    "batch_mean": "jshard.plans.placement",
    "per_shard": "jshard.plans.placement",
    # Modules that were names of `js`. `from jshard import data`, which is valid, asks here first: no warning.
    "data": "jshard",
    "inspect": "jshard",
    "occupancy": "jshard",
}

__getattr__, __dir__, __all__ = _attach(__name__, __file__, moved=_MOVED, unlisted=_UNLISTED)

__version__ = "0.1.0"
