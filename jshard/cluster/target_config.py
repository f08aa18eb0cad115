"""The description of an absent GPU for XLA's GPU compiler (a `GpuTargetConfigProto`), made from facts."""

from __future__ import annotations

from collections.abc import Mapping

from jshard.facts.gpu_target import HOPPER, AmdTarget, GpuTarget, NvidiaTarget, Rate

CUDNN = (9, 10)
"""The cuDNN version assumed for a GPU that is not present."""

# In a run, XLA schedules for the memory of JAX's allocator; here, without one, for 80 % of the described memory
# (GetSchedulerMemoryLimit). The described memory makes it schedule as with XLA_PYTHON_CLIENT_MEM_FRACTION=.95.
_ALLOCATED = 0.95
_UNSTATED = 0.80

_NVIDIA_TEXT = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {core_count}
  fpus_per_core: {fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {memory_bandwidth}
  l2_cache_size: {l2_cache_size}
  clock_rate_ghz: {clock_rate_ghz}
  device_memory_size: {described}
  shared_memory_per_block_optin: {shared_memory_per_block_optin}
  cuda_compute_capability {{
    major: {major}
{feature}  }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.0{extension}"
  device_address_bits: 64
  pcie_bandwidth: {pcie_bandwidth}
  ecc_enabled: true
  name: "{description}"
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "{dnn[0]}.{dnn[1]}.0"
{units}}}
platform_name: "CUDA"
dnn_version_info {{
  major: {dnn[0]}
  minor: {dnn[1]}
  patch: 0
}}
runtime_version {{
  major: 12
  minor: 9
  patch: 0
}}
device_description_str: "{description}"
"""


_AMD_TEXT = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 64
  shared_memory_per_block: {shared_memory}
  shared_memory_per_block_optin: {shared_memory}
  shared_memory_per_core: {shared_memory}
  threads_per_core_limit: 2048
  core_count: {core_count}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65536
  block_dim_limit_z: 65536
  memory_bandwidth: {memory_bandwidth}
  l2_cache_size: {l2_cache_size}
  clock_rate_ghz: {clock_rate_ghz}
  device_memory_size: {described}
  registers_per_core_limit: 131072
  registers_per_block_limit: 131072
  rocm_compute_capability {{
    gcn_arch_name: "{gfx}:sramecc+:xnack-"
  }}
}}
platform_name: "ROCM"
dnn_version_info {{
}}
device_description_str: "{description}"
"""


def target_config_text(target: GpuTarget) -> str:
    """Returns the text proto of a GPU, for `topologies.get_topology_desc(target_config=...)`."""
    if isinstance(target, AmdTarget):
        return _amd_text(target)
    assert isinstance(target, NvidiaTarget)
    return _nvidia_text(target)


def _described(target: GpuTarget) -> int:
    """Returns the memory to describe."""
    return round(target.device_memory_size * _ALLOCATED / _UNSTATED)


def _amd_text(target: AmdTarget) -> str:
    return _AMD_TEXT.format(
        **vars(target),
        described=_described(target),
        shared_memory=target.shared_memory_per_core,
    )


def _nvidia_text(target: NvidiaTarget) -> str:
    has_own_features = target.major >= HOPPER  # those of its own architecture alone, as in sm_90a
    units = ""
    if target.rates is not None:
        units += _units("scalar", target.rates.scalar)
        units += _units("matrix", target.rates.matrix)
    if target.links:
        units += f"  device_interconnect_info {{\n    active_links: {target.links}\n  }}\n"
    return _NVIDIA_TEXT.format(
        **vars(target),
        described=_described(target),
        feature="    feature_extension: ACCELERATED_FEATURES\n" if has_own_features else "",
        extension="a" if has_own_features else "",
        units=units,
        dnn=CUDNN,
    )


def _units(kind: str, rates: Mapping[int, Rate]) -> str:
    """Returns the rates of the scalar or of the matrix units, by dtype."""
    lines = [f"  {kind}_unit_description {{"]
    for dtype, rate in rates.items():
        lines += ["    rate_infos {", f"      key: {dtype}", "      value {"]
        lines += [f"        {name}: {value}" for name, value in vars(rate).items()]
        lines += ["      }", "    }"]
    lines += ["  }", ""]
    return "\n".join(lines)
