"""Programs as compilers write them: computations, collectives, and the order in which they run."""
