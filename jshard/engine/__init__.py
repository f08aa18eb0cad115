"""What happens when an annotated model is called: one sharded region, and in it one gather per unit."""
