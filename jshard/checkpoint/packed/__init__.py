"""Packed files: their layout, who writes which piece, and reads of any box."""
