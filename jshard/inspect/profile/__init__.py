"""The ruler: what devices did in a step, read from a profile of JAX."""
