"""Live state without files: whole values, values from elsewhere, and another mesh.

`js.gather` returns whole values, `js.load` is its inverse, and `js.reshard` moves a state to another mesh. The last two
match and check leaves as `js.checkpoint.restore` does; only what they read is in memory.
"""
