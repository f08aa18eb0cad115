"""The data of a command: those of the model file, or the files on the command line, and their tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jshard.cli._config import option_of
from jshard.data import Data, Tokenizer
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
) -> Data:
    """Returns the model file's own data, or the data of the files on the command line."""
    options = {"data": data, "tokenizer": tokenizer, "held_out": held_out, "text_key": text_key, "dtype": dtype}
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
    return load_text(
        data,
        sequence_length=recipe.sequence_length,
        tokenizer=tokenizer_of(tokenizer),
        held_out=held_out,
        text_key=text_key or "text",  # None in the arguments: so it is seen whether the option is used
        dtype=dtype,
        vocab_size=getattr(recipe.model, "vocab_size", None),  # by convention; a config may not have it
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
