"""Kernels beside a collective: how much of it they hide, as they are and shaped to leave room (arXiv 2606.09200).

python -m benchmarks.overlap                      # in the folder above; measures until --seconds are over
python -m benchmarks.overlap                      # again: what is left
python -m benchmarks.overlap --list --gpu h200    # what there is to measure; needs no GPU
"""
