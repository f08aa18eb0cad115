"""Checkpoints of other libraries: read box by box like jshard's, and written for other libraries.

Example:
    source = foreign_source("gpt2/")                          # safetensors; a folder of PyTorch's DCP, of ZeRO-3
    source = NamedSource(source, gpt.hf_names(config))        # under jshard's names
    rows = source.read("tokens/embedding", (slice(0, 8), slice(None)))

    write_safetensors("out/", ForeignSource(ours, gpt.hf_names(config)))
"""

from pathlib import Path

from jshard._paths import expanded
from jshard.checkpoint.formats.dcp import METADATA as _METADATA
from jshard.checkpoint.formats.dcp import DcpSource as DcpSource
from jshard.checkpoint.formats.dcp import write_dcp as write_dcp
from jshard.checkpoint.formats.safetensors import INDEX_SUFFIX as _INDEX_SUFFIX
from jshard.checkpoint.formats.safetensors import SUFFIX as _SUFFIX
from jshard.checkpoint.formats.safetensors import SafetensorsSource as SafetensorsSource
from jshard.checkpoint.formats.safetensors import write_safetensors as write_safetensors
from jshard.checkpoint.formats.source import ArraySource as ArraySource
from jshard.checkpoint.formats.source import CheckedNames as CheckedNames
from jshard.checkpoint.formats.source import ForeignSource as ForeignSource
from jshard.checkpoint.formats.source import NamedSource as NamedSource
from jshard.checkpoint.formats.source import Stored as Stored
from jshard.checkpoint.formats.source import check_settings as check_settings
from jshard.checkpoint.formats.torch_file import TorchSource as TorchSource
from jshard.checkpoint.formats.torch_file import is_torch_file as _is_torch_file
from jshard.checkpoint.formats.zero import ZeroSource as ZeroSource
from jshard.checkpoint.formats.zero import zero_folder as _zero_folder

Foreign = DcpSource | SafetensorsSource | ZeroSource | TorchSource


def foreign_source(path: str | Path) -> Foreign | None:
    """Opens a checkpoint of another library.

    Returns None if the path has no checkpoint of a known format. Raises `CheckpointError` if it cannot be read or its
    pickle names something that is not allowed, and `RunError` if it is damaged.
    """
    path = expanded(path)
    if (path / _METADATA).is_file():
        return DcpSource(path)
    if _is_safetensors(path):
        return SafetensorsSource(path)
    if path.is_dir() and _zero_folder(path):
        return ZeroSource(path)
    return TorchSource(path) if _is_torch_file(path) else None


def _is_safetensors(path: Path) -> bool:
    if path.is_file():
        return path.name.endswith((_SUFFIX, _INDEX_SUFFIX))
    return any(any(path.glob("*" + suffix)) for suffix in (_SUFFIX, _INDEX_SUFFIX))
