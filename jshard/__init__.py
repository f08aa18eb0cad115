"""jshard: fully sharded training of annotated Flax models, with visible communication.

The public names are listed in `__init__.pyi`.

Examples:
    >>> import jshard as js
"""

from jshard._lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)

__version__ = "0.1.0"
