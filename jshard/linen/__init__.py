"""The adapter for Linen: annotation, layout, calls as arrays, optimizer state, deferred initialisation."""
