"""Decisions made before anything runs: meshes, policies, placements, units, and the plan made from them."""
