"""Data: text or a source of one's own, the order of its samples, and batches ahead of time."""

from jshard._lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
