"""Benchmarks of jshard beside the usual alternatives: `python -m benchmarks.run`."""
