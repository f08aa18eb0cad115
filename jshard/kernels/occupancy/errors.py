"""What goes wrong with the occupancy model, as a user meets it."""

from jshard._errors import ShardingError


class OccupancyError(ShardingError):
    """A GPU, a thread block or a footprint of communication that the model does not know, or that cannot be."""


class OccupancyWarning(UserWarning):
    """An answer for something near to what was asked for, and not for that itself."""
