"""How many blocks of a kernel fit on a multiprocessor, and whether those of a collective fit beside them.

Numbers and rules only; no GPU is needed.

Examples:
    >>> from jshard import occupancy
    >>> h200 = occupancy.gpu("h200")
    >>> kernel = occupancy.Block(threads=128, registers=58, smem_bytes=41_024)
    >>> ring = occupancy.footprint("ring", gpu=h200, version="2.30.7")
    >>> occupancy.resident(h200, kernel), occupancy.drain(h200, kernel, ring.block)
    (5, 5)
    >>> occupancy.plans(h200, kernel, ring)[0].smem_pad_bytes
    74752

Modules, from the bottom up:

    blocks           which thread blocks fit on a multiprocessor
    footprints       the blocks of a collective
    room_plans       the ways to leave room for a collective beside a kernel
    shipped_kernels  the blocks of jshard's kernels
    workgroups       which workgroups fit on a compute unit of an AMD GPU
    rccl             the workgroups of a collective there
    device           the device that a step is tuned for
    products         the matrix products of a model
    timings          measured times, and the best setting according to them
    measured         the file of measurements
    tuning_bench     measures settings, on a GPU or by the model
    gpu_bench        the programs that are measured
    step_times       the estimated times of a step's products and collectives
    kernel_choice    the room that each kernel leaves
    comm_settings    settings of XLA and NCCL
    overlap          `js.tune_overlap`, which chooses all of these
    tune             `jshard tune`, which measures the products of a model
"""

from jshard.facts.amd_gpus import AMD_GPUS as AMD_GPUS
from jshard.facts.amd_gpus import AmdGpuFacts as AmdGpuFacts
from jshard.facts.amd_gpus import amd_gpu as amd_gpu
from jshard.facts.gpus import GPUS as GPUS
from jshard.facts.gpus import GpuFacts as GpuFacts
from jshard.facts.gpus import OccupancyError as OccupancyError
from jshard.facts.gpus import OccupancyWarning as OccupancyWarning
from jshard.facts.gpus import gpu as gpu
from jshard.occupancy.blocks import Block as Block
from jshard.occupancy.blocks import check as check
from jshard.occupancy.blocks import drain as drain
from jshard.occupancy.blocks import limits as limits
from jshard.occupancy.blocks import paddings as paddings
from jshard.occupancy.blocks import refusals as refusals
from jshard.occupancy.blocks import resident as resident
from jshard.occupancy.blocks import room_beside as room_beside
from jshard.occupancy.footprints import ASSUMED_CTAS as ASSUMED_CTAS
from jshard.occupancy.footprints import COPY_ENGINE as COPY_ENGINE
from jshard.occupancy.footprints import FOOTPRINTS as FOOTPRINTS
from jshard.occupancy.footprints import CommFootprint as CommFootprint
from jshard.occupancy.footprints import footprint as footprint
from jshard.occupancy.rccl import RCCL_FOOTPRINTS as RCCL_FOOTPRINTS
from jshard.occupancy.rccl import RcclFootprint as RcclFootprint
from jshard.occupancy.rccl import rccl_footprint as rccl_footprint
from jshard.occupancy.room_plans import Plan as Plan
from jshard.occupancy.room_plans import plans as plans
from jshard.occupancy.room_plans import reserved_for as reserved_for
from jshard.occupancy.shipped_kernels import SHIPPED as SHIPPED
from jshard.occupancy.shipped_kernels import ShippedKernel as ShippedKernel
from jshard.occupancy.shipped_kernels import shipped_for as shipped_for
from jshard.occupancy.workgroups import Workgroup as Workgroup
