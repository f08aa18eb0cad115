"""What the kernels ask of a GPU, as lowered and as compiled, and the table of it that the library ships."""
