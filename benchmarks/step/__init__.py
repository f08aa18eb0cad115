"""The step benchmark. Its workers import this package without JAX, or without PyTorch: so it is empty."""
