"""What is asked for: the recipe, other values for it, and which cannot work."""
