"""Data: text or your own source, the order of its samples, and batches made ahead of time."""

from jshard._lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
