"""The model files of the grid for plain Flax, with gradients of weights in float32."""
