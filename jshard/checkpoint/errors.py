"""What goes wrong with checkpoints, as a user meets it."""

from jshard._errors import ShardingError


class CheckpointError(ShardingError):
    """A checkpoint cannot be written there, or does not fit what it is to be restored into."""


class CheckpointWarning(UserWarning):
    """Something about a checkpoint that was done as asked, and that whoever asked may not expect."""
