"""Checkpoints of other libraries: read box by box like jshard's, and written for other libraries.

Examples:
    >>> source = foreign_source("gpt2/")                          # safetensors; a folder of PyTorch's DCP, of ZeRO-3
    >>> source = NamedSource(source, gpt.hf_names(config))        # under jshard's names
    >>> rows = source.read("tokens/embedding", (slice(0, 8), slice(None)))

    >>> write_safetensors("out/", ForeignSource(ours, gpt.hf_names(config)))
"""

from jshard.checkpoint.formats.dcp import DcpSource as DcpSource
from jshard.checkpoint.formats.dcp_writer import write_dcp as write_dcp
from jshard.checkpoint.formats.names import ForeignSource as ForeignSource
from jshard.checkpoint.formats.names import NamedSource as NamedSource
from jshard.checkpoint.formats.registry import foreign_source as foreign_source
from jshard.checkpoint.formats.registry import register_format as register_format
from jshard.checkpoint.formats.safetensors import SafetensorsSource as SafetensorsSource
from jshard.checkpoint.formats.safetensors_writer import write_safetensors as write_safetensors
from jshard.checkpoint.formats.source import ArraySource as ArraySource
from jshard.checkpoint.formats.source import Box as Box
from jshard.checkpoint.formats.source import FormatSource as FormatSource
from jshard.checkpoint.formats.source import stored_array as stored_array
from jshard.checkpoint.formats.stored import CheckedNames as CheckedNames
from jshard.checkpoint.formats.stored import Names as Names
from jshard.checkpoint.formats.stored import Stored as Stored
from jshard.checkpoint.formats.stored import check_settings as check_settings
from jshard.checkpoint.formats.torch_file import TorchSource as TorchSource
from jshard.checkpoint.formats.zero import ZeroSource as ZeroSource
