"""How many blocks of a kernel fit on a multiprocessor, and whether those of a collective fit beside them.

Numbers and rules only; no GPU is needed. Example:

    >>> from jshard import occupancy
    >>> h200 = occupancy.gpu("h200")
    >>> kernel = occupancy.Block(threads=128, registers=58, smem_bytes=41_024)
    >>> ring = occupancy.footprint("ring", gpu=h200, version="2.30.7")
    >>> occupancy.resident(h200, kernel), occupancy.drain(h200, kernel, ring.block)
    (5, 5)
    >>> occupancy.plans(h200, kernel, ring)[0].smem_pad_bytes
    74752
"""

from jshard.facts.gpus import GPUS as GPUS
from jshard.facts.gpus import GpuFacts as GpuFacts
from jshard.facts.gpus import OccupancyError as OccupancyError
from jshard.facts.gpus import OccupancyWarning as OccupancyWarning
from jshard.facts.gpus import gpu as gpu
from jshard.occupancy.blocks import Block as Block
from jshard.occupancy.blocks import Plan as Plan
from jshard.occupancy.blocks import check as check
from jshard.occupancy.blocks import drain as drain
from jshard.occupancy.blocks import limits as limits
from jshard.occupancy.blocks import paddings as paddings
from jshard.occupancy.blocks import plans as plans
from jshard.occupancy.blocks import refusals as refusals
from jshard.occupancy.blocks import reserved_for as reserved_for
from jshard.occupancy.blocks import resident as resident
from jshard.occupancy.blocks import room_beside as room_beside
from jshard.occupancy.footprints import ASSUMED_CTAS as ASSUMED_CTAS
from jshard.occupancy.footprints import COPY_ENGINE as COPY_ENGINE
from jshard.occupancy.footprints import FOOTPRINTS as FOOTPRINTS
from jshard.occupancy.footprints import SHIPPED as SHIPPED
from jshard.occupancy.footprints import CommFootprint as CommFootprint
from jshard.occupancy.footprints import ShippedKernel as ShippedKernel
from jshard.occupancy.footprints import footprint as footprint
