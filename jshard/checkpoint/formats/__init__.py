"""Checkpoints of other worlds: read box by box as if they were ours, and written for others to read.

Example:
    source = foreign_source("gpt2/")                          # safetensors, or a folder of PyTorch's DCP
    source = NamedSource(source, gpt.hf_names(config))        # under our names
    rows = source.read("tokens/embedding", (slice(0, 8), slice(None)))

    write_safetensors("out/", whole_leaves(ForeignSource(ours, gpt.hf_names(config))))
"""

from jshard.checkpoint.formats.dcp import DcpSource as DcpSource
from jshard.checkpoint.formats.detect import foreign_source as foreign_source
from jshard.checkpoint.formats.names import ForeignSource as ForeignSource
from jshard.checkpoint.formats.names import NamedSource as NamedSource
from jshard.checkpoint.formats.names import Stored as Stored
from jshard.checkpoint.formats.safetensors import SafetensorsSource as SafetensorsSource
from jshard.checkpoint.formats.safetensors import write_safetensors as write_safetensors
from jshard.checkpoint.formats.source import Source as Source
from jshard.checkpoint.formats.source import StoredArray as StoredArray
from jshard.checkpoint.formats.source import whole_leaves as whole_leaves
