"""How many blocks of a kernel a multiprocessor holds, and whether those of a collective find room beside them.

Numbers and rules only: no GPU is needed. Example:

    >>> from jshard.kernels import occupancy
    >>> h200 = occupancy.gpu("h200")
    >>> kernel = occupancy.Block(threads=128, registers=58, smem_bytes=41_024)
    >>> ring = occupancy.footprint("ring", gpu=h200, version="2.30.7")
    >>> occupancy.resident(h200, kernel), occupancy.drain(h200, kernel, ring.block)
    (5, 5)
    >>> occupancy.plans(h200, kernel, ring)[0].smem_pad_bytes
    74752
"""

from jshard.kernels.occupancy.blocks import PAD_UNIT_BYTES as PAD_UNIT_BYTES
from jshard.kernels.occupancy.blocks import Block as Block
from jshard.kernels.occupancy.blocks import Cost as Cost
from jshard.kernels.occupancy.blocks import check as check
from jshard.kernels.occupancy.blocks import cost as cost
from jshard.kernels.occupancy.blocks import drain as drain
from jshard.kernels.occupancy.blocks import fits as fits
from jshard.kernels.occupancy.blocks import limits as limits
from jshard.kernels.occupancy.blocks import pad_for as pad_for
from jshard.kernels.occupancy.blocks import paddings as paddings
from jshard.kernels.occupancy.blocks import refusals as refusals
from jshard.kernels.occupancy.blocks import resident as resident
from jshard.kernels.occupancy.blocks import room_beside as room_beside
from jshard.kernels.occupancy.blocks import split_bytes as split_bytes
from jshard.kernels.occupancy.errors import OccupancyError as OccupancyError
from jshard.kernels.occupancy.errors import OccupancyWarning as OccupancyWarning
from jshard.kernels.occupancy.footprints import ASSUMED_CTAS as ASSUMED_CTAS
from jshard.kernels.occupancy.footprints import COPY_ENGINE as COPY_ENGINE
from jshard.kernels.occupancy.footprints import FOOTPRINTS as FOOTPRINTS
from jshard.kernels.occupancy.footprints import CommFootprint as CommFootprint
from jshard.kernels.occupancy.footprints import footprint as footprint
from jshard.kernels.occupancy.gpus import GPUS as GPUS
from jshard.kernels.occupancy.gpus import GpuFacts as GpuFacts
from jshard.kernels.occupancy.gpus import gpu as gpu
from jshard.kernels.occupancy.plans import Plan as Plan
from jshard.kernels.occupancy.plans import plans as plans
from jshard.kernels.occupancy.plans import reserved_for as reserved_for
from jshard.kernels.occupancy.report import OccupancyReport as OccupancyReport
from jshard.kernels.occupancy.report import occupancy_report as occupancy_report
from jshard.kernels.occupancy.shipped import ShippedKernel as ShippedKernel
from jshard.kernels.occupancy.shipped import shipped_kernels as shipped_kernels
