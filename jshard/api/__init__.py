"""The main functions of `js`: annotate, initialise, shard the optimizer, differentiate."""
