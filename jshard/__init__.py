"""jshard: annotate a Flax model, and it trains fully sharded, with communication that is shown.

The public names are those of `__init__.pyi`; errors are in `jshard.errors`, data in `jshard.data`.

Example:
    >>> import jshard as js
"""

from jshard._lazy import attach as _attach

_MOVED = {
    "jshard.cluster.compile": "Strategy strategies",
    "jshard.errors": "AnnotationError CallError MeshError RunError",
    "jshard.inspect.explain": "Explanation",
    "jshard.plans.plan": "LeafPlan UnitPlan",
}

_UNLISTED = {
    # Functions that are gone, which warn when they are called.
    "batch_mean": "jshard.plans.placement",
    "per_shard": "jshard.plans.placement",
    # Modules that were names of `js`. `from jshard import data` asks here first, and is right: no warning.
    "data": "jshard",
    "inspect": "jshard",
    "occupancy": "jshard",
}

__getattr__, __dir__, __all__ = _attach(__name__, __file__, moved=_MOVED, unlisted=_UNLISTED)

__version__ = "0.1.0"
