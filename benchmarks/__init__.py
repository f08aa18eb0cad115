"""Benchmarks of jshard beside what people use today: `python -m benchmarks.run`."""
