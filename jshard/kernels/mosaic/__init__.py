"""The bodies of the kernels, on Pallas Mosaic GPU: for Hopper, whose tensor cores take operands in shared memory."""
