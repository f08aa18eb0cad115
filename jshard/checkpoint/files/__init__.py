"""Packed files: few large ones, which are valid safetensors files, in a folder or in a bucket."""
