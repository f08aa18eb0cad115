"""The data of a command: those of the model file, or the files on the command line, and their tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jshard.cli._config import option_of
from jshard.data import Data, Tokenizer
from jshard.data.chat_rows import chat_key
from jshard.data.chats import load_chats
from jshard.data.files import weighted
from jshard.data.stream_rows import stream_address
from jshard.data.streams import load_stream
from jshard.data.text import load_text
from jshard.data.token_files import Dtype
from jshard.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from jshard.errors import ShardingError
from jshard.recipes.model_file import ModelFile
from jshard.recipes.recipe import Recipe


def own_data(model_file: ModelFile, recipe: Recipe) -> Data | None:
    """Returns the model file's own data; None if it has none."""
    if model_file.data is None:
        return None
    data = model_file.data(recipe)
    if not isinstance(data, Data):
        result = "None" if data is None else f"a {type(data).__name__}"
        raise ShardingError(
            "The model file's `data` returns no data.",
            where=f"{model_file.path}: data(recipe)",
            why=f"it returns {result}.",
            do="return jshard.data.Data(train=..., held_out=..., description=..., fingerprint=...).",
        )
    return data


def data_of(
    model_file: ModelFile,
    recipe: Recipe,
    data: Sequence[Path],
    tokenizer: Path | None,
    *,
    held_out: Sequence[Path] = (),
    text_key: str | None = None,
    dtype: Dtype | None = None,
    pack: str | None = None,
) -> Data:
    """Returns the model file's own data, or the data of the files on the command line."""
    options = {"data": data, "tokenizer": tokenizer, "held_out": held_out, "text_key": text_key, "dtype": dtype}
    options["pack"] = pack
    # By its truth: without the option, each is empty or None.
    used = [option_of(name) for name, value in options.items() if value]
    if model_file.data is not None and used:
        raise ShardingError(
            "The model file has its own data.",
            where=f"{' and '.join(used)}, {model_file.path}: data(recipe)",
            why="they apply only if the file has no `data`.",
            do="leave out the options, or remove `data` from the file.",
        )
    data_of_file = own_data(model_file, recipe)
    if data_of_file is not None:
        return data_of_file
    address = _stream_of(data)
    if address is not None:
        return load_stream(
            address,
            sequence_length=recipe.sequence_length,
            batch_size=recipe.batch_size,
            tokenizer=tokenizer_of(tokenizer),
            held_out=held_out,
            num_held_out=recipe.eval_sequences,
            key=text_key,
            pack=pack != "no",
        )
    key = _chat_key(data, text_key)
    if key is not None:
        if tokenizer is None:
            raise _no_chat_tokenizer(data)
        return load_chats(
            data,
            sequence_length=recipe.sequence_length,
            tokenizer=HuggingFaceTokenizer(tokenizer),
            held_out=held_out,
            key=key,
            pack=pack != "no",
        )
    if pack is not None:
        raise ShardingError(
            "Only conversations are packed.",
            where=f"--pack {pack} --data {' '.join(map(str, data))}",
            why="a sample of text is consecutive tokens of one text after another.",
            do="leave out --pack.",
        )
    return load_text(
        data,
        sequence_length=recipe.sequence_length,
        tokenizer=tokenizer_of(tokenizer),
        held_out=held_out,
        text_key=text_key or "text",  # None in the arguments: so it is seen whether the option is used
        dtype=dtype,
        vocab_size=getattr(recipe.model, "vocab_size", None),  # by convention; a config may not have it
    )


def _stream_of(data: Sequence[Path]) -> Path | None:
    """Returns the address of a stream; None for files."""
    streams = [path for path in data if stream_address(path) is not None]
    if not streams:
        return None
    if len(data) == 1:
        return streams[0]
    raise ShardingError(
        "A stream is the only data of a run.",
        where=f"--data {' '.join(map(str, data))}",
        why="its rows have no numbers by which they could be mixed with others.",
        do=f"--data {streams[0]}",
    )


def _chat_key(data: Sequence[Path], text_key: str | None) -> str | None:
    """Returns the key under which files have conversations; None if they have text."""
    files, _ = weighted(data)
    keys = [chat_key(file, text_key) for file in files]
    if not any(keys):
        return None
    if len(set(keys)) == 1:
        return keys[0]
    raise ShardingError(
        "The data are of several kinds.",
        where=[f"{file}: {'text' if key is None else key}" for file, key in zip(files, keys, strict=True)],
        why="conversations have a loss on some tokens, and text on all; one run has one of them, under one key.",
        do="--data chats.jsonl  # those of one kind",
    )


def _no_chat_tokenizer(data: Sequence[Path]) -> ShardingError:
    return ShardingError(
        "Conversations need the tokenizer of the model.",
        where=f"--data {' '.join(map(str, data))}",
        why="its chat template says how the turns of a conversation are written.",
        do="--tokenizer qwen3/  # the folder with tokenizer.json and tokenizer_config.json",
    )


def tokenizer_of(path: Path | None) -> Tokenizer:
    """Returns the tokenizer of a file; without one every byte is a token."""
    return ByteTokenizer() if path is None else HuggingFaceTokenizer(path)


def loss_unit(model_file: ModelFile, data: Data) -> str:
    """Returns the unit of the loss; empty if only the model file knows it."""
    if model_file.data is not None:
        return ""
    if isinstance(data.tokenizer, ByteTokenizer):
        return " nats per byte"
    return " nats per token"
