"""Pallas kernels that leave room for communication, and the model of how much room there is.

Example:
    >>> y = js.kernels.matmul(x, w, occupancy=js.kernels.Occupancy(reserved_sms=16))
"""

from jshard.kernels.knobs import KernelError as KernelError
from jshard.kernels.knobs import Occupancy as Occupancy
from jshard.kernels.matmul import matmul as matmul
from jshard.kernels.mlp import mlp as mlp
from jshard.kernels.norm import layer_norm as layer_norm
from jshard.kernels.norm import rms_norm as rms_norm
