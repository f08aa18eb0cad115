"""A dataset of Hugging Face as data without a copy on the disk: its rows are read while the run trains on them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jshard._text import counted
from jshard._types import Json
from jshard.data.chat_rows import chat_key_of
from jshard.data.chat_template import template_beside
from jshard.data.chats import ChatReader, load_chats
from jshard.data.documents import TableRow
from jshard.data.loader import Data, DataError, Sample, Source
from jshard.data.stream_packers import ChatPacker, Packer, TextPacker
from jshard.data.stream_rows import PREFIX, RowStream, open_rows, stream_address
from jshard.data.stream_source import StreamedSamples
from jshard.data.text import load_text
from jshard.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

_BYTES = ByteTokenizer()
_ROWS_AT_ONCE = 16
_COMPARED = 64  # samples that are held out, for the fingerprint


def load_stream(
    address: str | Path,
    *,
    sequence_length: int,
    batch_size: int,
    tokenizer: Tokenizer = _BYTES,
    held_out: Sequence[str | Path] = (),
    num_held_out: int = 100,
    key: str | None = None,
    pack: bool = True,
) -> Data:
    """Reads a dataset of Hugging Face while a run trains on it, without copying it to the disk.

    Rows with a text become samples as those of `load_text`, and rows with `messages` as those of `load_chats`, where
    conversations share a sequence in the order of the rows. Rows keep the order of the dataset, which starts over at
    its end. The files of the dataset are distributed over lanes: a batch has as many rows of each, so that a process
    reads the files of its own rows alone. There are as many lanes as the files allow and the batch size is a multiple
    of. A run stores the place in each lane with its checkpoints.

    Args:
        address: `hf:NAME[,CONFIG][:SPLIT]`, as in `datasets.load_dataset(NAME, CONFIG, split=SPLIT, streaming=True)`;
            NAME may be a local file or folder.
        sequence_length: tokens per sample.
        batch_size: samples in a global batch.
        tokenizer: bytes by default; conversations need that of the model.
        held_out: another such address, or files, to hold out; by default the first rows of the stream, which training
            then skips.
        num_held_out: how many samples are held out, at most.
        key: the column of texts or of messages; by default text, messages or conversations.
        pack: whether conversations share a sequence.

    Raises:
        MissingExtraError: the package `datasets` is not installed.
        DataError: the dataset cannot be opened, or its rows have no text and no messages.

    Examples:
        >>> data = load_stream("hf:HuggingFaceFW/fineweb,sample-10BT", sequence_length=1024, batch_size=64)
    """
    parsed = stream_address(address)
    if parsed is None:
        raise DataError(
            "The address is not that of a stream.",
            where=str(address),
            why="its form is hf:NAME[,CONFIG][:SPLIT].",
            do=f'load_stream("hf:{address}", ...)',
        )
    opened = open_rows(parsed)
    rows = dataclasses.replace(opened, num_lanes=_largest_divisor(batch_size, at_most=opened.num_files))
    settings = _RowSettings(tokenizer, sequence_length, key, pack)
    packer = settings.packer_for(_first_row(rows))
    if held_out:
        part = _held_out_elsewhere(held_out, settings, packer, num_held_out)
    else:
        part = _first_samples(rows, packer, num_held_out)
        rows = dataclasses.replace(rows, starts={0: _state_after(rows, part)})
    return Data(
        train=StreamedSamples(rows, packer),
        held_out=part.samples,
        description=_described(rows, settings, part),
        fingerprint=f"stream {_digest(rows, settings, part)}",
        tokens_per_sample=sequence_length,
        tokenizer=tokenizer,
    )


@dataclasses.dataclass(frozen=True)
class _RowSettings:
    """How rows become samples.

    Attributes:
        tokenizer: of texts or conversations.
        sequence_length: tokens per sample.
        key: the requested column; None for the default ones.
        pack: whether conversations share a sequence.
    """

    tokenizer: Tokenizer
    sequence_length: int
    key: str | None
    pack: bool

    def packer_for(self, row: TableRow) -> Packer[Any]:
        """Returns what makes samples of rows like the first one."""
        key = chat_key_of(row, self.key)
        if key is None:
            return TextPacker(self.tokenizer, self.sequence_length, self.key or "text")
        if not isinstance(self.tokenizer, HuggingFaceTokenizer):
            raise DataError(
                "Conversations need the tokenizer of the model.",
                where=row.where,
                why="its chat template says how the turns of a conversation are written.",
                do="--tokenizer qwen3/  # the folder with tokenizer.json and tokenizer_config.json",
            )
        template = template_beside(self.tokenizer.path)
        return ChatPacker(ChatReader(self.tokenizer, template, self.sequence_length, key), self.pack)


def _first_row(rows: RowStream) -> TableRow:
    group = next(rows.groups(0, 1))
    return group.rows[0]


def _largest_divisor(number: int, *, at_most: int) -> int:
    size = max(1, min(number, at_most))
    while number % size:
        size -= 1
    return size


# ---- what is held out


@dataclasses.dataclass(frozen=True)
class _HeldOut:
    """Samples that are held out.

    Attributes:
        samples: all of them.
        origin: where they are from, in words.
        num_rows: how many of the first rows of the stream they are made of; 0 if they are of others.
        state_after: of the stream after these rows; None at its end.
    """

    samples: Source
    origin: str
    num_rows: int = 0
    state_after: Json = None


def _first_samples(rows: RowStream, packer: Packer[Any], num_samples: int) -> _HeldOut:
    """Returns the first samples of a stream, or all if there are fewer."""
    samples: list[Sample] = []
    units = None
    num_rows = 0
    for group in rows.pass_of(0, _ROWS_AT_ONCE):
        if len(samples) >= num_samples:
            return _HeldOut(samples, f"the first {counted(num_rows, 'row')}", num_rows, group.place.state)
        num_rows += len(group.rows)
        units_of_group = packer.units_of(group.rows)
        units = units_of_group if units is None else packer.joined(units, units_of_group)
        while len(samples) < num_samples and (taken := packer.take(units)) is not None:
            samples.append(taken.sample)
            units = packer.rest(units, taken.num_units)
    return _HeldOut(samples, "all rows", num_rows)


def _state_after(rows: RowStream, part: _HeldOut) -> Json:
    """Returns the state of a stream behind what is held out of it; raises if nothing is left there."""
    if part.state_after is not None:
        return part.state_after
    num_samples = len(part.samples)
    raise DataError(
        "The stream ends within the part that is held out.",
        where=rows.address.text,
        why=f"the first of its {counted(rows.num_lanes, 'lane')} has {counted(part.num_rows, 'row')}, which make"
        f" {counted(num_samples, 'sample')}.",
        do=f"--held-out {PREFIX}{rows.address.name}:validation, or hold out less:"
        f" --set eval_sequences={max(1, num_samples // 20)}",
    )


def _held_out_elsewhere(
    held_out: Sequence[str | Path], settings: _RowSettings, packer: Packer[Any], num_samples: int
) -> _HeldOut:
    """Returns samples of another stream, or of files."""
    origin = ", ".join(map(str, held_out))
    addresses = [stream_address(argument) for argument in held_out]
    if len(addresses) == 1 and addresses[0] is not None:
        part = _first_samples(open_rows(addresses[0]), packer, num_samples)
        return _HeldOut(part.samples, origin)
    if any(addresses):
        raise DataError(
            "A stream is held out by itself.",
            where=f"--held-out {origin}",
            why="its first samples are taken, and of files all.",
            do=f"--held-out {next(address.text for address in addresses if address)}",
        )
    # Only the part that is held out is used.
    if isinstance(packer, ChatPacker):
        reader = packer.reader
        data = load_chats(
            held_out,
            sequence_length=settings.sequence_length,
            tokenizer=reader.tokenizer,
            held_out=held_out,
            key=reader.key,
            pack=settings.pack,
        )
    else:
        data = load_text(
            held_out,
            sequence_length=settings.sequence_length,
            tokenizer=settings.tokenizer,
            held_out=held_out,
            text_key=settings.key or "text",
        )
    return _HeldOut(data.held_out, origin)


# ---- what is said of it


def _described(rows: RowStream, settings: _RowSettings, part: _HeldOut) -> str:
    """Returns the line that a run prints of its data."""
    lanes = counted(rows.num_lanes, "lane")
    return (
        f"stream of {rows.address.text} in {lanes}: samples of {settings.sequence_length} tokens"
        f" ({settings.tokenizer.name}); {counted(len(part.samples), 'sample')} held out ({part.origin})"
    )


def _digest(rows: RowStream, settings: _RowSettings, part: _HeldOut) -> str:
    """Returns a text that differs if the samples of a run do, as far as the first ones show it."""
    address = rows.address
    # A local folder may have moved.
    name = Path(address.name).name if address.is_local else address.name
    words = (name, address.config, address.split, rows.num_lanes, settings.tokenizer.name)
    sha = hashlib.sha256(f"{words} {settings.sequence_length} {settings.key} {settings.pack} {part.num_rows}".encode())
    for number in range(min(len(part.samples), _COMPARED)):
        for array in part.samples[number].values():
            sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()[:16]
