"""jshard: annotate a Flax model, and it trains fully sharded, with communication that is shown.

The public names are those of `__init__.pyi`.

Example:
    >>> import jshard as js
"""

from jshard._lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)

__version__ = "0.1.0"
