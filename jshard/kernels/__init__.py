"""Pallas kernels that leave room for communication, and attention by cuDNN where it is available.

Examples:
    >>> y = js.kernels.matmul(x, w, occupancy=js.kernels.Occupancy(reserved_sms=16))
"""

from jshard.kernels.attention import attention as attention
from jshard.kernels.backend import KernelError as KernelError
from jshard.kernels.backend import Occupancy as Occupancy
from jshard.kernels.norm import layer_norm as layer_norm
from jshard.kernels.norm import rms_norm as rms_norm
from jshard.kernels.products import matmul as matmul
from jshard.kernels.products import mlp as mlp
