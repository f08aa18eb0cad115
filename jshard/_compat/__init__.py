"""Every difference between versions of our dependencies, and every private name of theirs that is used.

One file per topic, loaded on first use, so that a launcher does not import Flax. `private_names` is the list of the
private names, each with what happens in a version that lacks it.
"""

from jshard._lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
