"""Every difference between versions of what we stand on, and every name of theirs that is not public.

A file for each of what they are about, loaded when it is first asked for: who asks for a launcher waits for no Flax.
"""

from jshard._lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
