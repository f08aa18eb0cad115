"""`js.overlap`: a step shaped so that its collectives find room, and what each decision rests on.

Example:
    >>> print(js.overlap(model, device="h200"))
"""

from jshard.kernels.shaping.result import Overlap as Overlap
from jshard.kernels.shaping.result import Reason as Reason
from jshard.kernels.shaping.shape import overlap as overlap
