"""What is decided before anything runs: meshes, policies, placements, units, and the plan made of them."""
