"""Facts about accelerators, each with its source.

Modules, from the bottom up:

    gpu_target    the description of a GPU for XLA's compiler
    device_facts  the form of a record, and how sources are stated
    devices       the records: GPUs, TPU chips, cloud machines
    device_files  devices that a file describes
    gpus          the limits of one GPU multiprocessor
"""
