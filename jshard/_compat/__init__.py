"""Every difference between versions of our dependencies, and every private name of theirs that is used.

One file per topic, loaded on first use, so that a launcher does not import Flax:

    private_names         the list of private names, each with what happens in a version that lacks it
    environment           installed versions, launchers of clusters, meetings of processes
    compiler              options, the cache of programs, what is assumed of absent GPUs, the partitioner alone
    tracing               traces, tracers and equations
    calls                 primitives whose equations hold a program
    unchecked_programs    programs without types of varying axes
    source_lines          lines of the user's code, for messages
    host_memory           arrays in host memory
    kernels               Pallas on NVIDIA GPUs
    nnx_graphs            nodes of NNX models
    variables             homes for the values of NNX variables
    linen_modules         Linen's wrapper around methods
"""

from jshard._lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
