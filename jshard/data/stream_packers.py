"""Rows of a stream as units that samples are made of: tokens of text, or conversations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from jshard.data.chats import ChatReader
from jshard.data.documents import TableRow, no_text
from jshard.data.loader import DataError, Sample
from jshard.data.packed_chats import Chat, sequence_of
from jshard.data.text import with_ends
from jshard.data.tokenizer import ByteTokenizer, Tokenizer

Units = TypeVar("Units", bound=np.ndarray | list[Chat])
"""What samples are made of, in the order of the rows."""


@dataclasses.dataclass(frozen=True)
class Taken:
    """A sample, and how many units it has used up."""

    sample: Sample
    num_units: int


class Packer(Protocol[Units]):
    """Makes samples of rows."""

    def units_of(self, rows: Sequence[TableRow]) -> Units:
        """Returns what the rows contain."""
        ...

    def joined(self, first: Units, second: Units) -> Units:
        """Returns the units of both."""
        ...

    def rest(self, units: Units, num_used: int) -> Units:
        """Returns the units without the first ones."""
        ...

    def take(self, units: Units) -> Taken | None:
        """Returns the next sample; None if it needs more units."""
        ...


@dataclasses.dataclass(frozen=True)
class TextPacker:
    """Consecutive tokens of one text after another, as in the samples of files.

    Attributes:
        tokenizer: of the texts.
        sequence_length: of the inputs.
        text_key: the column of a text.
    """

    tokenizer: Tokenizer
    sequence_length: int
    text_key: str

    def units_of(self, rows: Sequence[TableRow]) -> np.ndarray:
        """See `Packer.units_of`."""
        texts = [self._text(row) for row in rows]
        # For rows without any text, which are no documents.
        empty = np.empty(0, np.min_scalar_type(self.tokenizer.vocab_size - 1))
        return np.concatenate([empty, *with_ends(self.tokenizer, [text for text in texts if text])])

    def joined(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """See `Packer.joined`."""
        return np.concatenate([first, second])

    def rest(self, units: np.ndarray, num_used: int) -> np.ndarray:
        """See `Packer.rest`."""
        return units[num_used:]

    def take(self, units: np.ndarray) -> Taken | None:
        """See `Packer.take`."""
        length = self.sequence_length
        if units.size <= length:
            return None
        window = units[: length + 1].astype(np.int32)
        # The last target is the first input of the next sample.
        return Taken({"inputs": window[:-1], "targets": window[1:]}, length)

    def _text(self, row: TableRow) -> bytes:
        text = row.values.get(self.text_key)
        if text is None and self.text_key in row.values:
            return b""
        if not isinstance(text, str):
            kinds = {key: type(value).__name__ for key, value in row.values.items()}
            raise no_text(row.where, self.text_key, kinds)
        content = text.encode(errors="replace")
        if isinstance(self.tokenizer, ByteTokenizer) and b"\0" in content:
            raise DataError(
                "A document has zero bytes.",
                where=row.where,
                why="as tokens are bytes, a zero byte is the end of a text.",
                do="--tokenizer tokenizer.json  # its end of text is not a byte",
            )
        return content


@dataclasses.dataclass(frozen=True)
class ChatPacker:
    """Conversations, as many in a sample as fit in the order of the rows.

    Attributes:
        reader: renders and tokenizes them.
        pack: whether several share a sequence.
    """

    reader: ChatReader
    pack: bool

    def units_of(self, rows: Sequence[TableRow]) -> list[Chat]:
        """See `Packer.units_of`."""
        return list(self.reader.part_of(rows).chats)

    def joined(self, first: list[Chat], second: list[Chat]) -> list[Chat]:
        """See `Packer.joined`."""
        return first + second

    def rest(self, units: list[Chat], num_used: int) -> list[Chat]:
        """See `Packer.rest`."""
        return units[num_used:]

    def take(self, units: list[Chat]) -> Taken | None:
        """See `Packer.take`."""
        length = self.reader.sequence_length
        num_fitting = 0
        room = length
        for chat in units:
            room -= chat.ids.size - 1
            if room < 0:
                break
            num_fitting += 1
            if not self.pack:
                break
        # The next conversation might fit as well.
        if not units or (self.pack and num_fitting == len(units) and room > 0):
            return None
        return Taken(sequence_of(units[:num_fitting], length, pack=self.pack), num_fitting)
