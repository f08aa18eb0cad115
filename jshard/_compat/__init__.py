"""Every difference between versions of our dependencies, and every non-public name of theirs that is used.

A file for each of what they are about, loaded when it is first asked for: who asks for a launcher waits for no Flax.
"""

from jshard._lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
