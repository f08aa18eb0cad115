"""jshard: annotate a Flax model, and it trains fully sharded, with communication that is shown.

The public names are those of `__init__.pyi`.

Example:
    >>> import jshard as js
"""

from importlib import import_module as _import_module

from jshard._lazy import attach as _attach

_load, __dir__, __all__ = _attach(__name__, __file__)

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """A public name, loaded when it is first asked for; for one release also a function that is gone."""
    if name in ("batch_mean", "per_shard"):
        return getattr(_import_module("jshard.plans.moved"), name)
    return _load(name)
