"""Pairs of replies as data: one that is preferred and one that is not, each after the conversation before it."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jshard._paths import expanded
from jshard._text import counted
from jshard.data.chat_rows import messages_of, not_rendered, read_rows
from jshard.data.chat_template import ChatTemplate, TemplateError, template_beside
from jshard.data.chats import digest, held_out_numbers, is_written
from jshard.data.documents import TableRow
from jshard.data.loader import Data, DataError, Sample
from jshard.data.tokenizer import HuggingFaceTokenizer

REPLIES = ("chosen", "rejected")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A pair of replies.

    Attributes:
        ids: of each conversation with its reply.
        is_reply: for each token of these, whether it is of the reply.
        number: by which the pair is held out or not: a hash of the row.
    """

    ids: tuple[np.ndarray, ...]
    is_reply: tuple[np.ndarray, ...]
    number: int

    @property
    def longest(self) -> int:
        """The number of tokens of the longer text."""
        return max(ids.size for ids in self.ids)


def load_pairs(
    path: str | Path,
    *,
    sequence_length: int,
    tokenizer: HuggingFaceTokenizer,
    template: ChatTemplate | None = None,
) -> Data:
    """Reads pairs of replies: JSON lines, Parquet, or datasets of Hugging Face, with `chosen` and `rejected`.

    Both are lists of messages, or with a list or a text `prompt` before them. A sample has "chosen_inputs",
    "chosen_targets" and "chosen_weights" (1 where the target is of the last reply, else 0), each of `sequence_length`,
    and the same of the rejected one. A pair of which a text is longer than `sequence_length + 1` tokens is left out,
    as a reply that is cut says nothing about the whole; the description counts these.

    Args:
        path: the file.
        sequence_length: tokens per text.
        tokenizer: of the model.
        template: by default the one in the folder of the tokenizer.

    Raises:
        DataError: the file cannot be read, or a row is no pair that the template renders; it names the line.

    Examples:
        >>> data = load_pairs("pairs.jsonl", sequence_length=1024, tokenizer=HuggingFaceTokenizer("qwen3/"))
    """
    path = expanded(path)
    template = template or template_beside(tokenizer.path)
    pairs = [_pair(row, tokenizer, template) for row in read_rows(path)]
    most = sequence_length + 1  # the last target is no input
    kept = [pair for pair in pairs if pair.longest <= most]
    num_long = len(pairs) - len(kept)
    note = f"; {num_long} left out: longer than {most} tokens" if num_long else ""
    train, held_out = _split(kept)
    if not train or not held_out:
        raise DataError(
            "There are not enough pairs.",
            where=str(path),
            why=f"of {counted(len(pairs), 'pair')}, {len(train)} are to train on and {len(held_out)} held out{note}.",
            do="more pairs, or longer sequences: --set sequence_length=4096",
        )
    texts = [ids for pair in kept for ids in pair.ids]
    return Data(
        train=Pairs(train, sequence_length),
        held_out=Pairs(held_out, sequence_length),
        description=f"{counted(len(train), 'pair')} of {path}; {len(held_out)} held out{note}",
        fingerprint=f"pairs {digest(f'{tokenizer.name} {sequence_length}', texts)}",
        tokens_per_sample=2 * sequence_length,
        tokenizer=tokenizer,
    )


def _split(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Returns the pairs to train on, and those that are held out."""
    numbers = held_out_numbers(pair.number for pair in pairs)
    train = []
    held_out = []
    for pair in pairs:
        side = held_out if pair.number in numbers else train
        side.append(pair)
    return train, held_out


def _pair(row: TableRow, tokenizer: HuggingFaceTokenizer, template: ChatTemplate) -> Pair:
    texts = []
    content = ""
    for key in REPLIES:
        messages = _with_prompt(row, key)
        content += json.dumps(messages, default=str)
        try:
            texts.append(template.last_reply(messages, tools=row.values.get("tools") or None))
        except TemplateError as error:
            raise not_rendered(row, template, error) from error
    encoded = tokenizer.encode_with_places([text.text for text in texts])
    ids = []
    is_reply = []
    for tokens, text in zip(encoded, texts, strict=True):
        ids.append(tokens.ids)
        is_reply.append(is_written(tokens, text))
    number = zlib.crc32(content.encode(errors="replace"))
    return Pair(tuple(ids), tuple(is_reply), number)


def _with_prompt(row: TableRow, key: str) -> list[dict[str, Any]]:
    """Returns the messages of a reply, after those of the prompt if the row has one."""
    values: dict[str, Any] = dict(row.values)
    if isinstance(values.get("prompt"), str) and isinstance(values.get(key), str):
        # Texts without roles: a message of the user, and the reply to it.
        user = {"role": "user", "content": values["prompt"]}
        return [user, {"role": "assistant", "content": values[key]}]
    messages = messages_of(row, key)
    if isinstance(values.get("prompt"), list):
        messages = [*messages_of(row, "prompt"), *messages]
    return messages


class Pairs:
    """Pairs of texts of one length: a `Source`."""

    def __init__(self, pairs: Sequence[Pair], sequence_length: int) -> None:
        self._pairs = pairs
        self._length = sequence_length

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int, /) -> Sample:
        pair = self._pairs[index]
        sample = {}
        for key, ids, is_reply in zip(REPLIES, pair.ids, pair.is_reply, strict=True):
            sample[f"{key}_inputs"] = self._padded(ids[:-1], np.int32)
            sample[f"{key}_targets"] = self._padded(ids[1:], np.int32)
            sample[f"{key}_weights"] = self._padded(is_reply[1:], np.float32)
        return sample

    def _padded(self, values: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
        padded = np.zeros(self._length, dtype)
        padded[: values.size] = values
        return padded
