"""Calls whose inside is no program of JAX."""
