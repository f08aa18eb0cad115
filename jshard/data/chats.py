"""Conversations as data: rendered by the tokenizer's chat template, with a loss on the assistant's tokens alone.

Several conversations share a sequence. They are numbered in it, and their positions begin at 0, so that a model can
keep them apart.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jshard._text import counted
from jshard.data.chat_rows import messages_of, not_rendered, read_rows
from jshard.data.chat_template import ChatTemplate, Rendered, TemplateError, template_beside
from jshard.data.documents import TableRow
from jshard.data.files import weighted
from jshard.data.loader import Data, DataError, Mixture, Source
from jshard.data.packed_chats import Chat, PackedChats
from jshard.data.tokenizer import HuggingFaceTokenizer, PlacedTokens

_HELD_OUT_PER_MILLE = 50  # a twentieth
_FEWEST_TO_SPLIT_BY_HASH = 200  # of fewer, too many or none may be held out
_IN_A_BATCH = 512  # conversations that are tokenized at once


def load_chats(
    paths: Sequence[str | Path],
    *,
    sequence_length: int,
    tokenizer: HuggingFaceTokenizer,
    template: ChatTemplate | None = None,
    held_out: Sequence[str | Path] = (),
    key: str | None = None,
    pack: bool = True,
) -> Data:
    """Reads conversations: JSON lines, Parquet, or datasets of Hugging Face, whose rows have `messages`.

    A sample has "inputs", "targets" (the same tokens one position later) and "weights" (1 where the target is a token
    that the assistant writes, else 0), each of `sequence_length`. With `pack` it has several conversations, and also
    "segment_ids", which number them from 1 (0 is padding), and "positions", which begin at 0 in each.

    A conversation of more than `sequence_length + 1` tokens is cut at its end; one without a token to learn is left
    out. The description counts both.

    Args:
        paths: files; if all are `"PATH=WEIGHT"`, each provides that share of the samples, see `Mixture`.
        sequence_length: tokens per sample.
        tokenizer: of the model.
        template: by default the one in the folder of the tokenizer.
        held_out: files to hold out; by default a twentieth of the conversations.
        key: of the messages in a row; by default "messages" or "conversations".
        pack: whether conversations share a sequence; else each has its own, with padding at the end.

    Raises:
        DataError: a file cannot be read, or a row is no conversation that the template renders; it names the line.

    Examples:
        >>> tokenizer = HuggingFaceTokenizer("qwen3/tokenizer.json")
        >>> data = load_chats(["chats.jsonl"], sequence_length=2048, tokenizer=tokenizer)
    """
    files, weights = weighted(paths)
    reader = ChatReader(tokenizer, template or template_beside(tokenizer.path), sequence_length, key)
    split = reader.split(files, [Path(file) for file in held_out])
    # With weights each file is a source of its own.
    parts = split.train if weights else [_joined(split.train)]
    _check_not_empty(parts, split.held_out, files)

    sources: list[Source] = [PackedChats(part.chats, sequence_length, pack=pack) for part in parts]
    train = sources[0] if len(sources) == 1 else Mixture(sources, weights)
    settings = f"{tokenizer.name} {sequence_length} {pack} {weights}"
    return Data(
        train=train,
        held_out=PackedChats(split.held_out.chats, sequence_length, pack=pack),
        description=_described(paths, parts, split.held_out, num_sequences=len(train), length=sequence_length),
        fingerprint=f"chats {digest(settings, _arrays_of([*parts, split.held_out]))}",
        tokens_per_sample=sequence_length,
        tokenizer=tokenizer,
    )


def digest(settings: str, arrays: Iterable[np.ndarray]) -> str:
    """Returns a text that differs if the samples of a run do."""
    sha = hashlib.sha256(settings.encode())
    for array in arrays:
        sha.update(array.tobytes())
    return sha.hexdigest()[:16]


def _arrays_of(parts: Iterable[ChatPart]) -> Iterator[np.ndarray]:
    for part in parts:
        for chat in part.chats:
            yield chat.ids
            yield chat.is_learned


# ---- what is read


@dataclasses.dataclass(frozen=True)
class ChatPart:
    """Conversations that belong together, and what became of the rows they are from.

    Attributes:
        chats: the texts to train on.
        num_rows: conversations that were read.
        num_cut: texts that were too long.
        num_dropped: texts without a token to learn.
        num_by_turn: conversations with a text for each reply.
    """

    chats: Sequence[Chat]
    num_rows: int = 0
    num_cut: int = 0
    num_dropped: int = 0
    num_by_turn: int = 0


@dataclasses.dataclass(frozen=True)
class _ChatSplit:
    """The conversations to train on, by file, and those that are held out of all."""

    train: Sequence[ChatPart]
    held_out: ChatPart


def _joined(parts: Sequence[ChatPart]) -> ChatPart:
    chats: list[Chat] = []
    num_rows = 0
    num_cut = 0
    num_dropped = 0
    num_by_turn = 0
    for part in parts:
        chats += part.chats
        num_rows += part.num_rows
        num_cut += part.num_cut
        num_dropped += part.num_dropped
        num_by_turn += part.num_by_turn
    return ChatPart(chats, num_rows, num_cut, num_dropped, num_by_turn)


def held_out_numbers(numbers: Iterable[int]) -> set[int]:
    """Returns the numbers of a twentieth of some texts, which are hashes of their content.

    Of many it is by the hash, so that a text stays on its side when others come; of few it is the last ones.
    """
    # Texts of one conversation have one number, and stay together.
    distinct = list(dict.fromkeys(numbers))
    if len(distinct) >= _FEWEST_TO_SPLIT_BY_HASH:
        return {number for number in distinct if number % 1000 < _HELD_OUT_PER_MILLE}
    count = max(1, len(distinct) * _HELD_OUT_PER_MILLE // 1000)
    return set(distinct[-count:])


@dataclasses.dataclass(frozen=True)
class _ChatText:
    """A text of a conversation, before it is tokenized."""

    rendered: Rendered
    number: int


@dataclasses.dataclass(frozen=True)
class ChatReader:
    """Reads files of conversations into tokens."""

    tokenizer: HuggingFaceTokenizer
    template: ChatTemplate
    sequence_length: int
    key: str | None

    def read(self, path: Path) -> ChatPart:
        """Returns the conversations of a file or a dataset."""
        return self.part_of(read_rows(path))

    def part_of(self, rows: Iterable[TableRow]) -> ChatPart:
        """Returns the conversations of rows."""
        chats: list[Chat] = []
        num_rows = num_cut = num_dropped = num_by_turn = 0
        texts: list[_ChatText] = []
        for row in rows:
            texts_of_row = self._texts(row)
            num_rows += 1
            num_by_turn += len(texts_of_row) > 1
            texts += texts_of_row
        most = self.sequence_length + 1  # the last target is no input
        for text, tokens in self._tokenized(texts):
            is_learned = is_written(tokens, text.rendered)
            num_cut += len(tokens.ids) > most
            # The first token is no target.
            if is_learned[1:most].any():
                chats.append(Chat(tokens.ids[:most], is_learned[:most], text.number))
            else:
                num_dropped += 1
        return ChatPart(chats, num_rows, num_cut, num_dropped, num_by_turn)

    def split(self, files: Sequence[Path], held_out: Sequence[Path]) -> _ChatSplit:
        """Returns the conversations of files, of which a twentieth is held out if no files are for that."""
        parts = [self.read(file) for file in files]
        if held_out:
            return _ChatSplit(parts, _joined([self.read(file) for file in held_out]))
        train = []
        held_out_chats: list[Chat] = []
        for part in parts:
            numbers = held_out_numbers(chat.number for chat in part.chats)
            held_out_chats += [chat for chat in part.chats if chat.number in numbers]
            chats = [chat for chat in part.chats if chat.number not in numbers]
            # What became of the rows is counted once, with those to train on.
            train.append(dataclasses.replace(part, chats=chats))
        return _ChatSplit(train, ChatPart(held_out_chats))

    def _texts(self, row: TableRow) -> list[_ChatText]:
        messages = messages_of(row, self.key)
        content = json.dumps(messages, default=str)
        tools = row.values.get("tools")
        try:
            samples = self.template.samples(messages, tools=tools or None)
        except TemplateError as error:
            raise not_rendered(row, self.template, error) from error
        number = zlib.crc32(content.encode(errors="replace"))
        return [_ChatText(sample, number) for sample in samples]

    def _tokenized(self, texts: Sequence[_ChatText]) -> Iterator[tuple[_ChatText, PlacedTokens]]:
        # Some at a time: the encodings of all would take some hundred times the bytes of their ids.
        for start in range(0, len(texts), _IN_A_BATCH):
            batch = texts[start : start + _IN_A_BATCH]
            encoded = self.tokenizer.encode_with_places([text.rendered.text for text in batch])
            yield from zip(batch, encoded, strict=True)


def is_written(tokens: PlacedTokens, rendered: Rendered) -> np.ndarray:
    """Returns for each token whether it has a character that the assistant writes."""
    result = np.zeros(len(tokens.ids), bool)
    for span in rendered.replies:
        result |= (tokens.starts < span.stop) & (tokens.stops > span.start)
    return result


def _check_not_empty(parts: Sequence[ChatPart], held_out: ChatPart, files: Sequence[Path]) -> None:
    if all(part.chats for part in parts) and held_out.chats:
        return
    train = _joined(parts)
    sides = f"{len(train.chats)} are to train on and {len(held_out.chats)} held out"
    raise DataError(
        "There are not enough conversations.",
        where=[str(file) for file in files],
        why=f"of {counted(train.num_rows, 'conversation')}, {sides};"
        f" {train.num_dropped} have no token of the assistant within the sequence length.",
        do="--held-out other.jsonl, more conversations, or longer sequences: --set sequence_length=4096",
    )


# ---- what is said of it


def _described(
    paths: Sequence[str | Path], parts: Sequence[ChatPart], held_out: ChatPart, *, num_sequences: int, length: int
) -> str:
    """Returns the line that a run prints of its data."""
    read = _joined([*parts, held_out])
    chats = _joined(parts).chats
    num_tokens = 0
    num_targets = 0
    num_learned = 0
    for chat in chats:
        num_tokens += chat.ids.size
        num_targets += chat.ids.size - 1  # the first token is no target
        num_learned += int(chat.is_learned[1:].sum())
    share_used = num_targets / (num_sequences * length)

    # A conversation that is split by turn is several texts.
    texts = counted(len(chats), "text" if read.num_by_turn else "conversation")
    sequences = f"{counted(num_sequences, 'sequence')} of {length} ({share_used:.0%} full)"
    line = (
        f"{texts} of {', '.join(map(str, paths))}: {num_tokens:,} tokens, {num_learned:,} of them the assistant's, "
        f"in {sequences}; {len(held_out.chats)} held out"
    )
    return "; ".join([line, *_notes_on(read, length)])


def _notes_on(read: ChatPart, length: int) -> list[str]:
    """Returns what became of the rows that are not in the samples as they are."""
    notes = []
    if read.num_by_turn:
        notes.append(f"{counted(read.num_by_turn, 'conversation')} split by turn")
    if read.num_cut:
        notes.append(f"{read.num_cut} cut to {length + 1} tokens")
    if read.num_dropped:
        notes.append(f"{read.num_dropped} left out: no token of the assistant")
    return notes
