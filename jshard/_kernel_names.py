"""The names by which the kernels of `jshard.kernels` are known in traced and compiled programs."""

import re

PREFIX = "jshard_"
"""What the name of every kernel begins with."""

PRODUCT = "jshard.kernels product"
"""What the results of their products are called: a policy of `jax.checkpoint` sees no matrix product in a kernel."""

CONTEXT = "context"
"""What the result of attention is called, here and in MaxText."""

ATTENTION = "dot_product_attention_fwd_wrapper"
"""The operation of JAX that is cuDNN's attention: its results are the context, and what backward needs beside it."""

_SCOPE = re.compile(r"jshard\.kernels\.(\w+)\[(\w+)\]")


def scope(kernel: str, form: str) -> str:
    """The scope of all operations of a kernel in a form, "mosaic", "interpret" or "xla"."""
    return f"jshard.kernels.{kernel}[{form}]"


def kernels_of(place: str) -> list[tuple[str, str]]:
    """Names and forms of the kernels whose scopes are in a text, the outermost first."""
    return _SCOPE.findall(place)
