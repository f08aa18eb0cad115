"""What `fully_shard` records of a Linen model: units, layout, state, optimizer. Its calls are in `jshard.engine`."""
