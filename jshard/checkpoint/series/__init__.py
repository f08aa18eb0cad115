"""A series of checkpoints by step: its storage, its owner and its history."""
