"""Data: text or a source of one's own, the order of its samples, and batches ahead of time."""

from jshard.train.data.loader import Loader, local_rows
from jshard.train.data.source import Data, DataError, Sample, Source
from jshard.train.data.text import load_text
from jshard.train.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

__all__ = [
    "ByteTokenizer",
    "Data",
    "DataError",
    "HuggingFaceTokenizer",
    "Loader",
    "Sample",
    "Source",
    "Tokenizer",
    "load_text",
    "local_rows",
]
