"""The folder of a run: its record, its lock, and whether a run may go on there."""
