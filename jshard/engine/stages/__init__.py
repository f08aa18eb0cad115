"""Loops over units on a mesh with an axis `pipe`: layers on stages, and microbatches that pass through them.

Outside of such loops `pipe` is a data axis like `fsdp`: it splits the batch, and parameters are stored over both. So
embeddings, heads and losses are computed on all devices, and plans, optimizers and checkpoints learn nothing of stages.
A loop over units runs on the stages instead; `jshard.plans.stages` says which place runs which layer, and when:

    before     the activations of a data shard are gathered over `pipe`; the parameters of a layer go to its place
    a tick     each place runs one chunk of its layers on one microbatch, and passes the result to the next place
    a round    parameters of the next round are gathered over `fsdp`, and gradients of the last one are reduced, beside
               the ticks of all microbatches
    after      results and gradients go back to where data axes have them

What makes it right: the program of a tick is partitioned as any other, by the same rules, with each microbatch as a
data shard of its own. What a layer does with the examples of its microbatch alone is split along them, and gradients
are partial. A layer that combines examples needs a collective over microbatches, which does not exist: it is an error.
Backward is a loop over units like forward, in reverse. What forward keeps for it stays on its stage.

Modules, from the bottom up:

    guesses              says which constants have a dim for the examples
    exchanges            moves stacks between the data axes and the stages
    tick_partitioner     runs the program of a layer on one microbatch
    layer_inputs         what all layers share, and the rows of a place
    stacked_results      the results that a loop stacks
    staged_loop          the loop: its ticks and rounds
    region_partitioner   runs the program of a region, with its loops over units on stages
"""
