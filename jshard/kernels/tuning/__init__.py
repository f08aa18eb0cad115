"""The tuner: which setting of a kernel is best beside the collectives of a model, as measured on the GPU that is here.

Where there is no GPU it has only an estimate, and says so. `jshard tune` is its command.
"""
